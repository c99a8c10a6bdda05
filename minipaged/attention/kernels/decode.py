"""Decode, the readable form: one query token per sequence, one program per sequence and query head.

The program walks over the sequence's keys tile by tile. It needs no matrix unit: with one query row a dot
product is a multiplication and a sum. Query heads that share a KV head each read it again, which is what
`decode_grouped` does away with.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.addresses import look_up_blocks, slot_offsets
from minipaged.attention.kernels.arguments import attention_arguments, output_arguments
from minipaged.attention.launch import Launch

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV


@triton.jit
def decode_kernel(
    output_ptr,  # [num_tokens, num_query_heads, head_size]
    query_ptr,
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, block_size, num_kv_heads] float32, or None
    value_scale_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    query_start_ptr,  # [num_seqs + 1] int32
    log2_scale,  # softmax scale times log2(e): exp(x) is computed as exp2(x * log2(e))
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,  # the power of two that holds HEAD_SIZE
    GROUP: tl.constexpr,  # query heads per KV head
    TILE: tl.constexpr,
):
    head, seq = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) == row:  # no query token in this step
        return
    kv_head = head // GROUP
    dims = tl.arange(0, HEAD_PADDED)
    in_head = dims < HEAD_SIZE
    query_ptr += row * stride_query_token + head * stride_query_head
    query = tl.load(query_ptr + dims, mask=in_head, other=0.0).to(tl.float32) * log2_scale

    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    context_len = tl.load(context_lens_ptr + seq)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    for first_key in range(0, context_len, TILE):
        positions = first_key + tl.arange(0, TILE)
        live = positions < context_len
        blocks = look_up_blocks(table_ptr, positions, context_len, BLOCK_SIZE)
        rows = slot_offsets(blocks, positions, stride_block, stride_slot, BLOCK_SIZE)
        offsets = rows[:, None] + kv_head * stride_head + dims[None, :]  # [TILE, HEAD_PADDED]
        loaded = live[:, None] & in_head[None, :]
        key = tl.load(key_cache_ptr + offsets, mask=loaded, other=0.0).to(tl.float32)
        value = tl.load(value_cache_ptr + offsets, mask=loaded, other=0.0).to(tl.float32)
        if key_scale_ptr is not None:
            rows = slot_offsets(blocks, positions, stride_scale_block, stride_scale_slot, BLOCK_SIZE)
            key *= tl.load(key_scale_ptr + rows + kv_head, mask=live, other=0.0)[:, None]
            value *= tl.load(value_scale_ptr + rows + kv_head, mask=live, other=0.0)[:, None]

        scores = tl.where(live, tl.sum(key * query[None, :], axis=1), float("-inf"))  # [TILE]
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))  # finite: a tile has a live lane
        weights = tl.exp2(scores - new_maximum)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(weights[:, None] * value, axis=0)
        maximum = new_maximum

    result = acc / tl.where(total > 0.0, total, 1.0)  # without any key the result is 0
    output_ptr += row * stride_output_token + head * stride_output_head
    tl.store(output_ptr + dims, result.to(output_ptr.dtype.element_ty), mask=in_head)


def decode_launch(
    output: Tensor, query: Tensor, layer: "LayerKV", batch: AttentionBatch, scale: float, *, tile: int = 32
) -> Launch:
    """Fill `output` with the attention of `query`, both [num_tokens, num_query_heads, head_size]."""
    return Launch(
        decode_kernel,
        grid=(query.shape[1], batch.num_seqs),
        args=output_arguments(output) | attention_arguments(query, layer, batch, scale) | {"TILE": tile},
    )
