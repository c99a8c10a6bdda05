"""The K and V tensors that the block ids of a `BlockPool` stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.cache.block_table import BlockCopy
from minipaged.memory import KVSpec


@dataclass(frozen=True)
class LayerKV:
    """One layer's view of the storage.

    key, value: [num_blocks, block_size, num_kv_heads, head_size] in the KV dtype.
    key_scale, value_scale: [num_blocks, block_size, num_kv_heads] float32 for int8 and fp8, else None.
    A stored vector times its scale is the vector that was written.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None

    def write(
        self,
        slots: Tensor,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        """Store one row per token. A negative slot is padding: its row is not stored.

        slots: [num_tokens] int64. key, value: [num_tokens, num_kv_heads, head_size] in the KV dtype.
        key_scale, value_scale: [num_tokens, num_kv_heads] float32, where the dtype has scales.
        """
        stored = (self.key, self.value, self.key_scale, self.value_scale)
        rows = (key, value, key_scale, value_scale)
        if [t if t is None else t.dtype for t in stored] != [t if t is None else t.dtype for t in rows]:
            raise ValueError(f"rows must be {self.key.dtype}, with float32 scales for int8 and fp8 only")
        if key.shape != value.shape or key.shape != (len(slots), *self.key.shape[2:]):
            expected = [len(slots), *self.key.shape[2:]]
            raise ValueError(f"rows are {list(key.shape)} and {list(value.shape)}, must be {expected}")
        kept = slots >= 0 if len(slots) and int(slots.min()) < 0 else None
        for old, new in zip(stored, rows, strict=True):
            if old is None or new is None:
                continue
            if kept is not None:
                new = new[kept]
            _raw(old).flatten(0, 1)[slots if kept is None else slots[kept]] = _raw(new)


class KVStorage:
    """Keys and values of all layers, one allocation for each kind.

    key, value: [num_layers, num_blocks, block_size, num_kv_heads, head_size] in `spec.dtype`.
    key_scale, value_scale: [num_layers, num_blocks, block_size, num_kv_heads] float32, or None.
    Fresh memory is not cleared: a slot has no meaning until it is written.
    """

    def __init__(
        self, spec: KVSpec, num_blocks: int, block_size: int, *, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks}, block_size {block_size}: both must be at least 1")
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        rows = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.key = empty((*rows, spec.head_size), spec.dtype)
        self.value = empty((*rows, spec.head_size), spec.dtype)
        self.key_scale = empty(rows, torch.float32) if spec.is_quantized else None
        self.value_scale = empty(rows, torch.float32) if spec.is_quantized else None
        no_scale = [None] * spec.num_layers
        key_scales, value_scales = (no_scale if t is None else t for t in (self.key_scale, self.value_scale))
        self._layers = list(map(LayerKV, self.key, self.value, key_scales, value_scales))

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor whose dimension 1 is the block: whatever moves a block moves its part of each."""
        return [t for t in (self.key, self.value, self.key_scale, self.value_scale) if t is not None]

    @property
    def device(self) -> torch.device:
        return self.key.device

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Do all copies at once: every source is read before any destination is written."""
        self.copy_to(self, copies)

    def copy_to(self, other: KVStorage, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of this storage to blocks of `other`, on any device, scales included.

        Raises ValueError for differing shapes, an id out of range, or a destination given twice.
        """
        if not copies:
            return
        self._require_valid(other, copies)
        src = torch.tensor([copy.src for copy in copies], device=self.device)
        dst = torch.tensor([copy.dst for copy in copies], device=other.device)
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            blocks = _raw(mine)[:, src]  # [num_layers, num_copies, block_size, ...], a copy of its own
            _raw(theirs)[:, dst] = _moved(blocks, other.device)

    def require_same_blocks(self, other: KVStorage) -> None:
        """Raise ValueError unless a block of one is a block of the other, byte for byte."""
        if (self.spec, self.block_size) != (other.spec, other.block_size):
            raise ValueError(
                f"cannot copy blocks of {self.spec}, block_size {self.block_size} "
                f"to {other.spec}, block_size {other.block_size}"
            )

    def _require_valid(self, other: KVStorage, copies: Sequence[BlockCopy]) -> None:
        self.require_same_blocks(other)
        for copy in copies:
            if not (0 <= copy.src < self.num_blocks and 0 <= copy.dst < other.num_blocks):
                raise ValueError(f"{copy} is out of range: {self.num_blocks} to {other.num_blocks} blocks")
        if len({copy.dst for copy in copies}) != len(copies):
            raise ValueError(f"a destination is given twice in {list(copies)}")


def _moved(blocks: Tensor, device: torch.device) -> Tensor:
    """`blocks` on `device`; between a GPU and the host by way of pinned memory that the GPU copies itself."""
    if blocks.is_cuda and device.type == "cpu":
        return torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True).copy_(blocks)
    if device.type == "cuda" and not blocks.is_cuda:
        return blocks.pin_memory().to(device, non_blocking=True)
    return blocks.to(device)


def _raw(tensor: Tensor) -> Tensor:
    """The same memory as plain bytes where the dtype is fp8, for which torch has few operations."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
