"""The modules of a model that run compiled kernels on a CPU: the same formulas, in one pass over memory each.

In torch a norm is eight operations, a rotation seven. Each makes a tensor and costs a microsecond or more
before it computes anything: for a few rows that is as long as the matrix products of a layer. Where the
products are ours too, the norm before them and what follows are a part of them, and where nothing has to be
asked in between, all layers are one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from minipaged.attention.backend import require_matching
from minipaged.attention.torch_backend import TorchBackend, decoding_sequences
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import After, DecodeStep, Layer, Layers, PrefillStep, Product
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.packing import in_panels
from minipaged.model.llama import DecoderLayer, DecoderLayers, RMSNorm

if TYPE_CHECKING:
    from minipaged.attention.backend import AttentionBackend
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import KVStorage, LayerKV

METHODS = {"write_kv", "paged_attention"}  # what a layer asks of a backend


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
        self._kernels.product(x.contiguous(), self.arguments(), out)
        return out

    def arguments(self) -> Product:
        """What the kernel is told of the weight; this module keeps alive what it points to."""
        return Product.of(self.packed, self.after, self.norm, self.eps)


class CompiledHead(CompiledLinear):
    """The head: logits in float32, or only where they are largest. CPU only."""

    def __init__(self, weight: Tensor, kernels: CpuKernels) -> None:
        super().__init__(weight, kernels, After.KEEP_FLOAT32)

    def largest(self, hidden: Tensor) -> Tensor:
        """int64 [R]: the first place of the largest logit of each row of `hidden`, [R, hidden_size].

        -1 in a row with a logit that is not finite.
        """
        places = torch.empty(hidden.shape[0], dtype=torch.int64)
        self._kernels.product(hidden.contiguous(), Product.of(self.packed, After.LARGEST), places)
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

    def arguments(self) -> Layer:
        """Its weights, as the kernel that runs all layers is told of them."""
        products = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return Layer(*[product.arguments() for product in products])

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


class CompiledLayers(DecoderLayers):
    """All layers of a model. The residual stream is changed in place. CPU only.

    They are one call where attention is `TorchBackend`'s own and the cache of the model's dtype; else one
    layer is called after the other.
    """

    def __init__(self, layers: list[CompiledLayer], kernels: CpuKernels) -> None:
        super().__init__(layers)
        self._kernels = kernels
        self._weights = (Layer * len(layers))(*[layer.arguments() for layer in layers])

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        storage: KVStorage,
        backend: AttentionBackend,
    ) -> Tensor:
        first = cast("CompiledLayer", self[0])
        layer, slots = storage.layer(0), batch.slot_mapping
        by_kind = (first.num_query_heads, first.num_kv_heads, first.num_kv_heads)
        heads = x.new_empty(x.shape[0], sum(by_kind), first.head_size)
        query, key, value = heads.split(by_kind, dim=1)
        if not (
            is_untouched(backend)
            and storage.spec.num_layers == len(self)
            and cpu_kernels.can_prefill(query, layer, self._kernels)
            and cpu_kernels.can_write(layer, key, value, slots)
        ):
            return super().forward(x, cos, sin, batch, storage, backend)
        require_matching(query, layer, batch)
        decodes, prompts = DecodeStep.make(batch, decoding_sequences(batch)), PrefillStep.make(batch)
        fill = torch.empty_like if decodes.arguments.num_seqs == len(x) else torch.zeros_like
        attended = fill(query, memory_format=torch.contiguous_format)  # rows that see no key stay zero
        gated = x.new_empty(x.shape[0], first.gate_up_proj.out_features)
        for step in (decodes, prompts):
            step.point_at(attended, query, layer, first.scale)
        rows = (x, heads, attended, gated, cos, sin, slots, storage.key, storage.value)
        self._kernels.run_layers(
            Layers(
                *[tensor.data_ptr() for tensor in rows],
                len(x), storage.num_slots, storage.key.stride(0), len(self),
                self._weights, decodes.arguments, prompts.arguments,
            ),
            x.dtype,
        )  # fmt: skip
        return x


def is_untouched(backend: AttentionBackend) -> bool:
    """Whether it may be passed over: nobody has put a clock or something else in the place of its methods."""
    return type(backend) is TorchBackend and backend.compiled and not METHODS & vars(backend).keys()
