"""The least time that an engine needs for a mix on this machine, from two rates that are measured first.

A step must read every weight once and do its multiplications. Reading keys and values, the products of
attention and everything else come on top and are left out.

    floor      = sum over steps of (weight bytes / bandwidth + operations / rate)
    overlapped = sum over steps of the larger of the two: reading hides behind multiplying, perfectly

Nobody can be faster than `overlapped`. Goals are set against `floor`. The steps are those of an engine that
never wastes one: all prompts first, as many tokens a step as the engines are allowed, then one step for each
token of the longest answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.mixes import Mix
from minipaged.config import ModelConfig

MAX_TOKENS_PER_STEP = 2048
READ_BYTES = 1 << 28  # a quarter GiB: far more than any cache holds
MATRIX = 2048
ROUNDS = 7


@dataclass(frozen=True)
class Rates:
    """What this machine reaches at best: bytes per second read, operations per second in matrix products."""

    bandwidth: float
    operations: float

    def best_with(self, other: Rates) -> Rates:
        """The better of two measurements, rate by rate: a disturbed one shows less than the machine can."""
        return Rates(max(self.bandwidth, other.bandwidth), max(self.operations, other.operations))


@dataclass(frozen=True)
class ModelCost:
    """body_params: weights that every token meets; head_params: those that only sampled rows meet."""

    body_params: int
    head_params: int
    bytes_per_param: int

    @classmethod
    def from_config(cls, config: ModelConfig, dtype: torch.dtype) -> ModelCost:
        """Of a Llama; norms are too small to count."""
        hidden, heads = config.hidden_size, config.num_query_heads + 2 * config.num_kv_heads
        attention = hidden * heads * config.head_size + config.num_query_heads * config.head_size * hidden
        mlp = 3 * hidden * config.intermediate_size
        body = config.num_layers * (attention + mlp)
        return cls(body, hidden * config.vocab_size, dtype.itemsize)

    @property
    def weight_bytes(self) -> int:
        return (self.body_params + self.head_params) * self.bytes_per_param

    def operations(self, num_tokens: int, num_sampled: int) -> int:
        """A multiplication and an addition for every weight that a row meets."""
        return 2 * (self.body_params * num_tokens + self.head_params * num_sampled)

    def step_seconds(self, num_tokens: int, num_sampled: int, rates: Rates) -> tuple[float, float]:
        """Seconds for reading the weights, and for the multiplications."""
        operations = self.operations(num_tokens, num_sampled)
        return self.weight_bytes / rates.bandwidth, operations / rates.operations

    def rows_at_the_bend(self, rates: Rates) -> float:
        """Rows from which a step's multiplications take longer than reading the weights."""
        return self.weight_bytes / rates.bandwidth * rates.operations / self.operations(1, 1)


def least_steps(mix: Mix, max_tokens: int = MAX_TOKENS_PER_STEP) -> Iterator[tuple[int, int]]:
    """(tokens, sampled rows) of each step. The last prompt token of a request also makes its first token."""
    room, sampled = max_tokens, 0
    for request in mix:
        left = len(request["prompt_token_ids"])
        while left > room:
            yield max_tokens, sampled
            left, room, sampled = left - room, max_tokens, 0
        room, sampled = room - left, sampled + 1
    yield max_tokens - room, sampled
    for step in range(1, max(request["max_tokens"] for request in mix)):
        running = sum(request["max_tokens"] > step for request in mix)
        yield running, running


@dataclass(frozen=True)
class Floor:
    """Output tokens per second that a mix cannot pass, by the two bounds above."""

    floor: float
    overlapped: float


def floor_of(mix: Mix, cost: ModelCost, rates: Rates) -> Floor:
    steps = [cost.step_seconds(*step, rates) for step in least_steps(mix)]
    tokens = sum(request["max_tokens"] for request in mix)
    return Floor(tokens / sum(map(sum, steps)), tokens / sum(map(max, steps)))


def measure_rates(dtype: torch.dtype, threads: int) -> Rates:
    """The best of several rounds, half a second in all."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(READ_BYTES // 4)
        a, b = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
        reading = best_seconds(lambda: data.sum())
        product = best_seconds(lambda: a @ b)
    finally:
        torch.set_num_threads(before)
    return Rates(READ_BYTES / reading, 2 * MATRIX**3 / product)


def best_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
