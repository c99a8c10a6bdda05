"""What starts the kernels of the exercises: the grid, and the arguments that follow from the tensors."""

from typing import Any

import torch
import triton
from torch import Tensor

from coursekit.given.fence import counted_reads, run_fenced


def launch_write_kv(
    kernel: Any,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    first_block: int = 0,
) -> None:
    """Run `kernel`, one program a token. With `first_block` the caches hold only blocks from that one on."""
    num_tokens, num_heads, head_size = key.shape
    stride_token, stride_head, _ = key.stride()  # those of `value` are the same
    stride_block, stride_slot, stride_cache_head, _ = key_cache.stride()
    args = {
        "key_ptr": key,
        "value_ptr": value,
        "slots_ptr": slots,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "stride_token": stride_token,
        "stride_head": stride_head,
        "stride_block": stride_block,
        "stride_slot": stride_slot,
        "stride_cache_head": stride_cache_head,
        "BLOCK_SIZE": key_cache.shape[1],
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "HEADS_PADDED": triton.next_power_of_2(num_heads),
        "HEAD_PADDED": triton.next_power_of_2(head_size),
    }
    skipped = first_block * key_cache.stride(0)
    run_fenced(kernel, (num_tokens,), args, {"key_cache_ptr": skipped, "value_cache_ptr": skipped})


def write_projection(
    kernel: Any, projection: Tensor, slots: Tensor, pool: Tensor, *, layer: int = 0, first_block: int = 0
) -> None:
    """The same as in an engine, where neither rows nor blocks lie side by side.

    `projection` [num_tokens, heads, head_size] holds a token's query heads, then its keys, then its values;
    `pool` [num_blocks, layers, 2, block_size, num_kv_heads, head_size] the keys and values of all layers.
    """
    key_cache, value_cache = pool[:, layer].unbind(1)
    num_heads = key_cache.shape[2]
    key, value = projection[:, -2 * num_heads : -num_heads], projection[:, -num_heads:]
    launch_write_kv(kernel, key, value, slots, key_cache, value_cache, first_block=first_block)


def write_padded(
    kernel: Any,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    row_step: int,
) -> None:
    """The same with room between two heads: in the rows they are `row_step` numbers apart.

    `key_pool` [num_blocks, block_size, num_kv_heads, at least head_size]: what is more is nobody's.
    """
    size = key.shape[2]
    more = 0, row_step - size
    key, value = (torch.nn.functional.pad(row, more)[..., :size] for row in (key, value))
    launch_write_kv(kernel, key, value, slots, key_pool[..., :size], value_pool[..., :size])


def launch_decode(
    kernel: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    tile: int = 8,
    first_block: int = 0,
) -> Tensor:
    """Run `kernel`, one program for each query head and sequence; returns what it wrote.

    `query` [num_seqs, num_query_heads, head_size]. With `first_block` the caches hold only blocks from that
    one on.
    """
    num_seqs, num_query_heads, head_size = query.shape
    output = torch.full_like(query, torch.nan)
    stride_block, stride_slot, stride_head, _ = key_cache.stride()
    args = {
        "output_ptr": output,
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "block_tables_ptr": block_tables,
        "context_lens_ptr": context_lens,
        "scale": scale,
        "stride_block": stride_block,
        "stride_slot": stride_slot,
        "stride_head": stride_head,
        "stride_table": block_tables.stride(0),
        "BLOCK_SIZE": key_cache.shape[1],
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": triton.next_power_of_2(head_size),
        "GROUP": num_query_heads // key_cache.shape[2],
        "TILE": tile,
    }
    skipped = first_block * stride_block
    run_fenced(
        kernel, (num_query_heads, num_seqs), args, {"key_cache_ptr": skipped, "value_cache_ptr": skipped}
    )
    return output


def reads_of_decode(
    kernel: Any, query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any
) -> list[int]:
    """How many numbers of the key cache and of the value cache `launch_decode` with these arguments reads."""
    with counted_reads(key_cache, value_cache) as counts:
        launch_decode(kernel, query, key_cache, value_cache, *rest)
    return counts


def decode_from_pool(
    kernel: Any, query: Tensor, pool: Tensor, *tables_and_scale: Any, layer: int = 0, **options: Any
) -> Tensor:
    """`launch_decode` on a layer of a `pool` [num_blocks, layers, 2, block_size, num_kv_heads, head_size]."""
    key_cache, value_cache = pool[:, layer].unbind(1)
    return launch_decode(kernel, query, key_cache, value_cache, *tables_and_scale, **options)
