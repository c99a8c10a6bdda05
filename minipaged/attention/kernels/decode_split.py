"""Decode with the context cut into parts, so that a few long sequences fill the whole card.

One program per sequence, KV head and part works like `decode_grouped` on its range of keys and stores what it
found: the values averaged over its keys, and the log-sum-exp of its scores, which is how much that average
weighs. A second kernel adds the parts up. Parts beyond the end of a sequence end at once and are
not read again.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.arguments import Tile, attention_arguments, compute_dtype
from minipaged.attention.kernels.attend import attend_keys, normalise
from minipaged.attention.launch import Launch

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV


@triton.jit
def decode_split_kernel(
    average_ptr,  # [num_tokens, num_query_heads, num_parts, head_size] float32, contiguous
    log_sum_exp_ptr,  # [num_tokens, num_query_heads, num_parts] float32, to the base 2, contiguous
    query_ptr,  # from here on as in decode_grouped
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_ptr,
    log2_scale,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    stride_table,
    num_parts,
    part_len,  # a multiple of TILE
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    kv_head, seq, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(query_start_ptr + seq).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    first_key = part * part_len
    if (first_key >= context_len) | (tl.load(query_start_ptr + seq + 1) == token):
        return
    end_key = tl.minimum(first_key + part_len, context_len)
    row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    heads = kv_head * GROUP + row
    used = (row < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_offsets = token * stride_query_token + heads[:, None] * stride_query_head + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=used, other=0.0).to(COMPUTE)

    visible = tl.full([ROWS], context_len, tl.int32)  # the newest token sees every key
    table_ptr = block_tables_ptr + seq * stride_table
    maximum, total, acc = attend_keys(
        query, visible, first_key, end_key, table_ptr, kv_head, key_cache_ptr,
        value_cache_ptr, key_scale_ptr, value_scale_ptr, stride_block, stride_slot, stride_head,
        stride_scale_block, stride_scale_slot, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE, COMPUTE,
    )  # fmt: skip
    stored = (token * tl.num_programs(0) * GROUP + heads) * num_parts + part  # [ROWS]
    average_offsets = stored[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(average_ptr + average_offsets, normalise(acc, total), mask=used)
    tl.store(log_sum_exp_ptr + stored, maximum + tl.log2(total), mask=row < GROUP)


def decode_split_launch(
    average: Tensor,
    log_sum_exp: Tensor,
    query: Tensor,
    layer: "LayerKV",
    batch: AttentionBatch,
    scale: float,
    *,
    part_len: int,
    tile: Tile,
) -> Launch:
    """Attend to parts of `part_len` keys, a multiple of `tile.keys`; fills the first two arguments.

    `average` is [num_tokens, num_query_heads, num_parts, head_size] and `log_sum_exp` the same without the
    last dimension, both float32. Entries of parts without keys are left as they are.
    """
    num_parts = log_sum_exp.shape[2]
    if part_len % tile.keys or num_parts * part_len < batch.max_context_len:
        raise ValueError(
            f"{num_parts} parts of {part_len} keys do not fit a context of {batch.max_context_len} keys "
            f"in tiles of {tile.keys}"
        )
    args = attention_arguments(query, layer, batch, scale)
    args |= {"average_ptr": average, "log_sum_exp_ptr": log_sum_exp}
    args |= {"num_parts": num_parts, "part_len": part_len}
    args |= {"ROWS": tile.rows, "TILE": tile.keys, "COMPUTE": compute_dtype(query.dtype)}
    grid = (layer.key.shape[2], batch.num_seqs, num_parts)
    return Launch(decode_split_kernel, grid, args, num_warps=tile.num_warps, num_stages=tile.num_stages)
