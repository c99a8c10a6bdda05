"""Decode with the query heads of one KV head in one tile: every key is read once, not once per query head.

The heads become the rows of a matrix product, so the matrix units do the work. A product takes 16 rows or
more, and a power of two: 3 heads are padded to 16 rows. The idle rows cost nothing, for decode waits for
memory and not for arithmetic. One program per sequence and KV head.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.arguments import (
    Tile,
    attention_arguments,
    compute_dtype,
    decode_tile,
    output_arguments,
)
from minipaged.attention.kernels.attend import attend_keys, normalise
from minipaged.attention.launch import Launch
from minipaged.attention.targets import Target

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV


@triton.jit
def decode_grouped_kernel(
    output_ptr,  # [num_tokens, num_query_heads, head_size]
    query_ptr,
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,
    key_scale_ptr,  # [num_blocks, block_size, num_kv_heads] float32, or None
    value_scale_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    query_start_ptr,  # [num_seqs + 1] int32
    log2_scale,  # softmax scale times log2(e)
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
    HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # the padded GROUP
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    kv_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) == token:  # no query token in this step
        return
    context_len = tl.load(context_lens_ptr + seq)
    row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    heads = kv_head * GROUP + row
    # Rows beyond GROUP would be heads of the next KV head: never load or store them.
    used = (row < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_offsets = token * stride_query_token + heads[:, None] * stride_query_head + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=used, other=0.0).to(COMPUTE)

    visible = tl.full([ROWS], context_len, tl.int32)  # the newest token sees every key
    table_ptr = block_tables_ptr + seq * stride_table
    maximum, total, acc = attend_keys(
        query, visible, 0, context_len, table_ptr, kv_head, key_cache_ptr,
        value_cache_ptr, key_scale_ptr, value_scale_ptr, stride_block, stride_slot, stride_head,
        stride_scale_block, stride_scale_slot, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE, COMPUTE,
    )  # fmt: skip
    output_offsets = token * stride_output_token + heads[:, None] * stride_output_head + dims[None, :]
    result = normalise(acc, total).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + output_offsets, result, mask=used)


def decode_grouped_launch(
    output: Tensor,
    query: Tensor,
    layer: "LayerKV",
    batch: AttentionBatch,
    scale: float,
    *,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """Fill `output` with the attention of `query`, both [num_tokens, num_query_heads, head_size]."""
    args = output_arguments(output) | attention_arguments(query, layer, batch, scale)
    tile = tile or decode_tile(target, args["GROUP"], query.shape[2], query.element_size())
    args |= {"ROWS": tile.rows, "TILE": tile.keys, "COMPUTE": compute_dtype(query.dtype)}
    return Launch(
        decode_grouped_kernel,
        (layer.key.shape[2], batch.num_seqs),
        args,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
