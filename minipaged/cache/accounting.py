"""How much memory sequences save by sharing blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from minipaged.cache.block_table import BlockTable


@dataclass
class Sharing:
    """Counts, over steps, the entries of block tables and the different blocks they name."""

    entries: int = 0
    blocks: int = 0

    def count(self, tables: Collection[BlockTable]) -> None:
        """Add one step. A block that r tables list counts r times as an entry and once as a block."""
        self.entries += sum(len(table.blocks) for table in tables)
        self.blocks += len({block for table in tables for block in table.blocks})

    @property
    def saved(self) -> float:
        """1 - blocks / entries, 0 … 1: the "memory saving" of the PagedAttention paper, section 6.3."""
        return 1 - self.blocks / self.entries if self.entries else 0.0


def blocks_saved(tables: Collection[BlockTable]) -> float:
    """The share of these tables' entries that cost no block because another table has it already, 0 … 1."""
    sharing = Sharing()
    sharing.count(tables)
    return sharing.saved
