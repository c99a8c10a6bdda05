"""A sequence's block table: where its tokens' keys and values lie in the pool.

Token `p` of a sequence is in slot `blocks[p // block_size] * block_size + p % block_size`. Several tables may
list the same block: a fork shares all of them, a prefix hit the leading ones. A shared block is never
written; the table that appends into it first gets a copy (copy-on-write, PagedAttention paper, section 4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minipaged.cache.block_pool import BlockPool
from minipaged.memory import blocks_for


class BlockCopy(NamedTuple):
    """Copy the contents of block `src` to block `dst`, before anything is written in this step."""

    src: int
    dst: int


class BlockTable:
    """The blocks of one sequence, one reference held to each: `blocks_for(num_tokens, block_size)` blocks."""

    __slots__ = ("block_size", "blocks", "num_published", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        self.pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_published = 0  # leading blocks that this table has offered or adopted

    @property
    def tail_is_shared(self) -> bool:
        """Whether the next token would be written into a block that another table also holds."""
        return self.num_tokens % self.block_size != 0 and self.pool.ref_count(self.blocks[-1]) > 1

    def blocks_to_append(self, n: int) -> int:
        """Pool blocks that `append(n)` takes: a copy of a shared tail and the new blocks."""
        if n < 0:
            raise ValueError(f"cannot append {n} tokens")
        new_blocks = blocks_for(self.num_tokens + n, self.block_size) - len(self.blocks)
        return new_blocks + (n > 0 and self.tail_is_shared)

    def append(self, n: int) -> list[BlockCopy] | None:
        """Make room for `n` more tokens; None when the pool is short, and then nothing has changed.

        The copies returned (at most one) must be done before this step writes any K/V.
        """
        needed = self.blocks_to_append(n)
        new_blocks = self.pool.allocate(needed) if needed else []
        if new_blocks is None:
            return None
        copies = []
        if needed and self.tail_is_shared:
            copies.append(BlockCopy(self.blocks[-1], new_blocks.pop(0)))
            self.pool.free(self.blocks[-1:])
            self.blocks[-1] = copies[0].dst
        elif self.num_tokens % self.block_size and n and self.pool.is_published(self.blocks[-1]):
            self.pool.unpublish(self.blocks[-1])  # offered before a trim; about to be overwritten
        self.blocks += new_blocks
        self.num_tokens += n
        return copies

    def fork(self) -> BlockTable:
        """A second table with the same tokens. Takes no block: every block gets one more reference."""
        self.pool.share(self.blocks)
        child = BlockTable(self.pool, self.block_size)
        child.blocks = self.blocks.copy()
        child.num_tokens = self.num_tokens
        child.num_published = self.num_published
        return child

    def begin(self, hits: Sequence[int], num_tokens: int) -> bool:
        """Start an empty table of `num_tokens` tokens whose leading blocks are the prefix hits `hits`.

        The hits are pinned before a new block is taken, so they cannot be evicted for it. False when the pool
        is short: then nothing has changed, neither reference counts nor the eviction order.
        """
        num_hit_tokens = len(hits) * self.block_size
        if num_tokens < num_hit_tokens:
            raise ValueError(f"{len(hits)} hits hold {num_hit_tokens} tokens, the sequence has {num_tokens}")
        new_blocks = blocks_for(num_tokens, self.block_size) - len(hits)
        if self.pool.count_free(hits) + new_blocks > self.pool.num_free:
            return False
        self.adopt(hits)
        self.append(num_tokens - num_hit_tokens)
        return True

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start an empty table from prefix hits: full blocks, which this table now holds too."""
        if self.num_tokens:
            raise ValueError(f"the table has {self.num_tokens} tokens, only an empty one adopts blocks")
        self.pool.share(blocks)
        self.blocks = list(blocks)
        self.num_tokens = len(blocks) * self.block_size
        self.num_published = len(blocks)

    def publish(self, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        """Offer the blocks whose `block_size` tokens are all computed, skipping those already offered.

        `hashes[i]` is the chained hash of block i. Call it after the forward pass that computed the tokens.
        """
        if num_computed_tokens > self.num_tokens:
            raise ValueError(f"{num_computed_tokens} tokens computed, the table has {self.num_tokens}")
        num_full = num_computed_tokens // self.block_size
        for i in range(self.num_published, num_full):
            self.pool.publish(self.blocks[i], hashes[i])
        self.num_published = max(self.num_published, num_full)

    def trim(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; blocks beyond them are freed, tail first."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot trim to {num_tokens} tokens, the table has {self.num_tokens}")
        keep = blocks_for(num_tokens, self.block_size)
        self.pool.free(self.blocks[keep:][::-1])
        del self.blocks[keep:]
        self.num_tokens = num_tokens
        self.num_published = min(self.num_published, num_tokens // self.block_size)

    def free(self) -> None:
        """Give up every block, tail first, and be empty."""
        self.trim(0)

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Slots of the tokens `start` … `stop` - 1, int64 of shape [stop - start]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} asked for, the table has {self.num_tokens}")
        first = start // self.block_size
        blocks = np.array(self.blocks[first : blocks_for(stop, self.block_size)], dtype=np.int64)
        positions = np.arange(start, stop, dtype=np.int64)
        return blocks[positions // self.block_size - first] * self.block_size + positions % self.block_size


def blocks_to_append_all(tables: Sequence[BlockTable], counts: Sequence[int]) -> int:
    """Pool blocks that `append_all` takes. Of n tables that alone share a tail, n - 1 need a copy."""
    total = 0
    writers: dict[int, int] = {}  # shared tail -> tables of this call that write into it
    for table, n in zip(tables, counts, strict=True):
        total += table.blocks_to_append(n)
        if n and table.tail_is_shared:
            tail = table.blocks[-1]
            writers[tail] = writers.get(tail, 0) + 1
            if writers[tail] == table.pool.ref_count(tail):
                total -= 1  # the last writer is alone by then and keeps the block
    return total


def append_all(tables: Sequence[BlockTable], counts: Sequence[int]) -> list[BlockCopy] | None:
    """Append `counts[i]` tokens to `tables[i]`, all of one pool: every one, or None and nothing changed.

    Do the returned copies before this step writes any K/V: the last of several sharers goes on writing into
    the block that the others are copied from. Raises ValueError when a table is given twice
    or the pools differ.
    """
    if len(set(map(id, tables))) != len(tables):
        raise ValueError("a table is given twice")
    if any(table.pool is not tables[0].pool for table in tables):
        raise ValueError("the tables are of several pools")
    if tables and blocks_to_append_all(tables, counts) > tables[0].pool.num_free:
        return None
    return [copy for table, n in zip(tables, counts, strict=True) for copy in table.append(n) or ()]
