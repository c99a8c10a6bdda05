"""A model on a CPU by compiled kernels: the same formulas, in one pass over memory each.

In torch a norm is eight operations, a rotation seven. Each makes a tensor and costs a microsecond or more
before it computes anything: for a few rows that is as long as the matrix products of a layer. Where the
products are ours too, the norm before them and what follows are a part of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minipaged.attention import cpu_kernel
from minipaged.attention.cpu_arguments import LANES, NAMES, After
from minipaged.attention.cpu_kernel import CpuKernels
from minipaged.model.llama import Attention, DecoderLayer, Linear, LlamaModel, RMSNorm
from minipaged.model.packing import PANEL, give_freed_memory_back, in_panels, pack_weights

if TYPE_CHECKING:
    from minipaged.attention.backend import AttentionBackend
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import LayerKV


class CompiledRMSNorm(nn.Module):
    """`RMSNorm` in one pass. CPU only."""

    def __init__(self, norm: RMSNorm, kernels: CpuKernels) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight.detach(), norm.eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps)  # [T, hidden], contiguous, in and out


class CompiledLinear(nn.Module):
    """`Linear` from a packed copy of its weight, with what comes before and after it. CPU only.

    after: what is done with the sums. GATE takes a weight whose rows are those of all gates, then all ups.
    norm: what the rows go through first.
    """

    def __init__(
        self,
        weight: Tensor,
        kernels: CpuKernels,
        after: After = After.ROUND,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if after is After.GATE:
            self.out_features //= 2
        self.packed = in_panels(weight, gated=after is After.GATE)  # no buffer: torch finds those slowly
        self.norm = None if norm is None else norm.weight.detach()
        self.eps = 0.0 if norm is None else norm.eps
        self.after, self._kernels = after, kernels
        self._out_dtype = torch.float32 if after is After.KEEP_FLOAT32 else weight.dtype

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in_features] -> [T, out_features]. With ADD it is added to `out`, in place."""
        rows, size = x.shape
        if size != self.in_features:
            raise ValueError(f"rows of {size} numbers, the weight takes {self.in_features}")
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=self._out_dtype)
        self._kernels.product(x.contiguous(), self.packed, out, self.after, self.norm, self.eps)
        return out


class CompiledHead(CompiledLinear):
    """The head: logits in float32, or only where they are largest. CPU only."""

    def __init__(self, weight: Tensor, kernels: CpuKernels) -> None:
        super().__init__(weight, kernels, After.KEEP_FLOAT32)

    def largest(self, hidden: Tensor) -> Tensor:
        """int64 [R]: the first place of the largest logit of each row of `hidden`, [R, hidden_size].

        -1 in a row with a logit that is not finite.
        """
        places = torch.empty(hidden.shape[0], dtype=torch.int64)
        self._kernels.product(hidden.contiguous(), self.packed, places, After.LARGEST)
        return places


class CompiledLayer(nn.Module):
    """A `DecoderLayer` in seven calls. The residual stream is changed in place. CPU only."""

    def __init__(self, layer: DecoderLayer, kernels: CpuKernels) -> None:
        super().__init__()
        attention, mlp = layer.attention, layer.mlp
        self.num_query_heads, self.num_kv_heads = attention.num_query_heads, attention.num_kv_heads
        self.head_size, self.scale = attention.head_size, attention.scale
        self.qkv_proj = CompiledLinear(attention.qkv_proj.weight, kernels, norm=layer.attention_norm)
        self.o_proj = CompiledLinear(attention.o_proj.weight, kernels, After.ADD)
        self.gate_up_proj = CompiledLinear(mlp.gate_up_proj.weight, kernels, After.GATE, layer.mlp_norm)
        self.down_proj = CompiledLinear(mlp.down_proj.weight, kernels, After.ADD)
        self.rotate = kernels.rotate

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        num_tokens, num_turned = x.shape[0], self.num_query_heads + self.num_kv_heads
        heads = self.qkv_proj(x).view(num_tokens, -1, self.head_size)
        self.rotate(heads[:, :num_turned], cos, sin)
        key, value = heads[:, self.num_query_heads : num_turned], heads[:, num_turned:]
        # All keys of the step before any of its queries reads: requests may share blocks that it fills.
        backend.write_kv(layer, key, value, batch.slot_mapping)
        query = heads[:, : self.num_query_heads]  # [T, query heads, D]
        out = backend.paged_attention(query, layer, batch, scale=self.scale)
        x = self.o_proj(out.view(num_tokens, -1), x)
        return self.down_proj(self.gate_up_proj(x), x)


def use_compiled_kernels(model: LlamaModel) -> bool:
    """Replace norms and rotations of a model on a CPU, and whole layers where our products are faster.

    The plain weights of what is replaced are freed. Doing it twice changes nothing more. False, and nothing
    changed, without a compiler and for dtypes and sizes that the kernels do not know.
    """
    config = model.config
    fits = config.hidden_size % LANES == 0 and config.head_size % (2 * LANES) == 0
    if model.device.type != "cpu" or model.dtype not in NAMES or not fits:
        return False
    kernels = cpu_kernel.load()
    if kernels is None:
        return False
    if kernels.multiplies_fast(model.dtype):
        replace_products(model, kernels)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, CompiledRMSNorm(child, kernels))
        if isinstance(module, Attention):
            module.rotate = kernels.rotate
    return True


def replace_products(model: LlamaModel, kernels: CpuKernels) -> None:
    """The layers and the head, each where its sizes are whole panels. One at a time, to save memory."""
    config = model.config
    if config.hidden_size % PANEL == 0 and config.intermediate_size % LANES == 0:
        for index, layer in enumerate(model.layers):
            if isinstance(layer, DecoderLayer):
                model.layers[index] = CompiledLayer(layer, kernels)
                give_freed_memory_back()
    if config.vocab_size % PANEL == 0 and isinstance(model.lm_head, Linear):
        head = CompiledHead(model.lm_head.weight, kernels)
        model.register_module("lm_head", head)
        model.largest_logits = head.largest
        give_freed_memory_back()


def prepare_for_cpu(model: LlamaModel) -> None:
    """Make a model on a CPU as fast as it can be here; its plain weights are freed. Elsewhere nothing."""
    use_compiled_kernels(model)
    pack_weights(model)
