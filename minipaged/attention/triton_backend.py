"""Paged attention by the Triton kernels of this package, on a GPU or in Triton's interpreter.

This file picks the kernel and launches it; what a kernel does is said in its own file.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from minipaged.attention.batch import AttentionBatch, queries_per_kv, require_matching, require_slots
from minipaged.attention.kernels.arguments import decode_tile, keys_per_part
from minipaged.attention.kernels.copy_blocks import copy_launches
from minipaged.attention.kernels.decode_combine import decode_combine_launch
from minipaged.attention.kernels.decode_grouped import decode_grouped_launch
from minipaged.attention.kernels.decode_split import decode_split_launch
from minipaged.attention.kernels.prefill import prefill_launch
from minipaged.attention.kernels.write_kv import write_kv_launch
from minipaged.attention.launch import Launch
from minipaged.attention.targets import Target
from minipaged.dtypes import COMPUTE_DTYPES

if TYPE_CHECKING:
    from minipaged.cache.block_table import BlockCopy
    from minipaged.cache.storage import KVStorage, LayerKV


def require_supported(query_dtype: torch.dtype, kv_dtype: torch.dtype, target: Target) -> None:
    """Raise ValueError, naming dtype and card, for what the kernels cannot compute there."""
    if query_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"attention computes in float32, float16 or bfloat16, not in {query_dtype}")
    if torch.bfloat16 in (query_dtype, kv_dtype) and not target.has_bfloat16:
        raise ValueError(f"bfloat16 needs sm_80 or newer, {target.card} is {target.name}: use float16")
    if kv_dtype == torch.float8_e4m3fn and not target.has_float8:
        raise ValueError(f"float8_e4m3fn needs sm_89 or newer, {target.card} is {target.name}: use int8")


def decode_launches(
    output: Tensor, query: Tensor, layer: "LayerKV", batch: AttentionBatch, scale: float, target: Target
) -> list[Launch]:
    """Decode in one launch, or in parts and a second launch that adds them up where the context is long."""
    num_query_heads, num_kv_heads = query.shape[1], layer.key.shape[2]
    tile = decode_tile(
        target, queries_per_kv(num_query_heads, num_kv_heads), query.shape[2], query.element_size()
    )
    part_len = keys_per_part(batch.num_seqs, num_kv_heads, batch.max_context_len, target.num_multiprocessors)
    num_parts = triton.cdiv(batch.max_context_len, part_len)
    if num_parts <= 1:
        return [decode_grouped_launch(output, query, layer, batch, scale, target=target, tile=tile)]
    shape = (*query.shape[:2], num_parts)
    log_sum_exp = torch.empty(shape, dtype=torch.float32, device=query.device)
    average = torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device)
    return [
        decode_split_launch(average, log_sum_exp, query, layer, batch, scale, part_len=part_len, tile=tile),
        decode_combine_launch(output, average, log_sum_exp, batch, part_len=part_len),
    ]


class TritonBackend:
    """Paged attention by Triton kernels.

    On a CPU it works in Triton's interpreter, which the environment variable TRITON_INTERPRET=1 turns on
    before Python starts; it is for checking kernels and far slower than torch.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(
                f"attention backend 'triton' needs a GPU, the device is {device}; "
                "TRITON_INTERPRET=1, set before Python starts, runs the kernels in Triton's interpreter"
            )
        self.target = Target.of(device)
        self._checked: tuple[Tensor, int] | None = None  # slots found to be in a cache of so many blocks

    def write_kv(self, layer: "LayerKV", key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        require_supported(key.dtype, layer.key.dtype, self.target)
        num_blocks = layer.key.shape[0]
        if self._checked is None or self._checked[0] is not slot_mapping or self._checked[1] != num_blocks:
            require_slots(layer, slot_mapping)  # once a step: all its layers bring the same tensor
            self._checked = slot_mapping, num_blocks
        write_kv_launch(layer, key, value, slot_mapping).run()

    def paged_attention(
        self, query: Tensor, layer: "LayerKV", batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        require_supported(query.dtype, layer.key.dtype, self.target)
        require_matching(query, layer, batch)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if batch.is_decode:
            for launch in decode_launches(output, query, layer, batch, scale, self.target):
                launch.run()
        else:
            prefill_launch(output, query, layer, batch, scale, target=self.target).run()
        return output

    def copy_blocks(self, storage: "KVStorage", copies: Sequence["BlockCopy"]) -> None:
        if not copies:
            return
        pairs = [(storage.key, storage.value)]
        if storage.key_scale is not None and storage.value_scale is not None:
            pairs.append((storage.key_scale, storage.value_scale))
        src, dst = [copy.src for copy in copies], [copy.dst for copy in copies]
        for launch in copy_launches(pairs, src, dst):
            launch.run()
