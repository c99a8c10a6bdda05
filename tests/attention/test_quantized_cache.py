"""int8 and fp8 caches: a scale per token and head, written with the row, moved with the block."""

from dataclasses import replace

import pytest
import torch

from minipaged.attention import get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.write_kv import write_kv_launch
from minipaged.attention.quantize import dequantize_rows, quantize_rows
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cache.block_pool import BlockPool
from minipaged.cache.block_table import BlockCopy, BlockTable
from minipaged.cache.storage import KVStorage
from minipaged.memory import KVSpec
from tests.attention.paged import DECODE, RAGGED, dense_attention, make_problem, read_back, relative_error

QUANTIZED = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_zeros_come_back_as_zeros(dtype):
    """C21a: a scale of 0 would make them NaN."""
    values, scale = quantize_rows(torch.zeros(2, 3, 16), dtype)
    assert (scale == 1).all() and scale.shape == (2, 3)
    assert (dequantize_rows(values, scale) == 0).all()


def test_values_beyond_a_given_scale_saturate():
    """C21b: 4.5 at a scale of 0.03 is 150 steps; int8 holds 127 and must not wrap."""
    values, scale = quantize_rows(torch.tensor([[4.5, -4.5]]), torch.int8, torch.tensor([0.03]))
    assert torch.allclose(dequantize_rows(values, scale), torch.tensor([[3.81, -3.81]]))


def test_values_beyond_a_given_scale_saturate_in_float8():
    values, scale = quantize_rows(torch.tensor([[1e6, -1e6]]), torch.float8_e4m3fn, torch.tensor([1.0]))
    assert dequantize_rows(values, scale).tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.int8, 0.005), (torch.float8_e4m3fn, 0.07)])
def test_a_large_token_does_not_spoil_a_small_one_in_its_block(dtype, bound):
    """C21e: the scale belongs to the token."""
    storage = KVStorage(KVSpec(1, 1, 16, dtype), 2, 4)
    small, large = 0.01 * torch.rand(1, 1, 16), 10 * torch.rand(1, 1, 16)
    for slot, row in enumerate((small, large)):
        TorchBackend().write_kv(storage.layer(0), row, -row, torch.tensor([slot]))
    key, value = read_back(storage.layer(0), torch.tensor([0]))
    assert (key - small).abs().max() < bound * small.max()
    assert (value + small).abs().max() < bound * small.max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_other_dtypes_are_not_quantised_to(dtype):
    with pytest.raises(ValueError, match=f"cannot quantise to {dtype}"):
        quantize_rows(torch.zeros(1, 4), dtype)


def test_a_row_too_small_for_a_scale_is_zero():
    """The smallest float32 over 127 is 0, and a scale of 0 would give infinities."""
    values, scale = quantize_rows(torch.full((1, 4), 1e-45), torch.int8)
    assert dequantize_rows(values, scale).isfinite().all()


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", DECODE)
def test_decode_reads_a_quantised_cache(kernel, dtype, kv_dtype):
    problem = make_problem([18, 1, 0, 7], group=3, dtype=dtype, kv_dtype=kv_dtype)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert relative_error(DECODE[kernel](problem), dense_attention(problem)) <= bound


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("kernel", RAGGED)
def test_prefill_reads_a_quantised_cache(kernel, kv_dtype):
    problem = make_problem([18, 5, 0, 7], [18, 2, 0, 1], group=3, kv_dtype=kv_dtype)
    assert relative_error(RAGGED[kernel](problem), dense_attention(problem)) <= 1e-5


@pytest.mark.parametrize("kernel", DECODE)
def test_key_and_value_scales_are_not_interchangeable(kernel):
    """C21c: keys at scale 0.5, values at scale 2."""
    problem = make_problem([6], kv_dtype=torch.int8)
    problem.layer.key_scale.fill_(0.5)
    problem.layer.value_scale.fill_(2.0)
    slots = AttentionBatch.build([problem.batch.block_tables[0].tolist()], [6], [6], 4).slot_mapping
    (keys, values) = read_back(problem.layer, slots)
    problem.keys, problem.values, problem.scale = [keys], [values], 1e-3
    expected = dense_attention(problem)
    assert relative_error(DECODE[kernel](problem), expected) <= 1e-5
    swapped = KVStorage(problem.storage.spec, problem.storage.num_blocks, 4)
    key, value, key_scale, value_scale = problem.storage.tensors
    for ours, theirs in zip(swapped.tensors, (key, value, value_scale, key_scale), strict=True):
        ours.copy_(theirs)
    assert relative_error(DECODE[kernel](replace(problem, storage=swapped)), expected) > 0.1


@pytest.mark.parametrize("kernel", DECODE)
def test_tiny_values_survive_float16(kernel):
    """Weights times scales of 1e-7 would underflow in float16 and the output lose its digits."""
    problem = make_problem([40], dtype=torch.float16, kv_dtype=torch.int8)
    problem.layer.value_scale.mul_(1e-5)
    problem.values[0].mul_(1e-5)
    output = DECODE[kernel](replace(problem, query=problem.query.float())).half()
    half = DECODE[kernel](problem)
    assert (half - output).abs().max() <= 6e-8  # one step of the smallest float16 numbers


@pytest.mark.parametrize("kernel", DECODE)
def test_scales_of_zero_give_zeros_and_no_nan(kernel):
    problem = make_problem([20], kv_dtype=torch.int8)
    problem.layer.key_scale.zero_()
    problem.layer.value_scale.zero_()
    assert (DECODE[kernel](problem) == 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scales_follow_their_block_through_forks_and_swaps(backend, dtype):
    """C21d: six tokens, a fork, one token more for the child, then out to the host and back."""
    device, host = (KVStorage(KVSpec(2, 3, 16, dtype), 8, 4) for _ in range(2))
    pool = BlockPool(8)
    parent = BlockTable(pool, 4)
    parent.append(6)
    for layer in (0, 1):
        rows = torch.randn(2, 6, 3, 16)
        TorchBackend().write_kv(device.layer(layer), *rows, torch.from_numpy(parent.slots(0, 6)))
    before = [read_back(device.layer(i), torch.from_numpy(parent.slots(0, 6))) for i in (0, 1)]

    child = parent.fork()
    copies = child.append(1)
    assert len(copies) == 1
    get_backend(backend).copy_blocks(device, copies)
    for table in (parent, child):
        for layer, (key, value) in enumerate(before):
            read = read_back(device.layer(layer), torch.from_numpy(table.slots(0, 6)))
            assert torch.equal(read[0], key) and torch.equal(read[1], value)

    device.copy_to(host, [BlockCopy(block, i) for i, block in enumerate(child.blocks)])
    for layer, (key, value) in enumerate(before):
        read = read_back(host.layer(layer), torch.arange(6))
        assert torch.equal(read[0], key) and torch.equal(read[1], value)


def test_the_kernel_quantises_as_torch_does():
    ours, theirs = (KVStorage(KVSpec(1, 3, 48, torch.int8), 2, 4).layer(0) for _ in range(2))
    key, value = torch.randn(2, 8, 3, 48)
    key[3] = 0
    value[2, 1, :3] = torch.tensor([127.0, 0.5, 1.5])  # 0.5 and 1.5 are ties
    value[2, 1, 3:] = 0
    slots = torch.randperm(8)
    TorchBackend().write_kv(theirs, key, value, slots)
    write_kv_launch(ours, key, value, slots).run()
    assert torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value)
    assert torch.equal(ours.key_scale, theirs.key_scale)
    assert torch.equal(ours.value_scale, theirs.value_scale)
    assert theirs.value[slots[2] // 4, slots[2] % 4, 1, :3].tolist() == [127, 0, 2]
