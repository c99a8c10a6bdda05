"""What every attention backend can do, and how one is chosen."""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minipaged.attention.batch import AttentionBatch

if TYPE_CHECKING:
    from minipaged.cache.block_table import BlockCopy
    from minipaged.cache.storage import KVStorage, LayerKV

BACKENDS = ("auto", "torch", "triton", "reference")


class AttentionBackend(Protocol):
    """Writes keys and values into the paged cache and attends to them."""

    name: str

    def write_kv(self, layer: "LayerKV", key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store `key` and `value` [num_tokens, num_kv_heads, head_size] in the slots `slot_mapping` names.

        A negative slot is padding: its row is not stored. ValueError for rows of another shape.
        They are converted to the cache's dtype; a quantised cache gets one scale per token and head.
        """

    def paged_attention(
        self, query: Tensor, layer: "LayerKV", batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        """Causal attention of `query` [num_tokens, num_query_heads, head_size] to the cached context.

        Returns a tensor of the same shape and dtype. Query head h reads key/value head
        h // (num_query_heads / num_kv_heads). A row that sees no key is 0.
        """

    def copy_blocks(self, storage: "KVStorage", copies: Sequence["BlockCopy"]) -> None:
        """Copy whole blocks within `storage`, in every layer; all sources are read before any is written."""


def queries_per_kv(num_query_heads: int, num_kv_heads: int) -> int:
    """Query heads that share one key/value head. Raises ValueError when the heads do not divide evenly."""
    if num_kv_heads < 1 or num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    return num_query_heads // num_kv_heads


def require_matching(query: Tensor, layer: "LayerKV", batch: AttentionBatch) -> None:
    """Raise ValueError, with both numbers, unless query, cache and batch fit together."""
    num_blocks, block_size, num_kv_heads, head_size = layer.key.shape
    if query.shape[2] != head_size:
        raise ValueError(f"the query's head size is {query.shape[2]}, the cache's {head_size}")
    if batch.block_size != block_size:
        raise ValueError(f"the batch's block size is {batch.block_size}, the cache's {block_size}")
    if query.shape[0] != batch.num_tokens:
        raise ValueError(f"the query has {query.shape[0]} rows, the batch {batch.num_tokens} tokens")
    require_blocks(batch, num_blocks)
    queries_per_kv(query.shape[1], num_kv_heads)


def require_blocks(batch: AttentionBatch, num_blocks: int) -> None:
    """Raise ValueError when the batch names a block that a cache of `num_blocks` does not have."""
    if batch.num_blocks_named is not None and batch.num_blocks_named > num_blocks:
        raise ValueError(
            f"the batch names block {batch.num_blocks_named - 1}, the cache has blocks 0 to {num_blocks - 1}"
        )


def require_slots(layer: "LayerKV", slot_mapping: Tensor) -> None:
    """Raise IndexError for a slot beyond the cache, before anything is written. A device is waited for."""
    num_slots = layer.key.shape[0] * layer.key.shape[1]
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        raise IndexError(
            f"slot {int(slot_mapping.max())} is to be written, the cache has 0 to {num_slots - 1}"
        )


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> AttentionBackend:
    """The backend called `name` for tensors on `device`.

    "auto" is Triton on a GPU and plain torch elsewhere; a GPU without Triton gets torch and one warning.
    Raises ValueError for an unknown name and for a device the backend cannot serve, ImportError when
    "triton" is asked for by name and is not installed.
    """
    device = torch.device(device)
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is none of {', '.join(BACKENDS)}")
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
        if name == "triton" and importlib.util.find_spec("triton") is None:
            warnings.warn("triton is not installed: attention runs in plain torch, slower", stacklevel=2)
            name = "torch"
    if name == "reference":
        from minipaged.attention.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "torch":
        from minipaged.attention.torch_backend import TorchBackend

        return TorchBackend()
    if importlib.util.find_spec("triton") is None:
        raise ImportError("attention backend 'triton' needs the triton package: pip install triton")
    from minipaged.attention.triton_backend import TritonBackend

    return TritonBackend(device)
