"""Whole traffics on the real engine without arithmetic: a model that always says token 0.

Which request runs, which one waits and which block is whose depends on lengths only. So what is counted here
is exact for any model with keys and values of this size; the clock counts steps.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.checkpoints.loading import LoadedModel
from minipaged.config import CacheConfig, EngineConfig, ModelConfig
from minipaged.core.request import ParentRequest
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams


class SilentModel:
    """Says token 0. Its keys and values have the size that `config` says, and are never written."""

    fuses_argmax = False  # no greedy token without logits

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __call__(self, token_ids: Tensor, batch: object, storage: object, backend: object) -> Tensor:
        return torch.zeros(len(token_ids), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), 2)


def exactly(answer: int) -> SamplingParams:
    """Greedy, to exactly this many tokens."""
    return SamplingParams(temperature=0, max_tokens=int(answer), ignore_eos=True)


def add_all(engine: Engine, lengths: np.ndarray, seed: int = 0) -> list[ParentRequest]:
    """Add random prompts of these lengths, int64 [n, 2] of prompt and answer; the engine's requests."""
    rng = np.random.default_rng(seed)
    for index, (prompt, answer) in enumerate(lengths.tolist()):
        tokens = rng.integers(0, engine.runner.model.config.vocab_size, prompt).tolist()
        engine.add_request(str(index), tokens, exactly(answer))
    return list(engine.requests.values())


def silent_engine(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    num_slots: int,
    block_size: int,
    max_len: int,
    chunk: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """The engine around a silent model, in which memory alone decides what runs.

    No more sequences come than `max_num_seqs`, and a step may compute `chunk` tokens, by default as many as
    the cache can store.
    """
    cache = CacheConfig(
        num_blocks=num_slots // block_size, block_size=block_size, dtype=dtype, enable_prefix_caching=False
    )
    limits = EngineConfig(
        max_model_len=max_len, max_num_seqs=max(1, num_slots // 16), max_num_batched_tokens=chunk or num_slots
    )
    model: Any = SilentModel(config)  # without argmax_tokens, for which it is never asked
    return Engine(model, cache, limits, clock=clock)


def real_llm(
    loaded: LoadedModel, *, num_slots: int, block_size: int, max_len: int, chunk: int | None = None
) -> LLM:
    """`LLM` within the limits of `silent_engine`, warmed up: it runs the same requests in the same steps."""
    llm = LLM(
        loaded,
        device=loaded.model.device,
        num_blocks=num_slots // block_size,
        block_size=block_size,
        max_model_len=max_len,
        max_num_seqs=max(1, num_slots // 16),
        max_num_batched_tokens=chunk or num_slots,
        enable_prefix_caching=False,
    )
    llm.generate({"prompt_token_ids": [0]}, exactly(2), use_tqdm=False)
    llm.engine.reset_stats()
    return llm


def replay(
    config: ModelConfig,
    dtype: torch.dtype,
    lengths: np.ndarray,
    *,
    num_slots: int,
    block_size: int,
    max_len: int,
    most_steps: int = 10**9,
    chunk: int | None = None,
) -> tuple[Engine, list[ParentRequest]]:
    """Serve the traffic, all of it there at the start. The clock shows the number of the step.

    Returns the engine, whose trace has a record of each step, and its requests.
    """
    step = 0
    sizes = {"num_slots": num_slots, "block_size": block_size, "max_len": max_len}
    engine = silent_engine(config, dtype, **sizes, chunk=chunk, clock=lambda: step)
    requests = add_all(engine, lengths)
    while engine.has_unfinished_requests() and step < most_steps:
        step += 1
        engine.step()
    return engine, requests


def at_once(engine: Engine) -> float:
    """Requests at once, on average: the second half of the steps in which others waited.

    At the opening all requests are new and hold only a prompt, so more of them fit than later.
    """
    running = [record.running for record in engine.trace if record.waiting]
    return float(np.mean(running[len(running) // 2 :]))
