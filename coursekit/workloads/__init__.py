"""The request mixes of the lessons, the demo and the benchmarks: made, real, and drawn like the paper's.

Everything here is deterministic: files of the package, or draws from a seeded generator.
"""

import gzip
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np

Lengths = np.ndarray
"""int64 [n, 2]: prompt tokens and generated tokens of n requests, in order of arrival."""

PAPER_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
"""Mean prompt and output tokens of the PagedAttention paper's two workloads (its figure 11)."""

PAPER_MAX_LEN = 2048
"""Longest sequence of the models in the paper's evaluation (OPT, LLaMA)."""

LENGTH_SIGMA = 1.0
"""Spread of the log of a length. The paper prints means only, so this is ours: the real Azure conversations
have 0.99 (prompts) and 0.86 (outputs), and 1.0 is the round value beside them."""


@dataclass(frozen=True)
class Request:
    """One request of a mix: its name, its prompt as token ids, and exactly how many tokens to generate."""

    id: str
    prompt_token_ids: list[int]
    max_tokens: int


def load_mix(name: Literal["chat48", "instruct64"] = "chat48") -> list[Request]:
    """The requests of a made mix, in order of arrival."""
    if name not in ("chat48", "instruct64"):
        raise ValueError(f"no request mix {name!r}; there are 'chat48' and 'instruct64'")
    rows = json.loads(_read(f"{name}.json"))
    return [Request(row["id"], row["prompt_token_ids"], row["max_tokens"]) for row in rows]


def azure_lengths(trace: Literal["conv", "code"] = "conv") -> Lengths:
    """int64 [n, 2]: context and generated tokens of real requests to Azure, in order of arrival.

    `conv` is conversation (19 366 requests), `code` is code completion (8 819). Source: Azure Public Dataset,
    AzureLLMInferenceTrace_conv and _code of 2023, Microsoft, CC-BY 4.0; Patel et al., Splitwise, 2024.
    """
    if trace not in ("conv", "code"):
        raise ValueError(f"no Azure trace {trace!r}; there are 'conv' and 'code'")
    lines = gzip.decompress(_read(f"azure_llm_2023_{trace}.csv.gz")).decode().splitlines()
    return np.loadtxt(lines, dtype=np.int64, delimiter=",", skiprows=1)


def lognormal_lengths(workload: Literal["sharegpt", "alpaca"], n: int, seed: int) -> Lengths:
    """int64 [n, 2]: log-normal prompt and output lengths with the means of one of the paper's workloads.

    Both are drawn independently, at least 1, and together at most `PAPER_MAX_LEN`: the output of a request
    that would go on is cut there, as a server does. That lowers the mean ShareGPT output by some 4 %.
    """
    if workload not in PAPER_MEANS:
        raise ValueError(f"no workload {workload!r}; there are 'sharegpt' and 'alpaca'")
    mu = np.log(PAPER_MEANS[workload]) - LENGTH_SIGMA**2 / 2  # its mean is exp(mu + sigma^2 / 2)
    drawn = np.random.default_rng(seed).lognormal(mu, LENGTH_SIGMA, size=(n, 2))
    prompt = np.clip(np.rint(drawn[:, 0]), 1, PAPER_MAX_LEN - 1)
    output = np.clip(np.rint(drawn[:, 1]), 1, PAPER_MAX_LEN - prompt)
    return np.stack([prompt, output], axis=1).astype(np.int64)


def _read(name: str) -> bytes:
    return (files("coursekit.workloads") / name).read_bytes()
