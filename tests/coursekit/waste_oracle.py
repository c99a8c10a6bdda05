"""Where the bytes of a budget are, asked of the memory managers: the oracle of `coursekit/traffic.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coursekit.contiguous import ContiguousArena
from coursekit.waste import WasteReport
from minipaged.cache import BlockTable


class Strip(NamedTuple):
    """A request in contiguous memory, in slots: what it reserved, holds now, and will hold at its end."""

    reserved: int
    num_tokens: int
    final_tokens: int


def waste_of_strips(
    arena: ContiguousArena,
    strips: Iterable[Strip],
    bytes_per_token: int,
    *,
    next_size: int | None = None,
    budget: int | None = None,
) -> WasteReport:
    """Account for contiguous memory. `strips` describes every strip of `arena`, in any order.

    `next_size` is what the next waiting request would reserve, in slots: holes shorter than that are external
    waste. With None nobody waits and all holes are free. `budget` (bytes) defaults to the arena's own size.
    """
    strips = list(strips)
    reserved = sorted(strip.reserved for strip in strips)
    if reserved != sorted(arena.strips.values()):
        raise ValueError(f"the strips given reserve {reserved}, the arena {sorted(arena.strips.values())}")
    for strip in strips:
        if not 0 <= strip.num_tokens <= strip.final_tokens <= strip.reserved:
            raise ValueError(f"{strip} does not hold num_tokens <= final_tokens <= reserved")
    unusable = 0 if next_size is None else arena.unusable(next_size)
    arena_bytes = arena.num_slots * bytes_per_token
    budget = arena_bytes if budget is None else budget
    return WasteReport(
        budget=budget,
        used=bytes_per_token * sum(strip.num_tokens for strip in strips),
        to_come=bytes_per_token * sum(strip.final_tokens - strip.num_tokens for strip in strips),
        never=bytes_per_token * sum(strip.reserved - strip.final_tokens for strip in strips),
        internal=0,
        external=bytes_per_token * unusable + budget - arena_bytes,
        free=bytes_per_token * (arena.num_free - unusable),
    )


def waste_of_tables(
    tables: Sequence[BlockTable],
    num_blocks: int,
    block_size: int,
    bytes_per_token: int,
    *,
    budget: int | None = None,
) -> WasteReport:
    """Account for paged memory. `tables` are all that hold blocks; a shared block counts once.

    A cached block that nobody holds is free. `budget` (bytes) defaults to the size of the blocks; the rest of
    it, after the last whole block, is external waste.
    """
    filled: dict[int, int] = {}  # block -> tokens in it, as its fullest holder sees it
    for table in tables:
        for i, block in enumerate(table.blocks):
            tokens = min(block_size, table.num_tokens - i * block_size)
            filled[block] = max(filled.get(block, 0), tokens)
    used = sum(filled.values())
    blocks_bytes = num_blocks * block_size * bytes_per_token
    budget = blocks_bytes if budget is None else budget
    return WasteReport(
        budget=budget,
        used=bytes_per_token * used,
        to_come=0,
        never=0,
        internal=bytes_per_token * (len(filled) * block_size - used),
        external=budget - blocks_bytes,
        free=bytes_per_token * block_size * (num_blocks - len(filled)),
    )
