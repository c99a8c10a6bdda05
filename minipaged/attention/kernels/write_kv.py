"""Write this step's keys and values to their slots in the cache, and quantise them if the cache is quantised.

One program per token holds all its heads in one tile. Keys and values may lie in memory in any way: they are
usually slices of one projection.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.kernels.arguments import cache_arguments, padded
from minipaged.attention.launch import Launch
from minipaged.dtypes import LARGEST

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV


@triton.jit
def write_rows(row, in_row, in_heads, cache_ptr, offsets, scale_ptr, scale_offsets, LARGEST: tl.constexpr):
    """Store one token's heads, row [HEADS, HEAD_PADDED] float32; LARGEST is that of a quantised cache."""
    if scale_ptr is not None:
        scale = tl.max(tl.abs(row), axis=1) / LARGEST  # one scale per head
        scale = tl.where(scale > 0.0, scale, 1.0)
        tl.store(scale_ptr + scale_offsets, scale, mask=in_heads)
        row = tl.clamp(tl.div_rn(row, scale[:, None] + tl.zeros_like(row)), -LARGEST, LARGEST)
        if cache_ptr.dtype.element_ty == tl.int8:
            # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
            row = (row + 12582912.0) - 12582912.0
    tl.store(cache_ptr + offsets, row.to(cache_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def write_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    value_ptr,
    slot_mapping_ptr,  # [num_tokens] int64
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, block_size, num_kv_heads] float32, or None
    value_scale_ptr,
    stride_key_token,
    stride_key_head,
    stride_key_dim,
    stride_value_token,
    stride_value_head,
    stride_value_dim,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)  # int64, and so is all that is computed from it
    if slot < 0:  # padding
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, HEAD_PADDED)
    in_heads = head < NUM_HEADS
    in_row = in_heads[:, None] & (dims < HEAD_SIZE)[None, :]
    target = block * stride_block + offset * stride_slot + head[:, None] * stride_head + dims[None, :]
    scales = block * stride_scale_block + offset * stride_scale_slot + head

    key_row = token * stride_key_token + head[:, None] * stride_key_head + dims[None, :] * stride_key_dim
    key = tl.load(key_ptr + key_row, mask=in_row, other=0.0).to(tl.float32)
    write_rows(key, in_row, in_heads, key_cache_ptr, target, key_scale_ptr, scales, LARGEST)
    value_row = (
        token * stride_value_token + head[:, None] * stride_value_head + dims[None, :] * stride_value_dim
    )
    value = tl.load(value_ptr + value_row, mask=in_row, other=0.0).to(tl.float32)
    write_rows(value, in_row, in_heads, value_cache_ptr, target, value_scale_ptr, scales, LARGEST)


def write_kv_launch(layer: "LayerKV", key: Tensor, value: Tensor, slot_mapping: Tensor) -> Launch:
    """Store `key` and `value` [num_tokens, num_kv_heads, head_size] in the slots of `slot_mapping`.

    Raises ValueError for rows that are not those of the cache, and for a mapping that is not dense int64.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    expected = (len(slot_mapping), *layer.key.shape[2:])
    if key.shape != expected or value.shape != expected:
        raise ValueError(f"rows are {list(key.shape)} and {list(value.shape)}, must be {list(expected)}")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}, must be contiguous int64")
    return Launch(
        write_kv_kernel,
        grid=(num_tokens,),
        args=cache_arguments(layer)
        | {
            "key_ptr": key,
            "value_ptr": value,
            "slot_mapping_ptr": slot_mapping,
            "stride_key_token": key.stride(0),
            "stride_key_head": key.stride(1),
            "stride_key_dim": key.stride(2),
            "stride_value_token": value.stride(0),
            "stride_value_head": value.stride(1),
            "stride_value_dim": value.stride(2),
            "NUM_HEADS": num_kv_heads,
            "HEADS_PADDED": triton.next_power_of_2(num_kv_heads),
            "HEAD_PADDED": padded(head_size),
            "LARGEST": LARGEST.get(layer.key.dtype),
        },
    )
