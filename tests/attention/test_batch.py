"""AttentionBatch.build: from lists of blocks and lengths to what a kernel reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minipaged.attention.batch import AttentionBatch, new_token_slots


def test_the_example_of_the_docstring():
    batch = AttentionBatch.build([[7, 2], [5], [0, 9, 4]], [1, 3, 2], [6, 3, 9], 4)
    assert batch.query_start.tolist() == [0, 1, 4, 6]
    assert batch.context_lens.tolist() == [6, 3, 9]
    assert batch.slot_mapping.tolist() == [9, 20, 21, 22, 39, 16]
    assert batch.positions.tolist() == [5, 0, 1, 2, 7, 8]
    assert (batch.max_query_len, batch.max_context_len) == (3, 9)
    assert (batch.num_seqs, batch.num_tokens, batch.is_decode) == (3, 6, False)
    kinds = (batch.query_start, batch.context_lens, batch.block_tables, batch.slot_mapping, batch.positions)
    assert [tensor.dtype for tensor in kinds] == [torch.int32] * 3 + [torch.int64] * 2


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_a_decode_token_gets_the_slot_after_the_last(length):
    table = [11, 3, 20]
    batch = AttentionBatch.build([table], [1], [length], 4)
    last = length - 1
    assert batch.slot_mapping.tolist() == [table[last // 4] * 4 + last % 4]
    assert batch.is_decode


def test_positions_go_on_after_a_prompt():
    assert AttentionBatch.build([[1, 2]], [2], [8], 4).positions.tolist() == [6, 7]


def test_sequences_without_queries_take_no_rows():
    batch = AttentionBatch.build([[3], [4], [5]], [0, 2, 0], [2, 2, 0], 4)
    assert batch.query_start.tolist() == [0, 0, 2, 2]
    assert batch.slot_mapping.tolist() == [16, 17]


def test_an_empty_batch():
    batch = AttentionBatch.build([], [], [], 4)
    assert (batch.num_seqs, batch.num_tokens, batch.max_query_len) == (0, 0, 0)


def test_slots_of_high_blocks_do_not_wrap():
    _, slots = new_token_slots(np.array([[2**31 - 1]], dtype=np.int32), np.array([1]), np.array([16]), 16)
    assert slots.tolist() == [(2**31 - 1) * 16 + 15]


@pytest.mark.parametrize(
    ("blocks", "queries", "keys", "message"),
    [
        ([[1]], [1, 1], [1], "1 block lists, 2 query lengths and 1 context lengths"),
        ([[1]], [3], [2], "sequence 0 has 3 queries and 2 keys"),
        ([[1], [2]], [1, 1], [4, 5], "sequence 1 has 5 keys, its 1 blocks hold 4"),
        ([[1]], [-1], [2], "sequence 0 has -1 queries"),
    ],
)
def test_impossible_batches_are_refused(blocks, queries, keys, message):
    with pytest.raises(ValueError, match=message):
        AttentionBatch.build(blocks, queries, keys, 4)


@pytest.mark.parametrize("name", ["query_start", "context_lens", "block_tables", "slot_mapping", "positions"])
def test_another_dtype_or_layout_is_refused_and_not_read_as_garbage(name):
    batch = AttentionBatch.build([[0, 1], [2, 3]], [1, 1], [5, 5], 4)
    tensor = getattr(batch, name)
    other = torch.int32 if tensor.dtype == torch.int64 else torch.int64
    with pytest.raises(ValueError, match=f"{name} is {other} with strides .*, it must be {tensor.dtype}"):
        replace(batch, **{name: tensor.to(other)})
    spread = torch.stack([tensor, tensor], dim=-1)[..., 0]
    with pytest.raises(ValueError, match=f"{name} is .* with dense rows"):
        replace(batch, **{name: spread})
    assert replace(batch, **{name: tensor.clone()}).num_seqs == 2
