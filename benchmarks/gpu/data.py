"""Random keys and values in a paged cache, several sets of them, for one timed shape."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.shapes import AttentionShape
from minipaged.attention.batch import AttentionBatch
from minipaged.attention.quantize import is_quantized, quantize_rows
from minipaged.cache.storage import KVStorage, LayerKV
from minipaged.memory import KVSpec, blocks_for

SETS_TO_CACHE = 4  # the sets together are at least this many times the cache
LARGEST_CACHE = 128 * 2**20  # assumed where the card does not say; more than any has today


@dataclass(frozen=True)
class PagedInputs:
    """Queries [num_tokens, num_query_heads, head_size], a batch, and `num_sets` layers of keys and values."""

    shape: AttentionShape
    query: Tensor
    batch: AttentionBatch
    storage: KVStorage
    scale: float

    @property
    def num_sets(self) -> int:
        return self.storage.spec.num_layers

    def layer(self, index: int) -> LayerKV:
        return self.storage.layer(index)


def cache_bytes(device: torch.device) -> int:
    """Size of the card's last-level cache, which timed inputs must exceed."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or LARGEST_CACHE


def number_of_sets(shape: AttentionShape, device: torch.device) -> int:
    """Input sets that together are `SETS_TO_CACHE` times the cache; at least 2."""
    return max(2, math.ceil(SETS_TO_CACHE * cache_bytes(device) / shape.kv_bytes))


def make_inputs(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    shuffled: bool = True,
    num_sets: int | None = None,
) -> PagedInputs:
    """Random inputs of a shape; the sequences' blocks are shuffled among each other unless told not to."""
    kv_dtype = kv_dtype or dtype
    shape = replace(shape, itemsize=kv_dtype.itemsize)
    counts = [blocks_for(context, shape.block_size) for context in shape.context_lens]
    order = torch.randperm(sum(counts)) if shuffled else torch.arange(sum(counts))
    tables = [part.tolist() for part in order.split(counts)]
    query_lens = [shape.query_len] * len(counts)
    batch = AttentionBatch.build(tables, query_lens, shape.context_lens, shape.block_size, device)
    num_sets = num_sets or number_of_sets(shape, device)
    spec = KVSpec(num_sets, shape.num_kv_heads, shape.head_size, kv_dtype)
    storage = KVStorage(spec, sum(counts), shape.block_size, device=device)
    fill_randomly(storage, dtype)
    query = torch.randn(batch.num_tokens, shape.num_query_heads, shape.head_size, device=device).to(dtype)
    return PagedInputs(shape, query, batch, storage, shape.head_size**-0.5)


def fill_randomly(storage: KVStorage, dtype: torch.dtype) -> None:
    """Normally distributed keys and values in every slot, quantised where the storage is."""
    for layer in range(storage.spec.num_layers):
        parts = [(storage.key, storage.key_scale), (storage.value, storage.value_scale)]
        for tensor, scales in parts:
            rows = torch.randn(tensor[layer].shape, device=storage.device, dtype=dtype)
            if is_quantized(storage.spec.dtype) and scales is not None:
                rows, scales[layer] = quantize_rows(rows, storage.spec.dtype)
            tensor[layer] = rows


def dense(inputs: PagedInputs, index: int) -> tuple[Tensor, Tensor]:
    """Keys and values of equal sequences, unpaged: [num_seqs, context, num_kv_heads, head_size] each."""
    context, block_size = inputs.shape.context_lens[0], inputs.shape.block_size
    blocks = inputs.batch.block_tables[:, : blocks_for(context, block_size)].long()
    layer = inputs.layer(index)
    key = layer.key[blocks].flatten(1, 2)[:, :context].contiguous()
    value = layer.value[blocks].flatten(1, 2)[:, :context].contiguous()
    return key, value
