"""Writing keys and values to their slots, and copying blocks: nothing else in the pool may change."""

import pytest
import torch

from minipaged.attention import get_backend
from minipaged.attention.kernels import copy_blocks
from minipaged.cache.block_table import BlockCopy
from minipaged.cache.storage import KVStorage
from minipaged.memory import KVSpec

BACKENDS = ["torch", "triton", "reference"]


def filled(dtype: torch.dtype, *, layers: int = 2, heads: int = 3, head_size: int = 48) -> KVStorage:
    """Random bytes, NaNs among them where the dtype has any."""
    storage = KVStorage(KVSpec(layers, heads, head_size, dtype), 6, 4)
    for tensor in storage.tensors:
        tensor.view(torch.uint8).copy_(torch.randint(0, 256, tensor.view(torch.uint8).shape))
    return storage


def bytes_of(storage: KVStorage) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensor in storage.tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_named_slots_of_the_layer_are_written(backend, dtype):
    storage = filled(dtype)
    before = bytes_of(storage)
    key, value = torch.randn(2, 3, 3, 48)
    slots = torch.tensor([21, 2, 9])
    get_backend(backend).write_kv(storage.layer(1), key, value, slots)
    for old, new in zip(before, bytes_of(storage), strict=True):
        changed = (old != new).flatten(3).any(-1).flatten(1) if old.dim() > 3 else (old != new)
        changed = changed.reshape(2, 24, -1).any(-1)
        assert not changed[0].any()
        assert changed[1].nonzero().flatten().tolist() == [2, 9, 21]
    if dtype == torch.float32:
        assert torch.equal(storage.key[1].flatten(0, 1)[slots], key)
        assert torch.equal(storage.value[1].flatten(0, 1)[slots], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negative_slot_is_padding_and_not_the_last_slot(backend, dtype):
    padded, plain = filled(dtype), filled(dtype)
    for a, b in zip(padded.tensors, plain.tensors, strict=True):
        b.view(torch.uint8).copy_(a.view(torch.uint8))
    key, value = torch.randn(2, 5, 3, 48)
    slots = torch.tensor([-1, 21, -1, 2, -17])
    get_backend(backend).write_kv(padded.layer(1), key, value, slots)
    get_backend(backend).write_kv(plain.layer(1), key[[1, 3]], value[[1, 3]], torch.tensor([21, 2]))
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(padded), bytes_of(plain), strict=True))


@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 3, 1), (1, 3, 64), (2, 3, 48), (0, 3, 48)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_another_shape_are_refused_and_not_broadcast(backend, shape):
    storage = filled(torch.float32)
    before = bytes_of(storage)
    right, wrong = torch.zeros(1, 3, 48), torch.zeros(shape)
    for key, value in ((wrong, wrong), (right, wrong), (wrong, right)):
        with pytest.raises(ValueError, match=r"must be \[1, 3, 48\]"):
            get_backend(backend).write_kv(storage.layer(0), key, value, torch.tensor([3]))
    assert all(torch.equal(a, b) for a, b in zip(before, bytes_of(storage), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_kernel_and_torch_write_the_same_from_any_layout(dtype):
    ours, theirs = filled(dtype), filled(dtype)
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        b.view(torch.uint8).copy_(a.view(torch.uint8))
    projection = torch.randn(5, 2, 3, 48)
    key, value = projection[:, 0], projection.transpose(2, 3).contiguous().transpose(2, 3)[:, 1]
    assert value.stride(-1) != 1
    slots = torch.tensor([0, 23, 4, 11, 12])
    get_backend("triton").write_kv(ours.layer(0), key, value, slots)
    get_backend("torch").write_kv(theirs.layer(0), key, value, slots)
    if dtype == torch.bfloat16:  # the interpreter cuts digits off where torch rounds
        assert torch.allclose(ours.key[0].flatten(0, 1)[slots].float(), key, rtol=2**-7)
    else:
        assert all(torch.equal(a, b) for a, b in zip(bytes_of(ours), bytes_of(theirs), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_read_before_they_write(backend, dtype):
    """1 -> 2 -> 3 -> 1 is a ring, 5 -> 0 and 5 -> 4 share a source."""
    storage = filled(dtype)
    before = bytes_of(storage)
    copies = [BlockCopy(*pair) for pair in ((1, 2), (2, 3), (3, 1), (5, 0), (5, 4))]
    get_backend(backend).copy_blocks(storage, copies)
    for old, new in zip(before, bytes_of(storage), strict=True):
        assert torch.equal(new, old[:, [5, 3, 1, 2, 5, 5]])


def test_copies_without_overlap_take_one_launch_for_all_layers():
    storage = filled(torch.float16)
    pair = [(storage.key, storage.value)]
    assert len(copy_blocks.copy_launches(pair, [1, 1], [2, 3])) == 1
    assert len(copy_blocks.copy_launches(pair, [1, 2], [2, 3])) == 2


def test_blocks_larger_than_a_chunk_are_copied_whole():
    storage = filled(torch.float32, layers=1, heads=8, head_size=80)
    assert storage.key[0, 0].nbytes > 2 * copy_blocks.CHUNK and storage.key[0, 0].nbytes % copy_blocks.CHUNK
    before = bytes_of(storage)
    get_backend("triton").copy_blocks(storage, [BlockCopy(4, 1)])
    for old, new in zip(before, bytes_of(storage), strict=True):
        assert torch.equal(new, old[:, [0, 4, 2, 3, 4, 5]])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_destination_given_twice_is_refused_and_nothing_changed(backend):
    storage = filled(torch.float16)
    before = bytes_of(storage)
    with pytest.raises(ValueError, match="destination is given twice"):
        get_backend(backend).copy_blocks(storage, [BlockCopy(0, 2), BlockCopy(1, 2)])
    assert all(torch.equal(a, b) for a, b in zip(before, bytes_of(storage), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_copies_and_no_tokens_change_nothing(backend):
    storage = filled(torch.float16)
    before = bytes_of(storage)
    get_backend(backend).copy_blocks(storage, [])
    rows = torch.zeros(0, 3, 48)
    get_backend(backend).write_kv(storage.layer(0), rows, rows, torch.zeros(0, dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(before, bytes_of(storage), strict=True))


def test_blocks_that_are_not_one_run_of_memory_are_refused():
    cache = torch.zeros(1, 3, 4, 2, 16).transpose(2, 3)
    with pytest.raises(ValueError, match="a block must be contiguous"):
        copy_blocks.as_bytes(cache)
