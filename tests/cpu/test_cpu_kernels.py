"""Attention's compiled kernels: right in both dtypes and every shape; what they cannot read goes to torch."""

import shutil
from dataclasses import replace

import pytest
import torch

from minipaged.attention.torch_backend import TorchBackend
from minipaged.cache.storage import KVStorage
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.kernels import CpuKernels
from minipaged.memory import KVSpec
from tests.attention.paged import (
    Problem,
    dense_attention,
    make_problem,
    poison,
    relative_error,
    run_cpu,
    run_torch,
)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8])
def test_every_head_size_and_group_equals_dense_attention(dtype, tolerance, head_size, group):
    """Ragged lengths, in a pool that is NaN wherever no live key is."""
    problem = make_problem([1, 7, 8, 33], group=group, head_size=head_size, block_size=8, dtype=dtype)
    assert cpu_kernels.can_decode(problem.query, problem.layer)
    assert relative_error(run_cpu(problem), dense_attention(problem)) <= tolerance


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 5])
@pytest.mark.parametrize("num_seqs", [1, 3, 40])
def test_few_sequences_and_many_take_different_ways_to_the_same_result(
    dtype, tolerance, num_kv_heads, num_seqs
):
    """Few: KV heads are handed out one by one; many: all heads of one together. In any number of threads."""
    lengths = [1 + 17 * i % 60 for i in range(num_seqs)]
    problem = make_problem(lengths, group=3, num_kv_heads=num_kv_heads, head_size=64, dtype=dtype)
    expected, threads = dense_attention(problem), torch.get_num_threads()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            assert relative_error(run_cpu(problem), expected) <= tolerance
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_scores_far_apart_do_not_overflow():
    problem = make_problem([40], head_size=64)
    problem.query.mul_(1e3)
    expected = dense_attention(problem)
    assert relative_error(run_cpu(problem), expected) <= 1e-5


def heads_in_wider_rows(problem: Problem) -> torch.Tensor:
    """The query as the model hands it over: a view of rows that hold keys and values too."""
    tokens, heads, size = problem.query.shape
    whole = torch.full((tokens, 2 * heads, size), float("nan"), dtype=problem.query.dtype)
    whole[:, :heads] = problem.query
    return whole[:, :heads]


@needs_compiler
def test_a_query_that_is_a_view_is_read_right_and_not_copied():
    problem = make_problem([5, 9])
    expected = run_cpu(problem)
    problem.query = heads_in_wider_rows(problem)
    assert cpu_kernels.can_decode(problem.query, problem.layer)
    assert torch.equal(run_cpu(problem), expected)


@needs_compiler
def test_a_query_whose_numbers_lie_apart_goes_to_torch():
    problem = make_problem([5, 9])
    expected = run_torch(problem)
    problem.query = problem.query.transpose(0, 2).contiguous().transpose(0, 2)
    assert not cpu_kernels.can_decode(problem.query, problem.layer)
    assert relative_error(run_cpu(problem), expected) <= 1e-6


def test_what_it_cannot_read_goes_to_torch():
    supported = make_problem([3])
    assert cpu_kernels.can_decode(supported.query, supported.layer)
    odd = make_problem([3], head_size=24)
    for other in (make_problem([3], dtype=torch.float16), make_problem([3], kv_dtype=torch.int8), odd):
        assert not cpu_kernels.can_decode(other.query, other.layer)
        assert relative_error(run_cpu(other), dense_attention(other)) <= 1e-2


@pytest.fixture
def any_processor(every_way, monkeypatch):
    """The kernel that is made of products is used even where it would not be faster, in every way."""
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: True)


def require_prefill(problem: Problem, tolerance: float) -> None:
    kernels = cpu_kernels.load()
    assert cpu_kernels.can_prefill(problem.query, problem.layer, kernels)
    assert relative_error(run_cpu(problem), dense_attention(problem)) <= tolerance


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_prompts_of_every_head_size_and_group_equal_dense_attention(
    any_processor, dtype, tolerance, head_size, group
):
    """Whole prompts, chunks after a context and decodes in one batch."""
    problem = make_problem(
        [9, 40, 33, 5, 70], [9, 7, 1, 2, 66], group=group, head_size=head_size, dtype=dtype
    )
    require_prefill(problem, tolerance)


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("num_queries", [2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 130])
@pytest.mark.parametrize("before", [0, 1, 31, 100])
def test_prompts_of_every_length_after_every_context(any_processor, dtype, tolerance, num_queries, before):
    lengths, queries = [num_queries + before, 2 + before], [num_queries, 2]
    problem = make_problem(lengths, queries, group=3, num_kv_heads=3, head_size=32, dtype=dtype)
    require_prefill(problem, tolerance)


@needs_compiler
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_prompts_in_blocks_of_any_size_and_any_number_of_threads(any_processor, block_size):
    problem = make_problem([150, 20], [140, 20], head_size=32, block_size=block_size)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            require_prefill(problem, 1e-5)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_a_key_that_is_not_seen_yet_does_not_matter_however_large(any_processor):
    """Its score must not be the one that the others are measured against."""
    problem = make_problem([40], [40], head_size=32)
    problem.keys[0][20:] *= 1e4
    cache, table = problem.layer.key, problem.batch.block_tables[0].tolist()
    for pos in range(20, 40):
        cache[table[pos // 4], pos % 4] *= 1e4
    out, expected = run_cpu(problem), dense_attention(problem)
    assert relative_error(out[:20], expected[:20]) <= 1e-5
    assert relative_error(out, expected) <= 1e-5


@needs_compiler
def test_rows_that_see_no_key_stay_zero(any_processor):
    problem = make_problem([5, 6], [5, 6], head_size=32)
    lens = torch.tensor([3, 0], dtype=torch.int32)
    short = replace(problem.batch, context_lens=lens)
    out = CpuBackend().paged_attention(problem.query, problem.layer, short, scale=problem.scale)
    plain = TorchBackend().paged_attention(problem.query, problem.layer, short, scale=problem.scale)
    assert not out[:2].any() and not out[5:].any() and out[2:5].any()
    torch.testing.assert_close(out, plain)


@needs_compiler
def test_prompts_that_the_kernel_cannot_read_go_to_torch(any_processor):
    kernels = cpu_kernels.load()
    for other in (
        make_problem([9], [9], head_size=48),
        make_problem([9], [9], head_size=32, dtype=torch.float16),
        make_problem([9], [9], head_size=32, kv_dtype=torch.int8),
    ):
        assert not cpu_kernels.can_prefill(other.query, other.layer, kernels)
        assert relative_error(run_cpu(other), dense_attention(other)) <= 1e-2


def written(dtype, backend, slots) -> KVStorage:
    """A NaN cache of 40 slots after `backend` stored random rows in it, views as the model makes them."""
    storage = KVStorage(KVSpec(1, 3, 24, dtype), num_blocks=10, block_size=4)
    poison(storage)
    rows = torch.randn(len(slots), 12, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    backend.write_kv(storage.layer(0), rows[:, 6:9], rows[:, 9:], torch.tensor(slots, dtype=torch.int64))
    return storage


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[7], [39, 0, 12, 5], [3, -1, 4, -1], []])
def test_rows_are_stored_where_torch_stores_them(dtype, slots):
    compiled, plain = (written(dtype, make(), slots) for make in (CpuBackend, TorchBackend))
    for ours, theirs in zip(compiled.tensors, plain.tensors, strict=True):
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


@needs_compiler
def test_a_slot_beyond_the_cache_is_refused():
    with pytest.raises(IndexError, match="slot 40 is to be written, the cache has 0 to 39"):
        written(torch.float32, CpuBackend(), [3, 40])
