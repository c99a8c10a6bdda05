"""Moving the blocks of preempted sequences to host memory and back (PagedAttention paper, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.cache.block_pool import BlockPool
from minipaged.cache.block_table import BlockCopy, BlockTable
from minipaged.cache.storage import KVStorage


class SwapSpace:
    """Two pools with their storages, and tables that move from one to the other with their contents.

    Tables that are swapped together go on sharing what they share: a block that several of them list is moved
    once. A block that a table outside the group lists as well stays where it is for that table, and the group
    gets a copy.

    Published blocks are left to the device's prefix cache: they are freed like any others and can be hit
    until they are evicted. The blocks a table comes back to are new and not published; `BlockTable.publish`
    offers them again, under the hashes the sequence already has.
    """

    def __init__(
        self, device_pool: BlockPool, device_storage: KVStorage, host_pool: BlockPool, host_storage: KVStorage
    ) -> None:
        for name, pool, storage in (
            ("device", device_pool, device_storage),
            ("host", host_pool, host_storage),
        ):
            if pool.num_blocks != storage.num_blocks:
                raise ValueError(
                    f"{name} pool has {pool.num_blocks} blocks, its storage {storage.num_blocks}"
                )
        device_storage.require_same_blocks(host_storage)
        self.device_pool = device_pool
        self.device_storage = device_storage
        self.host_pool = host_pool
        self.host_storage = host_storage

    @classmethod
    def create(cls, device_pool: BlockPool, device_storage: KVStorage, num_host_blocks: int) -> SwapSpace:
        """A space with host memory for `num_host_blocks` blocks, and no prefix cache there."""
        host_storage = KVStorage(device_storage.spec, num_host_blocks, device_storage.block_size)
        host_pool = BlockPool(num_host_blocks, enable_prefix_caching=False)
        return cls(device_pool, device_storage, host_pool, host_storage)

    def swap_out(self, tables: Sequence[BlockTable]) -> bool:
        """Move the tables to host memory. False when it lacks blocks: then nothing has changed."""
        return _move(tables, self.device_pool, self.device_storage, self.host_pool, self.host_storage)

    def swap_in(self, tables: Sequence[BlockTable]) -> bool:
        """Move the tables back to the device. False when it lacks blocks: then nothing has changed."""
        return _move(tables, self.host_pool, self.host_storage, self.device_pool, self.device_storage)


def blocks_of(tables: Sequence[BlockTable]) -> list[int]:
    """The distinct blocks that the tables list, in order of appearance: what moving them takes."""
    return list(dict.fromkeys(block for table in tables for block in table.blocks))


def _move(
    tables: Sequence[BlockTable],
    pool: BlockPool,
    storage: KVStorage,
    new_pool: BlockPool,
    new_storage: KVStorage,
) -> bool:
    if len({id(table) for table in tables}) != len(tables):
        raise ValueError("a table is given twice")
    if any(table.pool is not pool for table in tables):
        raise ValueError("a table is not on the side it is to be moved from")
    old_blocks = blocks_of(tables)
    new_blocks = new_pool.allocate(len(old_blocks))
    if new_blocks is None:
        return False
    try:
        storage.copy_to(new_storage, [BlockCopy(*pair) for pair in zip(old_blocks, new_blocks, strict=True)])
    except BaseException:  # it takes memory of its own, which may be short: the tables stay where they are
        new_pool.free(new_blocks[::-1])
        raise
    moved = dict(zip(old_blocks, new_blocks, strict=True))
    unclaimed = set(new_blocks)  # `allocate` gave each one reference: its first table takes that one
    for table in tables:
        blocks = [moved[block] for block in table.blocks]
        new_pool.share([block for block in blocks if block not in unclaimed])
        unclaimed.difference_update(blocks)
        pool.free(table.blocks[::-1])
        table.pool, table.blocks, table.num_published = new_pool, blocks, 0
    return True
