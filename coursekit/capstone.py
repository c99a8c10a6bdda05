"""Put parts that a learner wrote into the engine: its pool, its block tables, its attention to one token.

The engine asks more of a pool and a table than the exercises do, because it shares blocks. With prefix
caching off and one sequence a request it shares none, and the rest has always the same answer: it is here.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from minipaged.attention.backend import AttentionBackend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import BlockCopy, KVStorage
from minipaged.cache.storage import LayerKV
from minipaged.engine.llm import LLM
from minipaged.memory import blocks_for


class PluggedPool:
    """A learner's pool, with `num_free`, `allocate(n)`, `free(blocks)`, where the engine has a BlockPool."""

    enable_prefix_caching = False

    def __init__(self, mine: Any, num_blocks: int) -> None:
        self.mine = mine
        self.num_blocks = num_blocks

    @property
    def num_free(self) -> int:
        return int(self.mine.num_free)

    def ref_count(self, block: int) -> int:
        return 1

    def count_free(self, blocks: Iterable[int]) -> int:
        return 0

    def find_fault(self, tables: Iterable[Any]) -> str | None:
        """None: what a learner's pool has noted cannot be seen from here."""
        return None

    def unpublish(self, block: int) -> None:
        """Nothing: prefix caching is off."""


class PluggedTable:
    """A learner's table, with `append(n)`, `blocks` and `free()`, where the engine has a BlockTable."""

    tail_is_shared = False
    num_published = 0

    def __init__(self, mine: Any, pool: PluggedPool, block_size: int) -> None:
        self.mine, self.pool, self.block_size = mine, pool, block_size
        self.num_tokens = 0

    @property
    def blocks(self) -> list[int]:
        blocks = [int(block) for block in self.mine.blocks]
        wrong = [block for block in blocks if not 0 <= block < self.pool.num_blocks]
        if wrong:  # a kernel would read or write memory of somebody else through them
            raise ValueError(
                f"a table holds block {wrong[0]}, and the pool has 0 to {self.pool.num_blocks - 1}"
            )
        return blocks

    def adopt(self, blocks: Sequence[int]) -> None:
        """Nothing: there are no prefix hits."""

    def blocks_to_append(self, n: int) -> int:
        return blocks_for(self.num_tokens + n, self.block_size) - len(self.blocks)

    def append(self, n: int) -> list[BlockCopy] | None:
        if not self.mine.append(n):
            return None
        self.num_tokens += n
        return []

    def free(self) -> None:
        self.mine.free()
        self.num_tokens = 0

    def publish(self, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        """Nothing: prefix caching is off."""


class PluggedAttention:
    """An attention backend whose steps of one query a sequence go through `attend`.

    `attend(query, key_cache, value_cache, block_tables, context_lens, scale)` gets query
    [num_seqs, num_query_heads, head_size], caches [num_blocks, block_size, num_kv_heads, head_size], int32
    tables [num_seqs, max_blocks] and lengths [num_seqs], and answers like the query. Steps with prompts in
    them, and everything else, are left to `rest`.
    """

    def __init__(self, attend: Callable[..., Tensor], rest: AttentionBackend) -> None:
        self.name = f"plugged into {rest.name}"
        self.attend, self.rest = attend, rest
        self.num_calls = 0

    def write_kv(self, layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        self.rest.write_kv(layer, key, value, slot_mapping)

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        self.rest.copy_blocks(storage, copies)

    def paged_attention(
        self, query: Tensor, layer: LayerKV, batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        if not batch.is_decode:
            return self.rest.paged_attention(query, layer, batch, scale=scale)
        self.num_calls += 1
        return self.attend(query, layer.key, layer.value, batch.block_tables, batch.context_lens, scale)


def plug_in_memory(llm: LLM, make_pool: Callable[..., Any], make_table: Callable[..., Any]) -> PluggedPool:
    """Let `llm`, which has served nothing yet, take every block from a learner's pool and tables.

    `make_pool(num_blocks)` and `make_table(pool, block_size)` are the learner's classes. Serve one sequence a
    request. Raises ValueError for an engine with prefix caching, which shares blocks.
    """
    engine = llm.engine
    if engine.pool.enable_prefix_caching:
        raise ValueError("the engine shares blocks: make it with enable_prefix_caching=False")
    pool = PluggedPool(make_pool(engine.pool.num_blocks), engine.pool.num_blocks)

    def make_plugged_table(pool: PluggedPool, block_size: int) -> PluggedTable:
        return PluggedTable(make_table(pool.mine, block_size), pool, block_size)

    engine.manager.plug_in(pool, make_plugged_table)  # type: ignore[arg-type]  # they do what is asked of them
    return pool


def plug_in_attention(llm: LLM, attend: Callable[..., Tensor]) -> PluggedAttention:
    """Let `llm` attend with `attend` wherever a sequence has one query; returns the backend, which counts."""
    backend = PluggedAttention(attend, llm.engine.runner.backend)
    llm.engine.runner.backend = backend
    return backend
