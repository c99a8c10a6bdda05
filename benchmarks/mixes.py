"""The requests that the engines are compared on. All requests of a mix arrive at once; all are deterministic.

A request is a dict with "id", "prompt_token_ids" and "max_tokens", the exact length of its answer.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from coursekit.workloads import load_mix

Mix = list[dict[str, Any]]

SEED = 20231
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000  # ordinary tokens of SmolLM2's vocabulary, none of them special


def named_mix(name: str) -> Mix:
    """ "chat48", "instruct64", or "alone": one request of 128 prompt tokens that wants 128."""
    if name == "alone":
        return mix_of([128], [128])
    return [asdict(request) for request in load_mix(name)]  # type: ignore[arg-type]  # it refuses others


def mix_of(prompt_lens: list[int], output_lens: list[int]) -> Mix:
    """Requests of these lengths with random prompts."""
    rng = np.random.default_rng(SEED)
    return [
        {
            "id": str(i),
            "prompt_token_ids": rng.integers(FIRST_TOKEN, LAST_TOKEN, prompt_len).tolist(),
            "max_tokens": output_len,
        }
        for i, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True))
    ]


def spread_lengths(count: int, mean: int, spread: float) -> list[int]:
    """`count` log-normal lengths >= 1 in random order, whose sum is count × mean whatever the spread.

    spread: standard deviation of the logarithm; 0 makes all equal.
    """
    drawn = np.exp(spread * np.random.default_rng(SEED).standard_normal(count))
    exact = 1 + (count * (mean - 1)) * drawn / drawn.sum()
    lengths = np.floor(exact).astype(int)
    left_over = count * mean - int(lengths.sum())
    lengths[np.argsort(lengths - exact)[:left_over]] += 1  # the largest fractions round up
    return lengths.tolist()
