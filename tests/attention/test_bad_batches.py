"""A batch that leads out of the cache is refused before anything is read or written, on every backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from minipaged.attention import get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cache.storage import KVStorage
from minipaged.cpu.accelerate import accelerate_model
from minipaged.cpu.backend import CpuBackend
from minipaged.memory import KVSpec
from minipaged.model.tiny import TINY, random_llama

NUM_BLOCKS, BLOCK_SIZE = 4, 16
CONFIG = replace(TINY, hidden_size=256, head_size=64)
BACKENDS = {
    "compiled": CpuBackend,
    "torch": TorchBackend,
    "reference": lambda: get_backend("reference"),
}


def storage() -> KVStorage:
    made = KVStorage(KVSpec.from_model(CONFIG, torch.float32), NUM_BLOCKS, BLOCK_SIZE)
    for tensor in made.tensors:
        tensor.fill_(1)
    return made


def fields(**changes: Any) -> dict[str, Any]:
    """A decode of 5 tokens in block 3, by hand."""
    return {
        "query_start": torch.tensor([0, 1], dtype=torch.int32),
        "context_lens": torch.tensor([5], dtype=torch.int32),
        "block_tables": torch.tensor([[3]], dtype=torch.int32),
        "slot_mapping": torch.tensor([3 * BLOCK_SIZE + 4]),
        "positions": torch.tensor([4]),
        "block_size": BLOCK_SIZE,
        "max_query_len": 1,
        "max_context_len": 5,
    } | changes


def attend(backend: Any, batch: AttentionBatch) -> torch.Tensor:
    query = torch.ones(batch.num_tokens, CONFIG.num_query_heads, CONFIG.head_size)
    return backend.paged_attention(query, storage().layer(0), batch, scale=0.125)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("block", [4, 99, 10**6, 2**31 - 1])
def test_block_beyond_the_cache_is_refused_by_number(make: Any, queries: int, block: int) -> None:
    batch = AttentionBatch.build([[block]], [queries], [5], BLOCK_SIZE)
    with pytest.raises(ValueError, match=rf"names block {block}, the cache has blocks 0 to 3"):
        attend(make(), batch)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
def test_batch_made_by_hand_is_served_where_it_is_right(make: Any) -> None:
    assert torch.equal(attend(make(), AttentionBatch(**fields())), torch.ones(1, 4, 64))


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
def test_batch_made_by_hand_with_a_block_beyond_the_cache_is_refused(make: Any) -> None:
    tables = torch.tensor([[7]], dtype=torch.int32)
    with pytest.raises(ValueError, match="names block 7"):
        attend(make(), AttentionBatch(**fields(block_tables=tables)))


@pytest.mark.parametrize("block", [-1, -(2**20), 2**31, 2**40])
def test_id_that_is_no_blocks_is_refused_when_a_batch_is_built(block: int) -> None:
    with pytest.raises(ValueError, match=rf"sequence 1 has the block id {block}"):
        AttentionBatch.build([[0], [block]], [1, 1], [3, 3], BLOCK_SIZE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": torch.tensor([[-1]], dtype=torch.int32)}, "sequence 0 names block -1"),
        ({"context_lens": torch.tensor([17], dtype=torch.int32)}, "max_context_len is 5, the lengths are"),
        (
            {"context_lens": torch.tensor([17], dtype=torch.int32), "max_context_len": 17},
            "max_context_len is 17, the block tables hold 16",
        ),
        ({"context_lens": torch.tensor([-1], dtype=torch.int32)}, "the lengths are"),
        ({"context_lens": torch.tensor([5, 5], dtype=torch.int32)}, r"query_start has shape \[2\]"),
        ({"query_start": torch.tensor([0, 2], dtype=torch.int32)}, r"query_start is \[0, 2\]"),
        ({"query_start": torch.tensor([1, 1], dtype=torch.int32)}, r"query_start is \[1, 1\]"),
        ({"positions": torch.tensor([4, 5])}, r"positions has shape \[2\]"),
        ({"block_tables": torch.tensor([[3], [3]], dtype=torch.int32)}, r"block_tables has shape \[2, 1\]"),
        ({"max_query_len": 0}, "max_query_len is 0"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_batch_made_by_hand_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch(**fields(**change))


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("slot", [NUM_BLOCKS * BLOCK_SIZE, 10**9])
def test_slot_beyond_the_cache_is_refused_and_nothing_is_written(make: Any, slot: int) -> None:
    made = storage()
    rows = torch.full((2, CONFIG.num_kv_heads, CONFIG.head_size), 7.0)
    with pytest.raises(IndexError, match=f"slot {slot}|1 of 2 slots"):
        make().write_kv(made.layer(0), rows, rows, torch.tensor([0, slot]))
    assert all(bool((tensor == 1).all()) for tensor in made.tensors)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS.keys())
def test_query_of_other_length_than_the_batch_is_refused(make: Any) -> None:
    query = torch.ones(3, CONFIG.num_query_heads, CONFIG.head_size)
    with pytest.raises(ValueError, match="the query has 3 rows, the batch 1 tokens"):
        make().paged_attention(query, storage().layer(0), AttentionBatch(**fields()), scale=1.0)


def test_model_refuses_a_batch_that_leads_out_of_the_cache_before_it_writes() -> None:
    model, made = random_llama(CONFIG), storage()
    slots = {"block_tables": torch.tensor([[0]], dtype=torch.int32), "slot_mapping": torch.tensor([64])}
    for change in (slots, {"block_tables": torch.tensor([[4]], dtype=torch.int32)}):
        with pytest.raises(ValueError, match="names block 4, the cache has blocks 0 to 3"):
            model(torch.tensor([5]), AttentionBatch(**fields(**change)), made, get_backend("torch"))
    assert all(bool((tensor == 1).all()) for tensor in made.tensors)


def vouched(**changes: Any) -> AttentionBatch:
    """Two sequences of 20 and 40 tokens, one query each, from somebody who says that all is right."""
    batch = AttentionBatch.build([[0, 1], [2, 3, 1]], [1, 1], [20, 40], BLOCK_SIZE)
    return replace(batch, num_blocks_named=0, **changes)


TABLES = {
    "beyond": ([[0, 1, 0], [2, 4, 1]], "sequence 1 names block 4, the cache has blocks 0 to 3 .entry 1 of"),
    "far beyond": ([[0, 10**6, 0], [2, 3, 1]], "sequence 0 names block 1000000, .*entry 1 of"),
    "negative": ([[0, 1, 0], [2, 3, -1]], "sequence 1 names block -1, .*entry 2 of"),
    "far negative": ([[-(2**20), 1, 0], [2, 3, 1]], "sequence 0 names block -1048576, .*entry 0 of"),
}


@pytest.mark.parametrize(("tables", "message"), TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("queries", [1, 3])
def test_a_kernel_in_c_looks_at_the_tables_of_a_batch_that_was_vouched_for(
    tables: list[list[int]], message: str, queries: int
) -> None:
    batch = AttentionBatch.build([[0, 1], [2, 3, 1]], [queries, queries], [20, 40], BLOCK_SIZE)
    batch = replace(batch, num_blocks_named=0, block_tables=torch.tensor(tables, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        attend(CpuBackend(), batch)
    model, made = accelerate_model(random_llama(CONFIG)), storage()
    with pytest.raises(ValueError, match=message):
        model(torch.arange(batch.num_tokens), batch, made, CpuBackend())
    assert all(bool((tensor == 1).all()) for tensor in made.tensors)


def test_entries_that_are_never_read_may_name_anything() -> None:
    tables = torch.tensor([[0, 1, 99], [2, 3, 1]], dtype=torch.int32)
    assert torch.equal(attend(CpuBackend(), vouched(block_tables=tables)), torch.ones(2, 4, 64))


def test_a_context_longer_than_its_table_is_refused_though_vouched_for() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 49 keys, its block table holds 48"):
        attend(CpuBackend(), vouched(context_lens=torch.tensor([20, 49], dtype=torch.int32)))


def test_the_tables_are_looked_at_again_for_a_smaller_cache() -> None:
    backend, batch = CpuBackend(), vouched()
    attend(backend, batch)
    small = KVStorage(KVSpec.from_model(CONFIG, torch.float32), 3, BLOCK_SIZE)
    query = torch.ones(batch.num_tokens, CONFIG.num_query_heads, CONFIG.head_size)
    with pytest.raises(ValueError, match=r"sequence 1 names block 3, the cache has blocks 0 to 2 \(entry 1"):
        backend.paged_attention(query, small.layer(0), batch, scale=0.125)
