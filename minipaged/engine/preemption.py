"""Which way to preempt: compute the tokens again, or move their blocks to host memory and back.

PagedAttention paper, section 4.5. Recomputing costs model time for every token; swapping costs two copies of
every block, and small blocks copy slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minipaged.cache import BlockTable
from minipaged.cache.swap import SwapSpace

SMOOTHING = 0.2  # weight of the newest measurement


@dataclass(slots=True)
class PreemptionCost:
    """Seconds that each way takes, measured while the engine runs."""

    seconds_per_token: float = 0.0
    """Model time of one token in the steps that computed prompts."""
    seconds_per_block: float = 0.0
    """Time to copy one block to the host and back."""

    def record_prefill(self, seconds: float, num_tokens: int) -> None:
        measured = seconds / num_tokens
        if self.seconds_per_token:
            measured = SMOOTHING * measured + (1 - SMOOTHING) * self.seconds_per_token
        self.seconds_per_token = measured

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving the blocks out and in is cheaper than computing the tokens again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token


def swap_seconds_per_block(swap: SwapSpace, clock: Callable[[], float]) -> float:
    """Measured on an idle engine: move some blocks to the host and back."""
    table = BlockTable(swap.device_pool, swap.device_storage.block_size)
    count = min(32, swap.device_pool.num_blocks, swap.host_pool.num_blocks)
    copies = table.append(count * table.block_size)
    assert copies is not None, "the pool is not idle"
    swap.swap_out([table]), swap.swap_in([table])  # the first time also allocates
    start = clock()
    swap.swap_out([table]), swap.swap_in([table])
    seconds = clock() - start
    table.free()
    return seconds / count
