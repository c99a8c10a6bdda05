"""Paged attention as slowly and as plainly as it can be written: the oracle the other backends must equal.

Everything is float64 and there is one loop per thing that is looped over.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minipaged.attention.batch import AttentionBatch, queries_per_kv, require_matching, require_slots
from minipaged.attention.quantize import is_quantized, quantize_rows

if TYPE_CHECKING:
    from minipaged.cache.block_table import BlockCopy
    from minipaged.cache.storage import KVStorage, LayerKV


def gather_context(layer: "LayerKV", blocks: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, read token by token through its block table.

    `blocks` [max_blocks]; returns two float64 tensors [length, num_kv_heads, head_size].
    """
    num_kv_heads, head_size = layer.key.shape[-2:]
    keys = torch.zeros(length, num_kv_heads, head_size, dtype=torch.float64)
    values = torch.zeros_like(keys)
    for position in range(length):
        block, offset = int(blocks[position // block_size]), position % block_size
        keys[position] = layer.key[block, offset].double()
        values[position] = layer.value[block, offset].double()
        if layer.key_scale is not None and layer.value_scale is not None:
            keys[position] *= layer.key_scale[block, offset].double()[:, None]
            values[position] *= layer.value_scale[block, offset].double()[:, None]
    return keys, values


def attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """softmax(scale * query . keys) . values for one query [head_size] and [num_keys, head_size] each."""
    if len(keys) == 0:
        return torch.zeros_like(query)
    return torch.softmax(scale * (keys @ query), dim=0) @ values


class ReferenceBackend:
    """The float64 oracle. Too slow for anything but checking."""

    name = "reference"

    def write_kv(self, layer: "LayerKV", key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        require_slots(layer, slot_mapping)
        block_size = layer.key.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:  # padding
                continue
            block, offset = slot // block_size, slot % block_size
            for cache, scales, row in (
                (layer.key, layer.key_scale, key[token]),
                (layer.value, layer.value_scale, value[token]),
            ):
                if scales is not None and is_quantized(cache.dtype):
                    row, scales[block, offset] = quantize_rows(row, cache.dtype)
                cache[block, offset] = row.to(cache.dtype)

    def paged_attention(
        self, query: Tensor, layer: "LayerKV", batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        require_matching(query, layer, batch)
        output = torch.zeros(query.shape, dtype=torch.float64)
        group = queries_per_kv(query.shape[1], layer.key.shape[2])
        query_start, context_lens = batch.query_start.tolist(), batch.context_lens.tolist()
        for seq, context_len in enumerate(context_lens):
            keys, values = gather_context(layer, batch.block_tables[seq], context_len, batch.block_size)
            first, last = query_start[seq], query_start[seq + 1]
            for row in range(first, last):
                position = context_len - (last - row)  # the last query sits at the last key
                visible = max(position + 1, 0)
                for head in range(query.shape[1]):
                    kv_head = head // group
                    output[row, head] = attend_one(
                        query[row, head].double().cpu(),
                        keys[:visible, kv_head],
                        values[:visible, kv_head],
                        scale,
                    )
        return output.to(query)

    def copy_blocks(self, storage: "KVStorage", copies: Sequence["BlockCopy"]) -> None:
        tensors = (storage.key, storage.value, storage.key_scale, storage.value_scale)
        for tensor in (t for t in tensors if t is not None):
            sources = [tensor[:, src].clone() for src, _ in copies]
            for source, (_, dst) in zip(sources, copies, strict=True):
                tensor[:, dst] = source
