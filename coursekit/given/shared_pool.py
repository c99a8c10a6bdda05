"""A block pool with reference counts, for exercises in which sharing is used and not written."""

from collections.abc import Sequence

from coursekit.given.pools import ScatteredPool


class SharedPool(ScatteredPool):
    """Blocks that several holders may share; a block is free again when its last holder has freed it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._holders = [0] * num_blocks

    def ref_count(self, block: int) -> int:
        """Holders of `block`; 0 when it is free."""
        return self._holders[block]

    def allocate(self, n: int) -> list[int] | None:
        """`n` free blocks with one holder each, or None when fewer are free; then nothing has changed."""
        blocks = super().allocate(n)
        for block in blocks or ():
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`. ValueError for a free one; then nothing has changed."""
        self._require_held(blocks)
        for block in blocks:
            self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each of `blocks`. ValueError for a free one; then nothing has changed."""
        self._require_held(blocks)
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                super().free([block])

    def _require_held(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) < len(blocks) or not all(block in self._held for block in blocks):
            raise ValueError(f"{list(blocks)}: not held, or named twice")
