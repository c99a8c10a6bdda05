"""Inputs on which other engines' kernels were wrong, with the right values."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from minipaged.attention.batch import AttentionBatch, queries_per_kv
from minipaged.attention.kernels.addresses import look_up_blocks, slot_offsets
from minipaged.attention.kernels.write_kv import write_kv_launch
from minipaged.cache.storage import KVStorage, LayerKV
from tests.attention.paged import (
    DECODE,
    RAGGED,
    Problem,
    dense_attention,
    make_problem,
    poison,
    relative_error,
    run_split,
)


@triton.jit
def offsets_kernel(out_ptr, blocks_ptr, positions_ptr, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    lane = tl.arange(0, 2)
    blocks, positions = tl.load(blocks_ptr + lane), tl.load(positions_ptr + lane)
    tl.store(out_ptr + lane, slot_offsets(blocks, positions, stride_block, stride_slot, BLOCK_SIZE))


@pytest.mark.parametrize(
    ("block", "stride_block", "offset"),
    [(7768, 480 * 576, 2147696640), (699051, 16 * 3 * 64, 2147484672)],
)
def test_offsets_of_high_block_ids_do_not_wrap(block, stride_block, offset):
    """Both offsets are just past 2**31, from an int32 table."""
    out = torch.zeros(2, dtype=torch.int64)
    blocks = torch.tensor([block, 0], dtype=torch.int32)
    positions = torch.tensor([32, 3], dtype=torch.int32)
    offsets_kernel[(1,)](out, blocks, positions, stride_block, 192, BLOCK_SIZE=16)
    assert out.tolist() == [offset, 3 * 192]


@pytest.mark.parametrize("kernel", DECODE)
def test_a_pool_of_more_than_two_billion_values_is_addressed(kernel):
    """The third block lies 2**31 values after the first. Pages never touched take no memory."""
    small = make_problem([10], num_kv_heads=2, group=2)
    memory = torch.empty(2**31 + 2**12, dtype=torch.int8)
    strides = (2**30, 64, 32, 1)
    key, value = (memory.as_strided((3, 4, 2, 16), strides, first) for first in (0, 16))
    layer = LayerKV(key, value, None, None)
    batch = AttentionBatch.build([[2, 1, 0]], [1], [10], 4)
    rows = torch.randint(-9, 9, (2, 10, 2, 16)).float()
    slots = AttentionBatch.build([[2, 1, 0]], [10], [10], 4).slot_mapping
    write_kv_launch(layer, rows[0], rows[1], slots).run()

    big = LargePool(batch, small.storage, small.query, [rows[0].double()], [rows[1].double()], 0.25)
    big.kv = layer
    assert relative_error(DECODE[kernel](big), dense_attention(big)) <= 1e-5


class LargePool(Problem):
    """A problem whose cache is a layer without a storage around it."""

    kv: LayerKV

    @property
    def layer(self) -> LayerKV:
        return self.kv


@pytest.mark.parametrize("head_size", [48, 80, 96, 112])
@pytest.mark.parametrize("kernel", DECODE)
def test_head_sizes_that_are_no_power_of_two(kernel, head_size):
    """Padding lanes must not reach the neighbour head, whose slots hold 1e4 here."""
    problem = make_problem([9], num_kv_heads=2, group=1, head_size=head_size)
    for cache in (problem.layer.key, problem.layer.value):
        cache[:, :, 1] = 1e4
    problem.keys[0][:, 1] = problem.values[0][:, 1] = 1e4
    problem.query[:, 1] = 0.0
    output, expected = DECODE[kernel](problem), dense_attention(problem)
    assert relative_error(output[:, 0], expected[:, 0]) <= 1e-5
    assert relative_error(output[:, 1], expected[:, 1]) <= 1e-5


@pytest.mark.parametrize(
    ("query_heads", "kv_heads"), [(9, 3), (6, 1), (5, 1), (7, 1), (14, 2), (8, 8), (32, 1)]
)
@pytest.mark.parametrize("kernel", ["decode_grouped", "decode_split", "prefill", "torch"])
def test_any_number_of_query_heads_per_kv_head(kernel, query_heads, kv_heads):
    """Rows of padding must not become the next group's heads."""
    problem = make_problem(
        [17], num_kv_heads=kv_heads, group=query_heads // kv_heads, head_size=64, block_size=16
    )
    assert relative_error(DECODE[kernel](problem), dense_attention(problem)) <= 1e-5


@pytest.mark.parametrize("kernel", DECODE)
def test_heads_that_do_not_divide_are_refused(kernel):
    problem = make_problem([5], num_kv_heads=2, group=2)
    uneven = replace(problem, query=torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match="5 query heads cannot share 2"):
        DECODE[kernel](uneven)


def test_no_kv_head_is_refused():
    with pytest.raises(ValueError, match="4 query heads cannot share 0"):
        queries_per_kv(4, 0)


@pytest.mark.parametrize("kernel", DECODE)
def test_never_written_slots_do_not_reach_the_output(kernel):
    """5 tokens in blocks of 4; all else is NaN, the blocks that pad the table too."""
    problem = make_problem([5])
    assert problem.layer.key.isnan().any() and problem.batch.block_tables.shape[1] > 2
    output = DECODE[kernel](problem)
    assert output.isfinite().all()
    assert relative_error(output, dense_attention(problem)) <= 1e-5


@triton.jit
def lookup_kernel(out_ptr, table_ptr, end, BLOCK_SIZE: tl.constexpr):
    lane = tl.arange(0, 16)
    tl.store(out_ptr + lane, look_up_blocks(table_ptr, lane, end, BLOCK_SIZE))


def test_nothing_is_looked_up_behind_the_context():
    """The table may end there, and so may the memory it lies in."""
    table = torch.tensor([7, 2, 9, 9], dtype=torch.int32)
    out = torch.full((16,), -5, dtype=torch.int32)
    lookup_kernel[(1,)](out, table, 6, BLOCK_SIZE=4)
    assert out.tolist() == [7] * 4 + [2] * 2 + [0] * 10


@pytest.mark.parametrize("kernel", DECODE)
def test_a_padded_request_without_keys_gives_zeros(kernel):
    """C17a: the batch is padded with a request that has a query row and no key."""
    problem = make_problem([5, 4])
    padded = replace(problem.batch, context_lens=torch.tensor([5, 0], dtype=torch.int32))
    problem.batch, problem.keys[1], problem.values[1] = padded, problem.keys[1][:0], problem.values[1][:0]
    output = DECODE[kernel](problem)
    assert (output[1] == 0).all()
    assert relative_error(output, dense_attention(problem)) <= 1e-5


@pytest.mark.parametrize("kernel", RAGGED)
def test_query_rows_before_the_first_key_give_zeros(kernel):
    """C17b: four queries over two keys; the first two rows see nothing."""
    problem = make_problem([4], [4])
    problem.batch = replace(
        problem.batch, context_lens=torch.tensor([2], dtype=torch.int32), max_context_len=2
    )
    problem.keys, problem.values = [problem.keys[0][:2]], [problem.values[0][:2]]
    output = RAGGED[kernel](problem)
    assert (output[:2] == 0).all() and (output[2:] != 0).any()
    assert relative_error(output, dense_attention(problem)) <= 1e-5


def test_parts_without_keys_contribute_nothing():
    """C17c: four parts over a context of one token."""
    problem = make_problem([1, 60])
    assert torch.equal(run_split(problem)[0], run_split(make_problem([1, 60]), part_len=64)[0])
    assert relative_error(run_split(problem)[:1], problem.values[0].repeat_interleave(2, 1)) <= 1e-6


@pytest.mark.parametrize("kernel", DECODE)
def test_one_very_negative_score_still_has_the_whole_weight(kernel):
    """C17d: a finite stand-in for minus infinity would let masked keys in."""
    problem = make_problem([1], group=1)
    problem.query[:] = -3000.0
    problem.layer.key[problem.batch.block_tables[0, 0], 0] = 30.0  # every score is about -3.6e5
    problem.keys[0][:] = 30.0
    assert relative_error(DECODE[kernel](problem), problem.values[0]) <= 1e-6


@pytest.mark.parametrize("kernel", RAGGED)
def test_a_suffix_is_masked_by_absolute_position(kernel):
    """Two queries over five keys with equal weights and values 1 to 5: averages 2.5 and 3."""
    problem = make_problem([5], [2], num_kv_heads=1, group=1)
    problem.query.zero_()
    for position in range(5):
        block = problem.batch.block_tables[0, position // 4]
        problem.layer.value[block, position % 4] = float(position + 1)
    output = RAGGED[kernel](problem)
    assert torch.allclose(output[:, 0, 0], torch.tensor([2.5, 3.0]), atol=1e-6)


@pytest.mark.parametrize("kernel", RAGGED)
@pytest.mark.parametrize("chunks", [[4, 4, 2], [1] * 10])
def test_chunked_prefill_equals_prefill_in_one_go(kernel, chunks):
    """The outputs and the cached bytes are the same, however a prompt of ten tokens is cut."""
    whole = make_problem([10], [10], group=3)
    key, value = (rows[0].float() for rows in (whole.keys, whole.values))
    expected = RAGGED[kernel](whole)
    table = whole.batch.block_tables[0, :3].tolist()
    storage = KVStorage(whole.storage.spec, whole.storage.num_blocks, 4)
    poison(storage)
    done, outputs = 0, []
    for size in chunks:
        batch = AttentionBatch.build([table], [size], [done + size], 4)
        assert batch.positions.tolist() == list(range(done, done + size))
        rows = slice(done, done + size)
        write_kv_launch(storage.layer(0), key[rows], value[rows], batch.slot_mapping).run()
        part = Problem(batch, storage, whole.query[rows], whole.keys, whole.values, whole.scale)
        outputs.append(RAGGED[kernel](part))
        done += size
    assert relative_error(torch.cat(outputs), expected) <= 1e-6
    slots = whole.batch.slot_mapping
    for ours, theirs in ((storage.key, whole.storage.key), (storage.value, whole.storage.value)):
        assert torch.equal(ours[0].flatten(0, 1)[slots], theirs[0].flatten(0, 1)[slots])
