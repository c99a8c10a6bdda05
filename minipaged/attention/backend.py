"""What every attention backend can do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from minipaged.attention.batch import AttentionBatch

if TYPE_CHECKING:
    from minipaged.cache.block_table import BlockCopy
    from minipaged.cache.storage import KVStorage, LayerKV


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
