"""Requests through contiguous memory, one snapshot for each step: for pictures of fragmentation.

`coursekit.traffic` gives the averages and is faster; this shows where each strip lies, and can compact.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from coursekit.contiguous import ContiguousArena, ReservationRule, reserve


@dataclass
class PlacedStrip:
    """One request in the arena, in slots. `final` is what it holds when it ends."""

    start: int
    size: int
    stored: int
    final: int


@dataclass(frozen=True)
class Snapshot:
    """The arena during one step.

    waiting: slots that the next request in line needs, None when nobody waits. moved: slots that compaction
    copied before this step.
    """

    strips: list[PlacedStrip]
    holes: list[tuple[int, int]]
    waiting: int | None
    moved: int

    @property
    def used(self) -> int:
        return sum(strip.stored for strip in self.strips)

    @property
    def free(self) -> int:
        """Slots in all holes together."""
        return sum(size for _, size in self.holes)

    @property
    def external(self) -> int:
        """Slots in holes too small for the request that waits."""
        return sum(size for _, size in self.holes if self.waiting is not None and size < self.waiting)


def power_of_two(size: int) -> int:
    """The next power of two: what a buddy allocator gives out for `size` slots."""
    return 1 << (size - 1).bit_length()


def replay_contiguous(
    lengths: np.ndarray,
    num_slots: int,
    max_len: int,
    rule: ReservationRule,
    *,
    compact: bool = False,
    granted: Callable[[int], int] = int,
) -> Iterator[Snapshot]:
    """Serve `lengths`, int [n, 2] of prompt and generated tokens, first come, first served, by first fit.

    Every running request gains one token a step, and its last token is never stored. With `compact` all
    strips are moved together whenever the next request fits the free slots but none of the holes.
    `granted` says how long a strip the allocator gives out for a reservation: by default, as long as asked.
    Raises ValueError for a request that could never fit.
    """
    arena = ContiguousArena(num_slots)
    waiting = deque(map(tuple, lengths.tolist()))
    strips: list[PlacedStrip] = []
    while waiting or strips:
        moved = 0
        while waiting:
            prompt, generated = waiting[0]
            size = granted(reserve(rule, prompt, generated - 1, max_len))
            if size > num_slots:
                raise ValueError(f"a request reserves {size} slots, the arena has {num_slots}")
            if compact and arena.largest_hole < size <= arena.num_free:
                arena, copied = move_together(arena, strips)
                moved += copied
            start = arena.allocate(size)
            if start is None:
                break
            waiting.popleft()
            strips.append(PlacedStrip(start, size, prompt, prompt + generated - 1))
        next_size = size if waiting else None
        placed = [PlacedStrip(s.start, s.size, s.stored, s.final) for s in strips]
        yield Snapshot(placed, arena.holes, next_size, moved)
        for strip in strips:
            if strip.stored == strip.final:
                arena.free(strip.start)
        strips = [strip for strip in strips if strip.stored < strip.final]
        for strip in strips:
            strip.stored += 1


def move_together(arena: ContiguousArena, strips: list[PlacedStrip]) -> tuple[ContiguousArena, int]:
    """Close all holes: a new arena with the strips side by side, and how many stored slots that copies."""
    packed = ContiguousArena(arena.num_slots)
    moved = 0
    for strip in sorted(strips, key=lambda strip: strip.start):
        start = packed.allocate(strip.size)
        assert start is not None, "the strips fitted before"
        if start != strip.start:
            moved += strip.stored
            strip.start = start
    return packed, moved
