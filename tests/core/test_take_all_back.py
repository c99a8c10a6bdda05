"""After a cut step all blocks are free: by the tables where they are right, else by clearing the pool."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minipaged.cache import BlockPool, hash_blocks
from minipaged.core.kv_cache_manager import KVCacheManager

PROMPT = list(range(12))


def request(manager: KVCacheManager, stored: int) -> Any:
    """With room for the whole prompt, of which `stored` tokens are computed; all its blocks are indexed."""
    table = manager.new_table()
    table.append(len(PROMPT))
    found = SimpleNamespace(table=table, num_computed=stored)
    found.hashes_of = lambda num_tokens, block_size: hash_blocks(PROMPT[:num_tokens], block_size)
    manager.index(found)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("stored", range(13))
def test_prefixes_that_are_computed_stay_cached_and_others_are_withdrawn(stored: int) -> None:
    """The step that was cut short was to fill the blocks beyond; a second request holds blocks as well."""
    manager = KVCacheManager(BlockPool(8), 4, max_num_seqs=2)
    requests = [request(manager, stored), request(manager, 0)]
    assert len(manager.pool.lookup(hash_blocks(PROMPT, 4))) == 3
    manager.take_all_back(requests)
    assert manager.pool.num_free == 8 and len(manager.pool.lookup(hash_blocks(PROMPT, 4))) == stored // 4
    manager.pool.check_invariants([])


def test_a_block_in_flight_is_withdrawn_though_others_count_on_it() -> None:
    """Another request has listed the first block, which the cut step has not filled."""
    manager = KVCacheManager(BlockPool(8), 4, max_num_seqs=2)
    writer = request(manager, 0)
    reader = SimpleNamespace(table=manager.new_table(), num_computed=4)
    reader.table.adopt(writer.table.blocks[:1])
    manager.take_all_back([reader, writer])
    assert manager.pool.num_free == 8 and manager.pool.lookup(hash_blocks(PROMPT, 4)) == []


LOSE_A_BLOCK = """
from types import SimpleNamespace
from minipaged.cache import BlockPool, hash_blocks
from minipaged.core.kv_cache_manager import KVCacheManager
manager = KVCacheManager(BlockPool(8), 4, max_num_seqs=2)
table, hashes = manager.new_table(), hash_blocks(range(12), 4)
table.append(12)
table.publish(hashes, 12)
table.blocks.pop()  # a cut step has lost it
manager.take_all_back([SimpleNamespace(table=table, num_computed=12)])
print(manager.pool.num_free, manager.pool.lookup(hashes))
"""


@pytest.mark.parametrize("options", [[], ["-O"]])
def test_the_pool_is_cleared_where_a_table_is_wrong(options: list[str]) -> None:
    """Python without assertions must notice it as well."""
    done = subprocess.run([sys.executable, *options, "-c", LOSE_A_BLOCK], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("8 []\n", "")


def test_the_check_raises_also_where_assertions_are_off() -> None:
    code = "from minipaged.cache import BlockPool; p = BlockPool(2); p.allocate(1); p.check_invariants([])"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert "AssertionError: block 0 has 1 references, tables hold 0" in done.stderr
