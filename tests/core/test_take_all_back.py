"""After a cut step all blocks are free: by the tables where they are right, else by clearing the pool."""

import subprocess
import sys

import pytest

from minipaged.cache import BlockPool, BlockTable, hash_blocks
from minipaged.core.kv_cache_manager import KVCacheManager

PROMPT = list(range(12))


def manager_and_tables() -> tuple[KVCacheManager, list[BlockTable]]:
    """Two tables of three full blocks each; the blocks of the first are published."""
    manager = KVCacheManager(BlockPool(8), 4, max_num_seqs=2)
    tables = [BlockTable(manager.pool, 4) for _ in range(2)]
    for table in tables:
        table.append(len(PROMPT))
    tables[0].publish(hash_blocks(PROMPT, 4), len(PROMPT))
    return manager, tables


def test_prefixes_stay_cached_where_the_tables_are_right() -> None:
    manager, tables = manager_and_tables()
    manager.take_all_back(tables)
    assert manager.pool.num_free == 8 and len(manager.pool.lookup(hash_blocks(PROMPT, 4))) == 3
    manager.pool.check_invariants([])


LOSE_A_BLOCK = """
from minipaged.cache import BlockPool, BlockTable, hash_blocks
from minipaged.core.kv_cache_manager import KVCacheManager
manager = KVCacheManager(BlockPool(8), 4, max_num_seqs=2)
table, hashes = BlockTable(manager.pool, 4), hash_blocks(range(12), 4)
table.append(12)
table.publish(hashes, 12)
table.blocks.pop()  # a cut step has lost it
manager.take_all_back([table])
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
