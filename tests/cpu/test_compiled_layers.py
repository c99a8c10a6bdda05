"""All layers in one call give what they give one by one, as for backends that do not fuse them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.reference import ReferenceBackend
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cache.storage import KVStorage
from minipaged.cpu.accelerate import use_compiled_kernels
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.modules import CpuLlama
from minipaged.memory import KVSpec
from minipaged.model.llama import LlamaModel
from minipaged.model.tiny import random_llama
from tests.attention.paged import poison
from tests.cpu.test_compiled import WIDE

pytestmark = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
    ),
    pytest.mark.usefixtures("every_way"),
]
LAYERS_ONE_BY_ONE = partial(CpuBackend, fuses_layers=False)
BLOCKS = [[6, 1, 4, 9], [0, 3, 8], [5], [2, 7]]
SIZE = 4  # of a block
# Sequences with several query tokens and with one; and only with one.
STEPS = {"mixed": ([5, 1, 1, 2], [13, 9, 3, 7]), "decodes": ([1, 1, 1, 1], [14, 10, 4, 8])}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call that runs all layers, on any processor."""
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: True)
    run, seen = CpuKernels.run_layers, []

    def counted(self: CpuKernels, step: Any, dtype: torch.dtype) -> None:
        seen.append(step.rows)
        run(self, step, dtype)

    monkeypatch.setattr(CpuKernels, "run_layers", counted)
    return seen


def compiled(dtype: torch.dtype = torch.float32) -> LlamaModel:
    model = use_compiled_kernels(random_llama(WIDE, dtype=dtype))
    assert isinstance(model, CpuLlama)
    return model


def storage_of(dtype: torch.dtype, num_blocks: int = 10) -> KVStorage:
    storage = KVStorage(KVSpec.from_model(WIDE, dtype), num_blocks, SIZE)
    poison(storage)
    return storage


def run_all(model: LlamaModel, backend: Any, storage: KVStorage) -> list[torch.Tensor]:
    """The hidden states of the whole prompts, then of each of `STEPS`."""
    lengths = [8, 8, 2, 5]
    steps = [(lengths, lengths), *STEPS.values()]
    batches = [AttentionBatch.build(BLOCKS, *step, SIZE) for step in steps]
    return [model(100 + torch.arange(b.num_tokens), b, storage, backend) for b in batches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_call_changes_no_bit_of_the_result(calls: list[int], dtype: torch.dtype, threads: int):
    model, before = compiled(dtype), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at_once, one_by_one = storage_of(dtype), storage_of(dtype)
        ours, expected = (
            run_all(model, CpuBackend(), at_once),
            run_all(model, LAYERS_ONE_BY_ONE(), one_by_one),
        )
    finally:
        torch.set_num_threads(before)
    assert calls == [23, 9, 4]
    assert all(map(torch.equal, ours, expected))
    for mine, theirs in zip(at_once.tensors, one_by_one.tensors, strict=True):
        assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("make", "kv_dtype"),
    [
        (LAYERS_ONE_BY_ONE, torch.float32),
        (ReferenceBackend, torch.float32),
        (TorchBackend, torch.float32),
        (CpuBackend, torch.float16),
        (CpuBackend, torch.int8),
    ],
    ids=["told not to", "reference", "plain torch", "other dtype", "int8"],
)
def test_what_is_special_is_asked_layer_by_layer(
    calls: list[int], make: Callable[[], Any], kv_dtype: torch.dtype
):
    ours = run_all(compiled(), make(), storage_of(kv_dtype))
    plain = run_all(random_llama(WIDE), ReferenceBackend(), storage_of(kv_dtype))
    assert not calls
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm()


def test_rows_that_see_no_key_do_not_read_garbage(calls: list[int]):
    model = compiled()
    batch = AttentionBatch.build(BLOCKS[:2], [0, 3], [0, 3], SIZE)
    padded = AttentionBatch(
        torch.tensor([0, 1, 4], dtype=torch.int32),  # a row of padding before the real ones
        batch.context_lens,
        batch.block_tables,
        torch.cat([torch.tensor([-1]), batch.slot_mapping]),
        torch.cat([torch.tensor([0]), batch.positions]),
        SIZE,
        3,
        3,
    )
    ids = torch.tensor([7, 8, 9, 10])
    ours = model(ids, padded, storage_of(torch.float32), CpuBackend())
    alone = model(ids[1:], batch, storage_of(torch.float32), CpuBackend())
    assert calls == [4, 3]
    assert ours.isfinite().all() and torch.equal(ours[1:], alone)


def test_slots_beyond_the_cache_are_refused(calls: list[int]):
    batch = AttentionBatch.build(BLOCKS, [1, 1, 1, 1], [13, 9, 4, 7], SIZE)
    with pytest.raises(ValueError, match="names block 9"):
        compiled()(torch.arange(4), batch, storage_of(torch.float32, num_blocks=8), CpuBackend())
    slots = torch.tensor([32, 1, 40, 2])  # vouched for, and no table names them: the kernel itself sees it
    tables = batch.block_tables.clamp(max=7)
    batch = replace(batch, num_blocks_named=0, block_tables=tables, slot_mapping=slots)
    with pytest.raises(IndexError, match="2 of 4 slots are beyond the 32 slots of the cache"):
        compiled()(torch.arange(4), batch, storage_of(torch.float32, num_blocks=8), CpuBackend())
    assert calls == [4]


def test_what_does_not_fit_together_is_refused_with_both_numbers(calls: list[int]):
    batch = AttentionBatch.build(BLOCKS, [1, 1, 1, 1], [13, 9, 4, 7], 2 * SIZE)
    with pytest.raises(ValueError, match="the batch's block size is 8, the cache's 4"):
        compiled()(torch.arange(4), batch, storage_of(torch.float32), CpuBackend())
    assert not calls
