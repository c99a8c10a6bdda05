"""What the launchers share: the arguments every attention kernel takes, and the choice of its tile."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.batch import AttentionBatch, queries_per_kv, require_matching
from minipaged.attention.targets import Target

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV

SMALLEST_DOT = 16  # rows, columns and depth of the smallest product `tl.dot` takes


@dataclass(frozen=True)
class Tile:
    """The work of one program at a time: `rows` query rows by `keys` keys, and how it is pipelined."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two, at least `SMALLEST_DOT`, that holds `size`."""
    return max(SMALLEST_DOT, triton.next_power_of_2(size))


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype products are computed in: that of the query.

    Triton's interpreter computes wrong results in bfloat16, so there it is widened right after loading.
    """
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def _require_dense_heads(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of the {name} has stride {tensor.stride(-1)}, must be 1")


def output_arguments(output: Tensor) -> dict[str, Any]:
    """The arguments for an output [num_tokens, num_query_heads, head_size] that a kernel fills."""
    _require_dense_heads("output", output)
    return {
        "output_ptr": output,
        "stride_output_token": output.stride(0),
        "stride_output_head": output.stride(1),
    }


def cache_arguments(layer: "LayerKV") -> dict[str, Any]:
    """The arguments for one layer's cache. Raises ValueError for layouts the kernels do not read."""
    _require_dense_heads("key cache", layer.key)
    if layer.key.stride() != layer.value.stride():
        raise ValueError(f"key and value strides differ: {layer.key.stride()}, {layer.value.stride()}")
    scale_strides = (0, 0) if layer.key_scale is None else layer.key_scale.stride()[:2]
    return {
        "key_cache_ptr": layer.key,
        "value_cache_ptr": layer.value,
        "key_scale_ptr": layer.key_scale,
        "value_scale_ptr": layer.value_scale,
        "stride_block": layer.key.stride(0),
        "stride_slot": layer.key.stride(1),
        "stride_head": layer.key.stride(2),
        "stride_scale_block": scale_strides[0],
        "stride_scale_slot": scale_strides[1],
        "BLOCK_SIZE": layer.key.shape[1],
        "HEAD_SIZE": layer.key.shape[3],
    }


def attention_arguments(
    query: Tensor, layer: "LayerKV", batch: AttentionBatch, scale: float
) -> dict[str, Any]:
    """The arguments attention kernels have in common; `query` is [num_tokens, num_query_heads, head_size].

    Raises ValueError for heads that do not divide evenly and for layouts the kernels do not read.
    """
    require_matching(query, layer, batch)
    _require_dense_heads("query", query)
    return cache_arguments(layer) | {
        "query_ptr": query,
        "block_tables_ptr": batch.block_tables,
        "context_lens_ptr": batch.context_lens,
        "query_start_ptr": batch.query_start,
        "log2_scale": scale * math.log2(math.e),
        "stride_query_token": query.stride(0),
        "stride_query_head": query.stride(1),
        "stride_table": batch.block_tables.stride(0),
        "HEAD_PADDED": padded(query.shape[2]),
        "GROUP": queries_per_kv(query.shape[1], layer.key.shape[2]),
    }


def has_matrix_units(target: Target, itemsize: int) -> bool:
    """Whether `tl.dot` runs on matrix units: not in float32, nor on sm_75, for which Triton has none.

    Products are unrolled into single multiplications there, which only small tiles have registers for.
    """
    return itemsize <= 2 and (target.backend == "hip" or int(target.arch) >= 80)


def keys_per_tile(target: Target, head_size: int, itemsize: int) -> int:
    """Keys in one tile: at most 64, and so many that a tile of keys has 8192 values, or 2048 without
    matrix units."""
    values = 8192 if has_matrix_units(target, itemsize) else 2048
    return max(SMALLEST_DOT, min(64, values // padded(head_size)))


def decode_tile(target: Target, group: int, head_size: int, itemsize: int) -> Tile:
    """Decode is bound by memory: three stages keep two tiles of keys and values on their way, two keep one,
    which is all that the 64 KiB of an AMD compute unit hold."""
    stages = 2 if target.backend == "hip" else 3
    return Tile(padded(group), keys_per_tile(target, head_size, itemsize), num_warps=4, num_stages=stages)


def prefill_tile(target: Target, group: int, head_size: int, itemsize: int, quantized: bool) -> Tile:
    """Prefill is bound by the matrix units: as many query rows per loaded key as the registers hold.

    The sizes are the largest that were seen to compile without spills on sm_80 to sm_120.
    """
    keys = keys_per_tile(target, head_size, itemsize)
    if not has_matrix_units(target, itemsize):
        return Tile(padded(group), keys, num_warps=4, num_stages=1)
    if quantized or padded(head_size) > 128:
        return Tile(max(64, padded(group)), min(keys, 32), num_warps=8, num_stages=2)
    stages = 2 if target.backend == "hip" else 3
    return Tile(max(128, padded(group)), keys, num_warps=8, num_stages=stages)


SHORTEST_PART, LONGEST_PART = 256, 2048


def keys_per_part(num_seqs: int, num_kv_heads: int, max_context_len: int, num_multiprocessors: int) -> int:
    """Keys that one program of `decode_split` reads: so many that there are four programs per multiprocessor.

    A multiple of `SHORTEST_PART`, below which starting a program costs more than it saves, so that parts are
    made of whole tiles. At most `LONGEST_PART`, so that one long sequence among many short ones does not
    keep a single multiprocessor busy when all others have finished.
    """
    programs_per_part = max(1, num_seqs * num_kv_heads)
    parts = -(-4 * num_multiprocessors // programs_per_part)
    keys = -(-max_context_len // parts)
    return min(LONGEST_PART, SHORTEST_PART * max(1, -(-keys // SHORTEST_PART)))
