"""Paged attention of a processor: the C++ kernels of `csrc/`, and plain torch for what they do not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minipaged.attention.batch import require_matching, require_slots, require_tables
from minipaged.attention.torch_backend import TorchBackend, attend_prompts
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.kernels import DecodeStep, PrefillStep

if TYPE_CHECKING:
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import LayerKV


@dataclass(frozen=True)
class KernelPlan:
    """What the kernels are told of a batch, the same in every layer of a cache with `num_blocks`."""

    batch: AttentionBatch
    num_blocks: int
    decodes: DecodeStep
    prompts: PrefillStep


class CpuBackend(TorchBackend):
    """`TorchBackend` with compiled kernels: single query tokens by decode.cpp, prompts by prefill.cpp.

    Plain torch serves whatever a kernel does not read (another dtype, a quantised cache, an odd head size),
    and everything where no kernels could be built.

    fuses_layers: a compiled model may run all its layers in one call of C++, which writes keys and attends
        itself and calls neither method of this class. With False each layer calls them, as on a GPU: slower,
        but a clock around a method then has something to time.
    """

    name = "cpu"

    def __init__(self, *, fuses_layers: bool = True) -> None:
        super().__init__()
        self.fuses_layers = fuses_layers
        self._kernels = cpu_kernels.load()
        self._kernel_plan: KernelPlan | None = None

    def write_kv(self, layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        if self._kernels is not None and cpu_kernels.can_write(layer, key, value, slot_mapping):
            require_slots(layer, slot_mapping)  # the kernel would say so after it stored the others
            self._kernels.write_kv(layer, key, value, slot_mapping)
        else:
            super().write_kv(layer, key, value, slot_mapping)

    def paged_attention(
        self, query: Tensor, layer: LayerKV, batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        if self._kernels is None or not cpu_kernels.can_decode(query, layer):
            return super().paged_attention(query, layer, batch, scale=scale)
        require_matching(query, layer, batch)
        plan = self._kernel_plan_of(batch, num_blocks=layer.key.shape[0])
        decodes, prompts = plan.decodes, plan.prompts
        # Rows that see no key stay zero.
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        if decodes.arguments.num_seqs:
            self._kernels.decode(output, query, layer, decodes, scale)
        if prompts.arguments.num_tasks and cpu_kernels.can_prefill(query, layer, self._kernels):
            self._kernels.prefill(output, query, layer, prompts, scale)
        elif prompts.arguments.num_tasks:
            attend_prompts(output, query, layer, self.plan_of(batch).prompts, scale)
        return output

    def _kernel_plan_of(self, batch: AttentionBatch, num_blocks: int) -> KernelPlan:
        """Made in the first layer of a step, when the tables are looked at, and kept for the others."""
        plan = self._kernel_plan
        if plan is None or plan.batch is not batch or plan.num_blocks != num_blocks:
            require_tables(batch, num_blocks)
            plan = KernelPlan(batch, num_blocks, DecodeStep.make(batch), PrefillStep.make(batch))
            self._kernel_plan = plan
        return plan
