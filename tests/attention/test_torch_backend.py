"""How the torch backend gathers: only live keys, sequences of about the same length together."""

import pytest
import torch

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.torch_backend import (
    BUCKET_KEYS,
    TorchBackend,
    length_buckets,
    plan_gather,
    plan_prefill,
)
from minipaged.cpu.backend import CpuBackend
from tests.attention.paged import DECODE, dense_attention, make_problem, relative_error, run_torch


def test_buckets_keep_like_lengths_together():
    lengths = [50, 4000, 60, 1, 10, 17, 49]
    assert length_buckets(lengths) == [[3, 4, 5], [6, 0, 2], [1]]
    assert length_buckets([]) == []


def test_a_bucket_gathers_no_more_than_fits_the_cache():
    buckets = length_buckets([512] * 10 + [3000])
    assert [len(bucket) for bucket in buckets] == [4, 4, 2, 1]
    assert BUCKET_KEYS == 4 * 512


def test_gathered_keys_grow_with_the_sum_of_the_contexts():
    """Not with the batch times the longest: one long sequence among many short ones costs its own length."""
    generator = torch.Generator().manual_seed(0)
    lengths = [8000, *torch.randint(16, 400, (63,), generator=generator).tolist()]
    padded = sum(len(bucket) * max(lengths[i] for i in bucket) for bucket in length_buckets(lengths))
    assert padded < 1.3 * sum(lengths) < 64 * 8000 / 10


def test_only_live_slots_are_gathered():
    problem = make_problem([5, 9, 0, 16], block_size=4)
    live = AttentionBatch.build(
        [row[:4].tolist() for row in problem.batch.block_tables], [5, 9, 0, 16], [5, 9, 0, 16], 4
    )
    plan = plan_gather(problem.batch, problem.batch.decoding_sequences())
    assert plan.slots.shape == (3, 16)
    assert set(plan.slots.flatten().tolist()) == set(live.slot_mapping.tolist())
    assert plan.visible.sum(1).tolist() == [5, 9, 16]


def test_a_whole_prompt_needs_no_mask_and_a_suffix_does():
    whole, suffix = plan_prefill(make_problem([6, 7], [6, 3]).batch)
    assert whole.visible is None
    assert suffix.visible.tolist() == [[True] * (5 + row) + [False] * (2 - row) for row in range(3)]


def test_decodes_and_prefills_mix_in_one_batch():
    problem = make_problem([9, 30, 4, 2, 0, 200], [1, 7, 4, 1, 0, 1], group=3)
    assert relative_error(run_torch(problem), dense_attention(problem)) <= 1e-5


@pytest.mark.parametrize("make", [TorchBackend, CpuBackend])
def test_every_batch_is_planned_afresh(make):
    """A backend remembers the plan of a batch for its layers, and must not use it for the next batch."""
    backend = make()
    for lengths, queries in (([6, 3], [1, 1]), ([3, 6], [1, 1]), ([6, 3], [4, 1]), ([8, 8], [8, 1])):
        problem = make_problem(lengths, queries)
        for _layer in range(2):
            output = backend.paged_attention(problem.query, problem.layer, problem.batch, scale=problem.scale)
            assert relative_error(output, dense_attention(problem)) <= 1e-5


@pytest.mark.parametrize("kernel", DECODE)
def test_a_cache_of_another_dtype_is_read_in_that_of_the_query(kernel):
    problem = make_problem([9, 4], kv_dtype=torch.float16)
    output = DECODE[kernel](problem)
    assert output.dtype == torch.float32
    assert relative_error(output, dense_attention(problem)) <= 1e-5
