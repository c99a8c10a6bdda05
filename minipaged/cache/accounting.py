"""The account of every byte of a KV budget, the same for contiguous and for paged memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from minipaged.cache.block_table import BlockTable
from minipaged.cache.contiguous import ContiguousArena


class Strip(NamedTuple):
    """A request in contiguous memory, in slots: what it reserved, holds now, and will hold at its end."""

    reserved: int
    num_tokens: int
    final_tokens: int


@dataclass(frozen=True)
class WasteReport:
    """Where the bytes of `budget` are. Each is in exactly one of the six kinds, so they add up to `budget`.

    The kinds are those of the PagedAttention paper, figures 2 and 3. Reports of several moments can be added:
    the unit is then bytes x steps, and the shares are averages over time.
    """

    budget: int
    used: int  # holds the keys and values of a token
    to_come: int  # reserved, and a token will come
    never: int  # reserved, and no token ever comes
    internal: int  # in the last block of a sequence, behind its last token
    external: int  # in a hole too small for the request that needs it, or too small for a block
    free: int  # can be given to a request

    def __post_init__(self) -> None:
        negative = {kind: size for kind, size in self.kinds.items() if size < 0}
        if negative:
            raise ValueError(f"sizes must not be negative: {negative}")
        total = sum(self.kinds.values())
        if total != self.budget:
            raise ValueError(f"the kinds add up to {total} bytes, the budget is {self.budget}")

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind, without the budget."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "budget"}

    @property
    def shares(self) -> dict[str, float]:
        """Each kind as a share of the budget, 0 … 1."""
        return {kind: size / self.budget for kind, size in self.kinds.items()}

    @property
    def share_of_taken(self) -> float:
        """Used bytes as a share of those that are not free: how well a policy fills what it takes."""
        taken = self.budget - self.free
        return self.used / taken if taken else 1.0

    def __add__(self, other: WasteReport) -> WasteReport:
        return WasteReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


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
    it, behind the last whole block, is external waste.
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
