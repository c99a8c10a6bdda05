"""Three oracles agree: dense float64, block-gather torch, and every kernel in Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.reference import ReferenceBackend
from tests.attention.paged import (
    DECODE,
    POISON,
    RAGGED,
    dense_attention,
    make_problem,
    relative_error,
    run_split,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FUZZ = int(os.environ.get("MINIPAGED_FUZZ", "1"))
# `make test` (1) and `make check` (6) try the same batches every time, `make fuzz` new ones.
RANDOM = settings(max_examples=8 * FUZZ, derandomize=FUZZ <= 6)


@st.composite
def lengths_around_blocks(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A block size and context lengths: 0, 1, whole blocks, one token more or less, several tiles."""
    block_size = draw(st.sampled_from([1, 3, 4, 16, 64]))
    blocks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    lengths = [min(max(0, n * block_size + draw(st.sampled_from([-1, 0, 1]))), 70) for n in blocks]
    return block_size, lengths


@pytest.mark.fuzz
@pytest.mark.parametrize("kernel", DECODE)
@RANDOM
@given(
    shape=lengths_around_blocks(),
    heads=st.sampled_from([(3, 1), (1, 3), (1, 5), (1, 7), (2, 4), (1, 8)]),
    head_size=st.sampled_from([16, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_decode_agrees_on_random_batches(kernel, shape, heads, head_size, dtype, seed):
    block_size, lengths = shape
    num_kv_heads, group = heads
    problem = make_problem(
        lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    assert relative_error(DECODE[kernel](problem), dense_attention(problem)) <= TOLERANCE[dtype]


@pytest.mark.fuzz
@pytest.mark.parametrize("kernel", RAGGED)
@RANDOM
@given(
    shape=lengths_around_blocks(),
    cached=st.lists(st.integers(0, 100), min_size=3, max_size=3),
    group=st.sampled_from([1, 3, 5, 8]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_prefill_agrees_on_random_batches(kernel, shape, cached, group, dtype, seed):
    """From nothing cached (a full prefill) to all but the last token (a decode), in one batch."""
    block_size, lengths = shape
    query_lens = [
        length - min(length * share // 100, max(length - 1, 0))
        for length, share in zip(lengths, cached, strict=False)
    ]
    problem = make_problem(
        lengths, query_lens, num_kv_heads=1, group=group, block_size=block_size, dtype=dtype, seed=seed
    )
    assert relative_error(RAGGED[kernel](problem), dense_attention(problem)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", DECODE)
def test_thirty_two_query_heads_share_one_kv_head(kernel):
    problem = make_problem([17], num_kv_heads=1, group=32, head_size=16)
    assert relative_error(DECODE[kernel](problem), dense_attention(problem)) <= 1e-5


def test_reference_agrees_with_dense_attention():
    problem = make_problem([9, 0, 1, 4], [3, 0, 1, 4], group=3)
    output = ReferenceBackend().paged_attention(
        problem.query.double(), problem.layer, problem.batch, scale=problem.scale
    )
    assert relative_error(output, dense_attention(problem)) <= 1e-12


def test_many_parts_add_up_to_the_same_as_one():
    """Thirty-two parts: the second kernel reads sixteen at a time, and the largest score may come late."""
    problem = make_problem([500, 3, 33], num_kv_heads=2, group=3)
    many, one = run_split(problem, part_len=16), run_split(problem, part_len=512)
    assert relative_error(many, dense_attention(problem)) <= 1e-5
    assert relative_error(many, one) <= 1e-6


@pytest.mark.parametrize("kernel", DECODE)
def test_neighbours_do_not_change_a_row_in_a_single_bit(kernel):
    problem = make_problem([13, 20, 6], group=3)
    before = DECODE[kernel](problem)
    starts = problem.batch.query_start.tolist()
    for seq in (0, 2):  # everything of the neighbours changes but their lengths
        problem.query[starts[seq] : starts[seq + 1]] *= -7
        blocks = problem.batch.block_tables[seq, : -(-int(problem.batch.context_lens[seq]) // 4)].long()
        problem.layer.key[blocks] += 3
        problem.layer.value[blocks] *= 100
    after = DECODE[kernel](problem)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0]) and not torch.equal(before[2], after[2])


@pytest.mark.parametrize("kernel", ["decode", "decode_grouped", "decode_split", "prefill"])
def test_a_row_is_the_same_alone_and_among_others(kernel):
    """Bit for bit, as long as the parts of a split are equally long."""
    problem = make_problem([13, 20, 6], group=3)
    together = DECODE[kernel](problem)
    alone = AttentionBatch.build([problem.batch.block_tables[1, :5].tolist()], [1], [20], 4)
    single = DECODE[kernel](replace(problem, batch=alone, query=problem.query[1:2]))
    assert torch.equal(together[1], single[0])


@pytest.mark.parametrize("kernel", DECODE)
def test_the_content_of_table_padding_is_never_used(kernel):
    problem = make_problem([5, 16, 1])
    tables = problem.batch.block_tables
    assert set(POISON) <= set(tables.flatten().tolist())
    output = DECODE[kernel](problem)
    other = torch.where((tables < 0) | (tables == 2**31 - 1), 0, tables)
    clean = replace(problem, batch=replace(problem.batch, block_tables=other))
    assert torch.equal(output, DECODE[kernel](clean))


@pytest.mark.parametrize("kernel", ["decode", "decode_grouped", "decode_split", "prefill"])
def test_a_sequence_without_queries_writes_nothing(kernel):
    """It has keys, and its place in the output is the row after the last."""
    problem = make_problem([5, 9], [1, 0])
    output = DECODE[kernel](problem)
    assert relative_error(output, dense_attention(problem)) <= 1e-5
    assert len(output._base) == 2 and output._base[1].isnan().all()


@pytest.mark.parametrize("kernel", DECODE)
def test_a_batch_without_sequences_gives_nothing(kernel):
    problem = make_problem([])
    assert DECODE[kernel](problem).shape == (0, 4, 16)


@pytest.mark.parametrize("kernel", DECODE)
def test_queries_may_be_slices_of_a_projection(kernel):
    problem = make_problem([5, 9], group=2)
    projection = torch.full((2, 8, 16), float("nan"))
    projection[:, 2:6] = problem.query
    sliced = replace(problem, query=projection[:, 2:6])
    assert not sliced.query.is_contiguous()
    assert torch.equal(DECODE[kernel](sliced), DECODE[kernel](problem))


@pytest.mark.parametrize("block_size", [1, 5, 16, 300])
@pytest.mark.parametrize("kernel", ["decode_grouped", "prefill", "torch"])
def test_block_size_does_not_matter(kernel, block_size):
    """300 is one block for the whole sequence: the contiguous cache."""
    problem = make_problem([37, 2], block_size=block_size, group=3)
    assert relative_error(DECODE[kernel](problem), dense_attention(problem)) <= 1e-5
