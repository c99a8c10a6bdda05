"""Prefill: many query tokens per sequence over the paged context; so are chunks, prefix hits, mixed batches.

A tile holds the query heads that share one KV head of as many consecutive tokens as fit: row r is token
r // GROUP and head r % GROUP, so three heads per KV head waste nothing but the last rows. The tiles of all
sequences are numbered through, and a program looks the sequence of its tile up (`sequence_of_tile`).

The last query of a sequence stands at its last key. Query i of q queries over k keys is therefore at position
k - q + i and sees the keys up to there: the causal mask goes by absolute position.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels import arguments
from minipaged.attention.kernels.addresses import sequence_of_tile
from minipaged.attention.kernels.attend import attend_keys, normalise
from minipaged.attention.launch import Launch
from minipaged.attention.targets import Target

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV


@triton.jit
def prefill_kernel(
    output_ptr,  # the arguments are those of decode_grouped
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_ptr,
    log2_scale,
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
    num_seqs,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tiles see most keys: start them first
    seq = sequence_of_tile(query_start_ptr, tile, num_seqs, TOKENS)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    first = (tile - query_start // TOKENS - seq) * TOKENS  # the tile's first token, within the sequence
    if first >= query_len:
        return
    context_len = tl.load(context_lens_ptr + seq)
    row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    token = first + row // GROUP
    in_tile = (row < TOKENS * GROUP) & (token < query_len)
    used = in_tile[:, None] & (dims < HEAD_SIZE)[None, :]
    rows = (query_start + token).to(tl.int64)
    heads = kv_head * GROUP + row % GROUP
    query_offsets = rows * stride_query_token + heads * stride_query_head
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=used, other=0.0).to(COMPUTE)

    seen = context_len - query_len + 1  # keys that the sequence's first query sees; below 1 if it sees none
    seen_by_any = tl.maximum(seen + tl.minimum(first + TOKENS, query_len) - 1, 0)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    maximum, total, acc = attend_keys(
        query, seen + token, 0, seen_by_any, table_ptr, kv_head, key_cache_ptr,
        value_cache_ptr, key_scale_ptr, value_scale_ptr, stride_block, stride_slot, stride_head,
        stride_scale_block, stride_scale_slot, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE, COMPUTE,
    )  # fmt: skip
    output_offsets = rows * stride_output_token + heads * stride_output_head
    result = normalise(acc, total).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + output_offsets[:, None] + dims[None, :], result, mask=used)


def prefill_launch(
    output: Tensor,
    query: Tensor,
    layer: "LayerKV",
    batch: AttentionBatch,
    scale: float,
    *,
    target: Target,
    tile: arguments.Tile | None = None,
) -> Launch:
    """Fill `output` with the attention of `query`, both [num_tokens, num_query_heads, head_size]."""
    args = arguments.output_arguments(output) | arguments.attention_arguments(query, layer, batch, scale)
    tile = tile or arguments.prefill_tile(
        target, args["GROUP"], query.shape[2], query.element_size(), quantized=layer.key_scale is not None
    )
    args |= {
        "num_seqs": batch.num_seqs,
        "ROWS": tile.rows,
        "TILE": tile.keys,
        "COMPUTE": arguments.compute_dtype(query.dtype),
    }
    tiles = batch.num_tokens // (tile.rows // args["GROUP"]) + batch.num_seqs
    grid = (layer.key.shape[2], tiles)
    return Launch(prefill_kernel, grid, args, num_warps=tile.num_warps, num_stages=tile.num_stages)
