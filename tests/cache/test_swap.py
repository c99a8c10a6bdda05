"""SwapSpace: contents and sharing survive the way out and back, and a shortage changes nothing."""

from itertools import product

import pytest
import torch

from minipaged.cache import BlockPool, BlockTable, KVStorage, SwapSpace, hash_blocks
from minipaged.dtypes import KV_DTYPES
from minipaged.memory import KVSpec


def space_of(dtype=torch.float32, device_blocks: int = 8, host_blocks: int = 8) -> SwapSpace:
    pool = BlockPool(device_blocks)
    return SwapSpace.create(pool, KVStorage(KVSpec(2, 2, 4, dtype), device_blocks, 4), host_blocks)


def mark(storage: KVStorage, blocks) -> None:
    """Make every byte tell its block, tensor and layer."""
    for number, tensor in enumerate(storage.tensors):
        for layer, block in product(range(len(tensor)), blocks):
            tensor[layer, block].view(torch.uint8).fill_(64 * layer + 16 * number + block)


def contents(storage: KVStorage, table: BlockTable) -> list[list[bytes]]:
    return [
        [t[:, block].contiguous().view(torch.uint8).numpy().tobytes() for t in storage.tensors]
        for block in table.blocks
    ]


def state(space: SwapSpace, *tables: BlockTable) -> tuple:
    pools = [
        (list(pool._ref_counts), list(pool._blank), list(pool._cached), dict(pool._hashes))
        for pool in (space.device_pool, space.host_pool)
    ]
    return pools, [(id(t.pool), list(t.blocks), t.num_tokens, t.num_published) for t in tables]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_contents_survive_the_way_out_and_back(dtype):
    """Scales included."""
    space = space_of(dtype)
    table = BlockTable(space.device_pool, 4)
    table.append(10)
    mark(space.device_storage, table.blocks)
    before = contents(space.device_storage, table)

    assert space.swap_out([table])
    assert space.device_pool.num_free == 8 and space.host_pool.num_free == 5
    assert contents(space.host_storage, table) == before
    other = BlockTable(space.device_pool, 4)
    other.append(20)
    for tensor in space.device_storage.tensors:
        tensor[:, other.blocks].view(torch.uint8).fill_(0xEE)  # somebody else uses the memory meanwhile

    assert space.swap_in([table])
    assert contents(space.device_storage, table) == before
    assert table.num_tokens == 10
    assert space.host_pool.num_free == 8
    space.device_pool.check_invariants([table, other])
    space.host_pool.check_invariants([])


def test_tables_swapped_together_go_on_sharing():
    space = space_of()
    parent = BlockTable(space.device_pool, 4)
    parent.append(10)
    children = [parent.fork(), parent.fork()]
    children[0].append(1)
    tables = [parent, *children]
    assert space.device_pool.num_free == 8 - 4
    assert space.swap_out(tables)
    assert space.host_pool.num_free == 8 - 4
    assert space.device_pool.num_free == 8
    assert parent.blocks == children[1].blocks
    assert parent.blocks[:2] == children[0].blocks[:2] and parent.blocks[2] != children[0].blocks[2]
    space.host_pool.check_invariants(tables)
    assert space.swap_in(tables)
    assert space.device_pool.num_free == 8 - 4
    space.device_pool.check_invariants(tables)
    assert parent.append(1) != []  # still copy-on-write


def test_a_table_outside_the_group_keeps_its_blocks():
    space = space_of()
    stays = BlockTable(space.device_pool, 4)
    stays.append(8)
    mark(space.device_storage, stays.blocks)
    leaves = stays.fork()
    kept = list(stays.blocks)
    assert space.swap_out([leaves])
    assert stays.blocks == kept
    assert [space.device_pool.ref_count(block) for block in kept] == [1, 1]
    assert contents(space.host_storage, leaves) == contents(space.device_storage, stays)
    assert space.swap_in([leaves])
    assert not set(leaves.blocks) & set(stays.blocks)
    space.device_pool.check_invariants([stays, leaves])


def test_a_shortage_on_either_side_changes_nothing():
    space = space_of(device_blocks=4, host_blocks=2)
    big, small = BlockTable(space.device_pool, 4), BlockTable(space.device_pool, 4)
    big.append(9)
    small.append(4)
    before = state(space, big, small)
    assert not space.swap_out([big])
    assert not space.swap_out([small, big])
    assert state(space, big, small) == before

    assert space.swap_out([small])
    big.append(5)
    before = state(space, big, small)
    assert not space.swap_in([small])
    assert state(space, big, small) == before


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_changes_nothing(monkeypatch, way):
    """A copy needs memory of its own: where that is short, no block of the other side may be lost."""
    space = space_of()
    table = BlockTable(space.device_pool, 4)
    table.append(9)
    if way == "in":
        space.swap_out([table])
    before = state(space, table)

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(KVStorage, "copy_to", fails)
    with pytest.raises(MemoryError):
        space.swap_out([table]) if way == "out" else space.swap_in([table])
    assert state(space, table) == before


def test_published_blocks_stay_in_the_device_cache():
    space = space_of()
    names = hash_blocks(range(9), 4)
    table = BlockTable(space.device_pool, 4)
    table.append(9)
    table.publish(names, 9)
    offered = table.blocks[:2]
    assert space.swap_out([table])
    assert space.device_pool.lookup(names) == offered  # freed, and can be hit until they are evicted
    assert not space.host_pool._cached

    evictor = BlockTable(space.device_pool, 4)
    evictor.append(7 * 4)  # six blank blocks and one cached: the chain's tail
    assert space.device_pool.lookup(names) == offered[:1]
    evictor.free()
    assert space.swap_in([table])
    table.publish(names, 9)
    assert len(space.device_pool.lookup(names)) == 2
    space.device_pool.check_invariants([table])


def test_a_table_on_the_wrong_side_is_refused():
    space = space_of()
    table, other = BlockTable(space.device_pool, 4), BlockTable(space.device_pool, 4)
    table.append(4)
    other.append(4)
    space.swap_out([table])
    before = state(space, table, other)
    for swap in (lambda: space.swap_out([other, table]), lambda: space.swap_in([table, other])):
        with pytest.raises(ValueError, match="not on the side it is to be moved from"):
            swap()
    assert state(space, table, other) == before


def test_swapping_nothing_is_possible():
    space = space_of()
    empty = BlockTable(space.device_pool, 4)
    assert space.swap_out([]) and space.swap_out([empty]) and space.swap_in([empty])
    assert empty.append(4) == []


def test_the_same_table_twice_is_refused():
    space = space_of()
    table = BlockTable(space.device_pool, 4)
    table.append(4)
    before = state(space, table)
    with pytest.raises(ValueError, match="a table is given twice"):
        space.swap_out([table, table])
    assert state(space, table) == before


def test_pools_and_storages_must_match():
    pool, storage = BlockPool(4), KVStorage(KVSpec(1, 1, 2, torch.float32), 4, 4)
    with pytest.raises(ValueError, match="host pool has 3 blocks, its storage 4"):
        SwapSpace(pool, storage, BlockPool(3), storage)
    with pytest.raises(ValueError, match="cannot copy blocks of"):
        SwapSpace(pool, storage, BlockPool(4), KVStorage(KVSpec(1, 1, 2, torch.float32), 4, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_contents_survive_the_way_from_a_gpu_and_back(dtype):
    pool = BlockPool(8)
    space = SwapSpace.create(pool, KVStorage(KVSpec(2, 2, 4, dtype), 8, 4, device="cuda"), 8)
    assert space.host_storage.device.type == "cpu"
    table = BlockTable(pool, 4)
    table.append(10)
    mark(space.device_storage, table.blocks)
    before = [t[:, table.blocks].cpu() for t in space.device_storage.tensors]
    assert space.swap_out([table])
    for tensor in space.device_storage.tensors:
        tensor.view(torch.uint8).fill_(0xEE)
    assert space.swap_in([table])
    for tensor, old in zip(space.device_storage.tensors, before, strict=True):
        assert torch.equal(tensor[:, table.blocks].cpu().view(torch.uint8), old.view(torch.uint8))
