"""Contiguous KV memory: one strip a request, reserved before its length is known. What paging replaced.

The three rules of reservation are the baselines of the PagedAttention paper (section 6.1, "Orca"). There a
buddy allocator places the strips; this arena uses first-fit or best-fit.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Literal, get_args

ReservationRule = Literal["maximum", "power_of_two", "oracle"]
Fit = Literal["first", "best"]


def reserve(rule: ReservationRule, prompt_tokens: int, output_tokens: int, max_len: int) -> int:
    """Slots that a request reserves: at least `prompt_tokens + output_tokens`, at most `max_len`.

    maximum: as many as any request may need. power_of_two: room for the output rounded up to a power of two,
    as if a server guessed it within a factor of two. oracle: what it will need, which no server can know.
    """
    needed = prompt_tokens + output_tokens
    if prompt_tokens < 1 or output_tokens < 0 or needed > max_len:
        raise ValueError(f"{prompt_tokens} + {output_tokens} tokens do not fit max_len {max_len}")
    if rule == "maximum":
        return max_len
    if rule == "power_of_two":
        rounded = 1 << (output_tokens - 1).bit_length() if output_tokens else 0
        return min(prompt_tokens + rounded, max_len)
    if rule == "oracle":
        return needed
    raise ValueError(f"reservation rule is {rule!r}, must be one of {get_args(ReservationRule)}")


class ContiguousArena:
    """`num_slots` token slots in a row, given out in contiguous strips.

    `fit` says which hole a strip is cut from: the first that is long enough, or the shortest such. A freed
    strip joins the holes on both its sides. Allocation looks at the holes one by one, so it costs O(holes).
    """

    def __init__(self, num_slots: int, *, fit: Fit = "first") -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, must be at least 1")
        if fit not in get_args(Fit):
            raise ValueError(f"fit is {fit!r}, must be one of {get_args(Fit)}")
        self.num_slots = num_slots
        self.fit = fit
        self._holes = [(0, num_slots)]  # (start, size), by start; no two of them touch
        self._strips: dict[int, int] = {}  # start -> size

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(start, size) of every unreserved stretch, by start."""
        return self._holes.copy()

    @property
    def strips(self) -> dict[int, int]:
        """Start of every reserved strip and its size."""
        return self._strips.copy()

    @property
    def num_free(self) -> int:
        """Slots in all holes together, whether or not a strip fits in any of them."""
        return sum(size for _, size in self._holes)

    @property
    def largest_hole(self) -> int:
        return max((size for _, size in self._holes), default=0)

    def allocate(self, size: int) -> int | None:
        """Reserve `size` slots in a row and return the first, or None when no hole is long enough."""
        if size < 1:
            raise ValueError(f"cannot reserve {size} slots")
        fitting = (i for i, (_, hole) in enumerate(self._holes) if hole >= size)
        if self.fit == "first":
            chosen = next(fitting, None)
        else:
            chosen = min(fitting, key=lambda i: self._holes[i][1], default=None)
        if chosen is None:
            return None
        start, hole = self._holes[chosen]
        self._holes[chosen : chosen + 1] = [(start + size, hole - size)] if hole > size else []
        self._strips[start] = size
        return start

    def free(self, start: int) -> None:
        """Give back the strip that starts at `start`."""
        if start not in self._strips:
            raise ValueError(f"no strip starts at slot {start}")
        stop = start + self._strips.pop(start)
        i = bisect_left(self._holes, (start, 0))
        first, last = i, i
        if i > 0 and sum(self._holes[i - 1]) == start:  # the hole before ends here
            first, start = i - 1, self._holes[i - 1][0]
        if i < len(self._holes) and self._holes[i][0] == stop:  # the hole after begins here
            last, stop = i + 1, sum(self._holes[i])
        self._holes[first:last] = [(start, stop - start)]

    def unusable(self, size: int) -> int:
        """Slots in holes that are too short for a strip of `size` slots: external fragmentation."""
        return sum(hole for _, hole in self._holes if hole < size)

    def check_invariants(self) -> None:
        """Strips and holes tile the arena exactly, and no two holes touch. AssertionError names the fault."""
        assert self._holes == sorted(self._holes), f"holes are out of order: {self._holes}"
        position = 0
        for start, size in sorted([*self._holes, *self._strips.items()]):
            assert size > 0, f"the stretch at slot {start} has {size} slots"
            assert start == position, f"slot {min(start, position)} belongs to two stretches or to none"
            position = start + size
        assert position == self.num_slots, f"stretches cover {position} of {self.num_slots} slots"
        for (start, size), (following, _) in pairwise(self._holes):
            assert start + size < following, f"the holes at {start} and {following} touch"
