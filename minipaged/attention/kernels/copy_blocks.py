"""Copy whole blocks, keys and values of all layers in one launch: copy-on-write, and staging for swaps.

A block of one layer is a run of bytes, so the kernel does not care what is in it. The programs of a launch
run in no particular order. Where a block is both read and written (copies 1 -> 2 and 2 -> 3), the sources
go to a buffer of their own first, with the same kernel.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.launch import Launch

CHUNK = 4096  # bytes that one program copies of a key block and of a value block


@triton.jit
def copy_blocks_kernel(
    src_key_ptr,  # uint8 [num_layers, num_src_blocks, block_bytes]
    src_value_ptr,
    dst_key_ptr,  # uint8 [num_layers, num_dst_blocks, block_bytes]
    dst_value_ptr,
    src_blocks_ptr,  # [num_copies] int64
    dst_blocks_ptr,
    stride_src_layer,
    stride_src_block,
    stride_dst_layer,
    stride_dst_block,
    block_bytes,
    CHUNK: tl.constexpr,
):
    chunk, copy, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    byte = chunk * CHUNK + tl.arange(0, CHUNK)
    live = byte < block_bytes
    src = tl.load(src_blocks_ptr + copy) * stride_src_block + layer * stride_src_layer + byte
    dst = tl.load(dst_blocks_ptr + copy) * stride_dst_block + layer * stride_dst_layer + byte
    tl.store(dst_key_ptr + dst, tl.load(src_key_ptr + src, mask=live, other=0), mask=live)
    tl.store(dst_value_ptr + dst, tl.load(src_value_ptr + src, mask=live, other=0), mask=live)


def as_bytes(cache: Tensor) -> Tensor:
    """A cache [num_layers, num_blocks, ...] as uint8 [num_layers, num_blocks, block_bytes], the same memory.

    Raises ValueError where a block is not one run of memory.
    """
    if not cache[0, 0].is_contiguous():
        raise ValueError(f"a block must be contiguous, its strides are {cache.stride()[2:]}")
    return cache.flatten(2).view(torch.uint8)


def copy_blocks_launch(
    src_key: Tensor,
    src_value: Tensor,
    dst_key: Tensor,
    dst_value: Tensor,
    src_blocks: Tensor,
    dst_blocks: Tensor,
) -> Launch:
    """Copy block `src_blocks[i]` of the first two to block `dst_blocks[i]` of the next two, in every layer.

    The tensors are [num_layers, num_blocks, ...] with equal blocks, the ids int64 [num_copies]; no block may
    be both read and written.
    """
    src_key, src_value, dst_key, dst_value = map(as_bytes, (src_key, src_value, dst_key, dst_value))
    num_layers, _, block_bytes = src_key.shape
    return Launch(
        copy_blocks_kernel,
        grid=(triton.cdiv(block_bytes, CHUNK), len(src_blocks), num_layers),
        args={
            "src_key_ptr": src_key,
            "src_value_ptr": src_value,
            "dst_key_ptr": dst_key,
            "dst_value_ptr": dst_value,
            "src_blocks_ptr": src_blocks,
            "dst_blocks_ptr": dst_blocks,
            "stride_src_layer": src_key.stride(0),
            "stride_src_block": src_key.stride(1),
            "stride_dst_layer": dst_key.stride(0),
            "stride_dst_block": dst_key.stride(1),
            "block_bytes": block_bytes,
            "CHUNK": CHUNK,
        },
    )


def copy_launches(tensors: Sequence[tuple[Tensor, Tensor]], src: list[int], dst: list[int]) -> list[Launch]:
    """Launches that copy block src[i] to block dst[i] within each pair (keys, values), reads before writes.

    Raises ValueError for a destination given twice.
    """
    if len(set(dst)) < len(dst):
        raise ValueError(f"a destination is given twice in {dst}")
    overlap = bool(set(src) & set(dst))
    launches = []
    for key, value in tensors:
        src_blocks = torch.tensor(src, dtype=torch.int64, device=key.device)
        dst_blocks = torch.tensor(dst, dtype=torch.int64, device=key.device)
        if not overlap:
            launches.append(copy_blocks_launch(key, value, key, value, src_blocks, dst_blocks))
            continue
        staged = torch.arange(len(src), device=key.device)
        shape = (key.shape[0], len(src), *key.shape[2:])
        key_buffer, value_buffer = key.new_empty(shape), value.new_empty(shape)
        launches.append(copy_blocks_launch(key, value, key_buffer, value_buffer, src_blocks, staged))
        launches.append(copy_blocks_launch(key_buffer, value_buffer, key, value, staged, dst_blocks))
    return launches
