"""KVStorage: what a block is in memory, writing by slot, copies that take everything with them."""

from itertools import product

import pytest
import torch

from minipaged.attention.quantize import dequantize_rows, quantize_rows
from minipaged.cache import BlockCopy, BlockPool, BlockTable, KVStorage
from minipaged.dtypes import KV_DTYPES
from minipaged.memory import KVSpec

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def storage_of(dtype: torch.dtype, num_blocks: int = 6, block_size: int = 4) -> KVStorage:
    """Fresh memory full of NaN (and garbage in int8), so that nothing unwritten passes for a value."""
    storage = KVStorage(KVSpec(2, 3, 8, dtype), num_blocks, block_size)
    for tensor in storage.tensors:
        tensor.view(torch.uint8).fill_(0xFF)
    return storage


def fill_blocks(storage: KVStorage) -> None:
    """Give every byte a value that tells its block, tensor and layer."""
    for number, tensor in enumerate(storage.tensors):
        for layer, block in product(range(len(tensor)), range(storage.num_blocks)):
            tensor[layer, block].view(torch.uint8).fill_(64 * layer + 16 * number + block)


def bytes_of(storage: KVStorage, block: int) -> list[bytes]:
    return [tensor[:, block].contiguous().view(torch.uint8).numpy().tobytes() for tensor in storage.tensors]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_bytes_are_what_the_spec_says(dtype):
    storage = storage_of(dtype)
    assert storage.nbytes == 6 * storage.spec.bytes_per_block(4)
    assert storage.num_slots == 24
    assert storage.key.shape == storage.value.shape == (2, 6, 4, 3, 8)
    if dtype in QUANTIZED:
        assert storage.key_scale.shape == storage.value_scale.shape == (2, 6, 4, 3)
        assert storage.key_scale.dtype == torch.float32
    else:
        assert storage.key_scale is None and storage.value_scale is None


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_layer_is_a_view(dtype):
    storage = storage_of(dtype)
    layer = storage.layer(1)
    layer.key.view(torch.uint8).fill_(7)
    assert (storage.key[1].view(torch.uint8) == 7).all()
    assert not (storage.key[0].view(torch.uint8) == 7).any()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rows_are_written_by_slot_and_nowhere_else(dtype):
    storage = storage_of(dtype)
    before = [tensor.clone() for tensor in storage.tensors]
    key, value = torch.randn(2, 3, 3, 8).unbind(0)
    rows = [key.to(dtype), value.to(dtype)]
    if dtype in QUANTIZED:
        rows += [torch.rand(3, 3), torch.rand(3, 3) + 2]
    slots = torch.tensor([13, 2, 3])
    storage.layer(1).write(slots, *rows)
    for tensor, old, row in zip(storage.tensors, before, rows, strict=True):
        expected = old.view(torch.uint8).clone()
        for slot, new in zip(slots.tolist(), row.unbind(0), strict=True):
            expected[1, slot // 4, slot % 4] = new.contiguous().view(torch.uint8)
        assert torch.equal(tensor.view(torch.uint8), expected)


def test_rows_of_another_dtype_are_refused():
    plain, quantized = storage_of(torch.float16).layer(0), storage_of(torch.int8).layer(0)
    slots, half, scale = torch.tensor([0]), torch.zeros(1, 3, 8, dtype=torch.float16), torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"rows must be torch\.float16"):
        plain.write(slots, half.float(), half)
    with pytest.raises(ValueError, match=r"rows must be torch\.float16"):
        plain.write(slots, half, half, scale, scale)
    with pytest.raises(ValueError, match=r"rows must be torch\.int8, with float32 scales"):
        quantized.write(slots, half.to(torch.int8), half.to(torch.int8))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_copy_takes_every_byte_of_the_block(dtype):
    """Scales included."""
    storage = storage_of(dtype)
    fill_blocks(storage)
    before = [bytes_of(storage, block) for block in range(6)]
    storage.copy_blocks([BlockCopy(1, 4), BlockCopy(1, 5)])
    after = [bytes_of(storage, block) for block in range(6)]
    assert after == [before[0], before[1], before[2], before[3], before[1], before[1]]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_every_source_is_read_before_any_destination_is_written(dtype):
    storage = storage_of(dtype)
    fill_blocks(storage)
    before = [bytes_of(storage, block) for block in range(6)]
    storage.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(2, 0)])
    assert [bytes_of(storage, block) for block in range(3)] == [before[2], before[0], before[1]]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_blocks_travel_to_another_storage_and_back(dtype):
    storage, host = storage_of(dtype), storage_of(dtype, num_blocks=2)
    fill_blocks(storage)
    before = [bytes_of(storage, block) for block in range(6)]
    storage.copy_to(host, [BlockCopy(5, 0), BlockCopy(2, 1)])
    assert [bytes_of(host, 0), bytes_of(host, 1)] == [before[5], before[2]]
    host.copy_to(storage, [BlockCopy(0, 0)])
    assert bytes_of(storage, 0) == before[5]


def test_impossible_copies_are_refused_before_anything_is_written():
    storage = storage_of(torch.float32)
    fill_blocks(storage)
    before = [bytes_of(storage, block) for block in range(6)]
    with pytest.raises(ValueError, match="destination is given twice"):
        storage.copy_blocks([BlockCopy(0, 2), BlockCopy(1, 2)])
    for bad in (BlockCopy(0, 6), BlockCopy(-1, 0), BlockCopy(6, 0), BlockCopy(0, -1)):
        with pytest.raises(ValueError, match="is out of range: 6 to 6 blocks"):
            storage.copy_blocks([BlockCopy(0, 1), bad])
    for other in (storage_of(torch.float16), storage_of(torch.float32, block_size=2)):
        with pytest.raises(ValueError, match="cannot copy blocks of"):
            storage.copy_to(other, [BlockCopy(0, 0)])
    storage.copy_blocks([])
    assert [bytes_of(storage, block) for block in range(6)] == before


def test_an_empty_storage_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0, block_size 4"):
        KVStorage(KVSpec(1, 1, 1, torch.float32), 0, 4)


def written(storage: KVStorage, table: BlockTable, key: torch.Tensor, value: torch.Tensor) -> None:
    """Quantise float rows [num_tokens, heads, head_size] into layer 0 behind the table's other tokens."""
    dtype = storage.spec.dtype
    (k, k_scale), (v, v_scale) = quantize_rows(key, dtype), quantize_rows(value, dtype)
    slots = torch.from_numpy(table.slots(table.num_tokens - len(key), table.num_tokens))
    storage.layer(0).write(slots, k, v, k_scale, v_scale)


def read(storage: KVStorage, table: BlockTable, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.from_numpy(table.slots(0, num_tokens))
    layer = storage.layer(0)
    values = [
        dequantize_rows(rows.flatten(0, 1)[slots], scales.flatten(0, 1)[slots])
        for rows, scales in ((layer.key, layer.key_scale), (layer.value, layer.value_scale))
    ]
    return values[0], values[1]


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_copied_tail_reads_the_same_on_both_sides(dtype):
    """Key and value scales differ by far, so that neither can stand in for the other."""
    storage = storage_of(dtype)
    pool = BlockPool(6)
    parent = BlockTable(pool, 4)
    parent.append(6)
    key, value = torch.randn(6, 3, 8) * 0.5, torch.randn(6, 3, 8) * 200
    written(storage, parent, key, value)
    child = parent.fork()
    storage.copy_blocks(child.append(1))
    written(storage, child, torch.full((1, 3, 8), 9.0), torch.full((1, 3, 8), 9.0))
    for mine, theirs, original in zip(
        read(storage, child, 6), read(storage, parent, 6), (key, value), strict=True
    ):
        assert torch.equal(mine, theirs)
        assert ((mine - original).abs().amax(-1) <= 0.07 * original.abs().amax(-1)).all()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.int8, 0.005), (torch.float8_e4m3fn, 0.07)])
def test_a_large_token_does_not_spoil_a_small_neighbour(dtype, limit):
    """A zero row, a small one and a large one in one block."""
    storage = storage_of(dtype)
    table = BlockTable(BlockPool(2), 4)
    rows = [torch.zeros(1, 3, 8), torch.rand(1, 3, 8) * 0.01 + 0.001, torch.rand(1, 3, 8) * 10]
    for row in rows:
        table.append(1)
        written(storage, table, row, row)
    for stored in read(storage, table, 3):
        assert torch.equal(stored[0], rows[0][0])
        for i in (1, 2):
            assert ((stored[i] - rows[i][0]).abs().amax(-1) <= limit * rows[i][0].abs().amax(-1)).all()
