"""The account of every byte of a KV budget, for contiguous and for paged memory."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
    internal: int  # in the last block of a sequence, after its last token
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
