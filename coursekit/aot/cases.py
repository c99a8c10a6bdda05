"""Every kernel at its default configuration, as a launch that needs no GPU.

The launches are those of the Triton backend, built from tensors on torch's `meta` device, which have shapes
and strides but no memory. The shapes are a Llama 3 8B layer's (32 query heads on 8 KV heads of size 128) and,
where it says d64 g3, those of SmolLM2 135M, in blocks of 16.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.copy_blocks import copy_blocks_launch
from minipaged.attention.kernels.decode import decode_launch
from minipaged.attention.kernels.decode_grouped import decode_grouped_launch
from minipaged.attention.kernels.prefill import prefill_launch
from minipaged.attention.kernels.write_kv import write_kv_launch
from minipaged.attention.launch import Launch
from minipaged.attention.targets import Target
from minipaged.attention.triton_backend import decode_launches
from minipaged.cache.storage import KVStorage
from minipaged.dtypes import OF_TORCH
from minipaged.memory import KVSpec

BLOCK_SIZE = 16
CACHE = ("key_cache_ptr", "value_cache_ptr")


@dataclass(frozen=True)
class KernelCase:
    """One kernel with the arguments of one typical launch, on torch's `meta` device.

    `streamed` names the arguments whose loads must be wide: what the kernel reads most of. `tensor_cores`
    says whether its products belong on them.
    """

    name: str
    variant: str
    launch: Launch
    streamed: tuple[str, ...]
    tensor_cores: bool


@dataclass(frozen=True)
class Shape:
    """A layer of attention: data types, heads, and the query and key lengths of a typical step."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128

    @property
    def label(self) -> str:
        kinds = dict.fromkeys((self.dtype, self.kv_dtype))  # one where they are the same
        return f"{'+'.join(OF_TORCH[kind].short for kind in kinds)} d{self.head_size} g{self.group}"

    def storage(self) -> KVStorage:
        spec = KVSpec(32, self.num_kv_heads, self.head_size, self.kv_dtype)
        return KVStorage(spec, 8192, BLOCK_SIZE, device="meta")

    def query(self, num_tokens: int) -> Tensor:
        heads = self.num_kv_heads * self.group
        return torch.empty(num_tokens, heads, self.head_size, dtype=self.dtype, device="meta")


def meta_batch(num_seqs: int, query_len: int, context_len: int) -> AttentionBatch:
    """A batch of equal sequences without memory behind it."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens = num_seqs * query_len
    return AttentionBatch(
        query_start=ints(num_seqs + 1),
        context_lens=ints(num_seqs),
        block_tables=ints(num_seqs, context_len // BLOCK_SIZE),
        slot_mapping=ints(tokens, dtype=torch.int64),
        positions=ints(tokens, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        max_query_len=query_len,
        max_context_len=context_len,
        num_blocks_named=0,  # no numbers are there to be looked at
    )


def kernel_cases(target: Target) -> list[KernelCase]:
    """Every kernel, with the data types and tile sizes the backend would choose on `target`.

    sm_75 has no bfloat16 and is given float16; fp8 is left out where the target lacks it.
    """
    dtype = torch.bfloat16 if target.has_bfloat16 else torch.float16
    plain, small = Shape(dtype, dtype), Shape(dtype, dtype, num_kv_heads=3, group=3, head_size=64)
    quantised = [Shape(dtype, torch.int8)] + (
        [Shape(dtype, torch.float8_e4m3fn)] if target.has_float8 else []
    )
    cases = [_decode(plain), _grouped(plain, target), _grouped(small, target)]
    cases += [_grouped(shape, target) for shape in quantised]
    cases += _split(plain, target)
    cases += [_prefill(shape, target) for shape in (plain, small, *quantised)]
    cases += [_write(shape) for shape in (plain, *quantised)]
    return [*cases, _copy(plain)]


def _decode(shape: Shape) -> KernelCase:
    query, batch = shape.query(32), meta_batch(32, 1, 4096)
    launch = decode_launch(query, query, shape.storage().layer(0), batch, 0.1)
    return KernelCase("decode", shape.label, launch, CACHE, False)


def _grouped(shape: Shape, target: Target) -> KernelCase:
    query, batch = shape.query(256), meta_batch(256, 1, 4096)
    launch = decode_grouped_launch(query, query, shape.storage().layer(0), batch, 0.1, target=target)
    return KernelCase("decode_grouped", shape.label, launch, CACHE, True)


def _split(shape: Shape, target: Target) -> Iterator[KernelCase]:
    query, batch = shape.query(1), meta_batch(1, 1, 32768)
    split, combine = decode_launches(query, query, shape.storage().layer(0), batch, 0.1, target)
    yield KernelCase("decode_split", shape.label, split, CACHE, True)
    yield KernelCase("decode_combine", shape.label, combine, ("average_ptr",), False)


def _prefill(shape: Shape, target: Target) -> KernelCase:
    query, batch = shape.query(2048), meta_batch(2, 1024, 4096)
    launch = prefill_launch(query, query, shape.storage().layer(0), batch, 0.1, target=target)
    return KernelCase("prefill", shape.label, launch, CACHE, True)


def _write(shape: Shape) -> KernelCase:
    """Keys and values are slices of one projection, as a model makes them."""
    rows, kv_size = 256, shape.num_kv_heads * shape.head_size
    projection = torch.empty(rows, 3 * kv_size, dtype=shape.dtype, device="meta")
    key, value = (part.unflatten(1, (-1, shape.head_size)) for part in projection.split(kv_size, 1)[1:])
    slots = torch.empty(rows, dtype=torch.int64, device="meta")
    launch = write_kv_launch(shape.storage().layer(0), key, value, slots)
    return KernelCase("write_kv", shape.label, launch, ("key_ptr", "value_ptr"), False)


def _copy(shape: Shape) -> KernelCase:
    storage, blocks = shape.storage(), torch.empty(4, dtype=torch.int64, device="meta")
    launch = copy_blocks_launch(storage.key, storage.value, storage.key, storage.value, blocks, blocks)
    return KernelCase("copy_blocks", shape.label, launch, ("src_key_ptr", "src_value_ptr"), False)
