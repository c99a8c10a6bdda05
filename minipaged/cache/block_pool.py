"""The pool of KV blocks: which are held, which are free, and which free ones still hold a known prefix.

A block is in exactly one of three states:

    held     reference count >= 1; some block table lists it
    cached   reference count 0, but its contents are published under a prefix hash: it may still be hit
    blank    reference count 0 and nothing reusable in it

Blank blocks wait on a stack, cached ones in an ordered dict from the least to the most recently used.
`allocate` takes blank blocks first and then evicts from the old end, so the eviction order needs no clock and
every operation is O(1) a block. (vLLM's prefix cache evicts in the same order.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol


class HoldsBlocks(Protocol):
    """Anything with a list of blocks it holds one reference to each of: a block table."""

    blocks: list[int]


class BlockPool:
    """Hands out the ids 0 … `num_blocks` - 1. Only bookkeeping: the tensors are in `KVStorage`.

    Nothing changes when a call raises or returns None.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.clear()

    def clear(self) -> None:
        """Make every block blank, whatever tables list it. Their owner must then start with new tables."""
        self._ref_counts = [0] * self.num_blocks
        self._blank = list(range(self.num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hashes: dict[int, bytes] = {}  # published block -> its prefix hash
        self._index: dict[bytes, dict[int, None]] = {}  # prefix hash -> the blocks with these contents

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank and cached."""
        return len(self._blank) + len(self._cached)

    def ref_count(self, block: int) -> int:
        """How many tables hold `block`."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} does not exist, the pool has blocks 0 to {self.num_blocks - 1}")
        return self._ref_counts[block]

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: what sharing them takes away from `num_free`."""
        return sum(not self.ref_count(block) for block in blocks)

    def allocate(self, n: int = 1) -> list[int] | None:
        """Take `n` blocks with reference count 1 each, or None when fewer are free.

        Blank blocks go first, then cached ones are evicted, least recently used first.
        """
        if n == 1 and self._blank:  # the usual call: one more block for one sequence
            block = self._blank.pop()
            self._ref_counts[block] = 1
            return [block]
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            return None
        blocks = self._take(n)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def _take(self, n: int) -> list[int]:
        """Remove `n` blocks from the free list, in the order of eviction."""
        rest = max(0, len(self._blank) - n)
        blocks = self._blank[rest:]
        blocks.reverse()
        del self._blank[rest:]
        while len(blocks) < n:
            block, _ = self._cached.popitem(last=False)
            self._remove_from_index(block)
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; a cached block leaves the free list and cannot be evicted.

        Raises ValueError for an unknown id, an id given twice, or a blank block: it has no contents to share.
        """
        self._require_distinct(blocks)
        for block in blocks:
            if not self.ref_count(block) and block not in self._cached:
                raise ValueError(f"block {block} is free and holds nothing to share")
        for block in blocks:
            if not self._ref_counts[block]:
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block, in the order given.

        A block that loses its last reference becomes blank, or the most recently used cached block. Pass the
        tail of a chain first: then it is evicted before the head, without which it could never be hit.
        Raises ValueError for an unknown id, an id given twice, or a block that no table holds.
        """
        self._require_held(blocks)
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] -= 1
            if not ref_counts[block]:
                if block in self._hashes:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Offer the contents of a held block to others. The block must be full and its K/V computed.

        Several blocks may have the same contents. A pool with prefix caching off publishes nothing.
        Raises ValueError when no table holds the block or when it is published under another hash.
        """
        self._require_held((block,))
        if not self.enable_prefix_caching:
            return
        if self._hashes.setdefault(block, block_hash) != block_hash:
            raise ValueError(f"block {block} is already published under another hash")
        self._index.setdefault(block_hash, {})[block] = None

    def unpublish(self, block: int) -> None:
        """Withdraw a held block from the index, because its contents are about to change."""
        self._require_held((block,))
        if block in self._hashes:
            self._remove_from_index(block)

    def is_published(self, block: int) -> bool:
        return block in self._hashes

    @property
    def published(self) -> Mapping[int, bytes]:
        """The prefix hash of every published block, held or cached; a view."""
        return MappingProxyType(self._hashes)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of hits from the start of `hashes`. Changes nothing.

        The blocks stay evictable until they are shared.
        """
        hits = []
        for block_hash in hashes:
            blocks = self._index.get(block_hash)
            if blocks is None:
                break
            hits.append(next(iter(blocks)))  # the one published first
        return hits

    def reset_prefix_cache(self) -> bool:
        """Forget every published block. Refuses, with False, while any block is held."""
        if self.num_free != self.num_blocks:
            return False
        self._hashes.clear()
        self._index.clear()
        self._blank.extend(self._cached)
        self._cached.clear()
        return True

    def _remove_from_index(self, block: int) -> None:
        block_hash = self._hashes.pop(block)
        blocks = self._index[block_hash]
        del blocks[block]
        if not blocks:
            del self._index[block_hash]

    def _require_distinct(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            repeated = next(block for block, count in Counter(blocks).items() if count > 1)
            raise ValueError(f"block {repeated} is given twice in one call")

    def _require_held(self, blocks: Sequence[int]) -> None:
        if len(blocks) > 1:
            self._require_distinct(blocks)
        num_blocks, ref_counts = self.num_blocks, self._ref_counts
        for block in blocks:
            if not (0 <= block < num_blocks and ref_counts[block]):
                raise ValueError(f"nobody holds block {block} of a pool with blocks 0 to {num_blocks - 1}")

    def check_invariants(self, tables: Iterable[HoldsBlocks]) -> None:
        """Prove the bookkeeping, given every table that holds blocks of this pool. O(num_blocks).

        Raises AssertionError naming the fault, also under `python -O`.
        """
        fault = self.find_fault(tables)
        if fault:
            raise AssertionError(fault)

    def find_fault(self, tables: Iterable[HoldsBlocks]) -> str | None:
        """What is wrong with the bookkeeping, given every table that holds blocks of this pool, or None."""
        lists = [table.blocks for table in tables]
        holders = Counter(block for blocks in lists for block in blocks)
        free = Counter([*self._blank, *self._cached])
        for block, count in enumerate(self._ref_counts):
            held, listed = holders.pop(block, 0), free.pop(block, 0)
            if count != held:
                return f"block {block} has {count} references, tables hold {held}"
            if listed != (count == 0):
                return f"block {block} has {count} references and is {listed} times free"
        if holders:
            return f"tables hold blocks that do not exist: {sorted(holders)}"
        if free:
            return f"the free list has blocks that do not exist: {sorted(free)}"
        for blocks in lists:
            if len(set(blocks)) != len(blocks):
                return f"a table lists a block twice: {blocks}"
        return self._find_index_fault()

    def _find_index_fault(self) -> str | None:
        indexed = {block: h for h, blocks in self._index.items() for block in blocks}
        stale = [block for block in self._blank if block in self._hashes]
        faults = {
            "index and hashes of the blocks disagree": indexed != self._hashes,
            "index has an entry without a block": not all(self._index.values()),
            "a block is indexed under two hashes": sum(map(len, self._index.values())) != len(self._hashes),
            "a cached block is not published": not self._hashes.keys() >= self._cached.keys(),
            f"blank blocks are still published: {stale}": bool(stale),
            "caching is off, yet blocks are published": bool(self._hashes) and not self.enable_prefix_caching,
        }
        return next((fault for fault, is_there in faults.items() if is_there), None)
