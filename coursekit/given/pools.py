"""A block pool for the exercises that are about something else."""

import random


class ScatteredPool:
    """Blocks 0 … num_blocks - 1, given out in an order that looks random, as in a pool long in use."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        random.Random(num_blocks).shuffle(self._free)
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks, or None when fewer are free; then nothing has changed."""
        if n > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(n)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take blocks back. ValueError for one that is not held; then nothing has changed."""
        wrong = [block for block in blocks if block not in self._held]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"free({blocks}): not held, or named twice")
        self._held.difference_update(blocks)
        self._free += blocks
