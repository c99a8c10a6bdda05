"""The modules of a model that run compiled kernels on a CPU: the same formulas, in one pass over memory each.

In torch a norm is eight operations, a rotation seven. Each makes a tensor and costs a microsecond or more
before it computes anything: for a few rows that is as long as the matrix products of a layer. Where the
products are ours too, the norm before them and what follows are a part of them, and all layers are one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minipaged.attention.batch import require_matching, require_tables
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import After, Layer, Layers, Product
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.kernels import CpuKernels, DecodeStep, PrefillStep
from minipaged.cpu.packing import in_panels
from minipaged.model.llama import Attention, DecoderLayer, LlamaModel, RMSNorm

if TYPE_CHECKING:
    from minipaged.attention.backend import AttentionBackend
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import KVStorage, LayerKV


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
        return Product(
            norm=None if self.norm is None else self.norm.data_ptr(),
            weight=self.packed.data_ptr(),
            words=self.packed.shape[1],
            panels=self.packed.shape[0],
            eps=self.eps,
            after=self.after,
        )


class CompiledHead(CompiledLinear):
    """The head: logits in float32, or of each row only where its largest is. CPU only."""

    def __init__(self, weight: Tensor, kernels: CpuKernels) -> None:
        super().__init__(weight, kernels, After.KEEP_FLOAT32)

    def argmax(self, hidden: Tensor) -> Tensor:
        """int64 [R]: the first place of the largest logit of each row of `hidden`, [R, hidden_size].

        -1 in a row with a logit that is not finite.
        """
        places = torch.empty(hidden.shape[0], dtype=torch.int64)
        arguments = self.arguments()
        arguments.after = After.ARGMAX
        self._kernels.product(hidden.contiguous(), arguments, places)
        return places


class RotatedInPlace(nn.Module):
    """What compiled attention is between its two products. The shape of the heads is that of `attention`."""

    def __init__(self, attention: Attention, kernels: CpuKernels) -> None:
        super().__init__()
        self.num_query_heads, self.num_kv_heads = attention.num_query_heads, attention.num_kv_heads
        self.head_size, self.scale = attention.head_size, attention.scale
        self._kernels = kernels

    def attend(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        """Queries, keys and values [T, heads * D] -> what is attended to, [T, query heads * D]."""
        num_tokens, num_turned = qkv.shape[0], self.num_query_heads + self.num_kv_heads
        heads = qkv.view(num_tokens, -1, self.head_size)
        self._kernels.rotate(heads[:, :num_turned], cos, sin)
        key, value = heads[:, self.num_query_heads : num_turned], heads[:, num_turned:]
        # All keys of the step before any of its queries reads: requests may share blocks that it fills.
        backend.write_kv(layer, key, value, batch.slot_mapping)
        query = heads[:, : self.num_query_heads]  # [T, query heads, D]
        return backend.paged_attention(query, layer, batch, scale=self.scale).view(num_tokens, -1)


class CompiledAttention(RotatedInPlace):
    """`Attention` with a compiled rotation and the products it had. CPU only."""

    def __init__(self, attention: Attention, kernels: CpuKernels) -> None:
        super().__init__(attention, kernels)
        self.qkv_proj, self.o_proj = attention.qkv_proj, attention.o_proj

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        return self.o_proj(self.attend(self.qkv_proj(x), cos, sin, layer, batch, backend))


class CompiledLayer(RotatedInPlace):
    """A `DecoderLayer` in seven calls. The residual stream is changed in place. CPU only."""

    def __init__(self, layer: DecoderLayer, kernels: CpuKernels) -> None:
        attention, mlp = layer.attention, layer.mlp
        super().__init__(attention, kernels)
        self.qkv_proj = CompiledLinear(attention.qkv_proj.weight, kernels, norm=layer.attention_norm)
        self.o_proj = CompiledLinear(attention.o_proj.weight, kernels, After.ADD)
        self.gate_up_proj = CompiledLinear(mlp.gate_up_proj.weight, kernels, After.GATE, layer.mlp_norm)
        self.down_proj = CompiledLinear(mlp.down_proj.weight, kernels, After.ADD)

    def arguments(self) -> Layer:
        """Its weights, as the kernel that runs all layers is told of them."""
        return Layer(
            qkv=self.qkv_proj.arguments(),
            attended=self.o_proj.arguments(),
            gate_up=self.gate_up_proj.arguments(),
            down=self.down_proj.arguments(),
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        x = self.o_proj(self.attend(self.qkv_proj(x), cos, sin, layer, batch, backend), x)
        return self.down_proj(self.gate_up_proj(x), x)


class CpuLlama(LlamaModel):
    """A Llama made of compiled modules, the parts of `model` as they are now.

    With a backend that `fuses_layers`, and a cache of the model's dtype, all layers are one call of C++; else
    they are called one after the other, as in `LlamaModel`.
    """

    def __init__(self, model: LlamaModel, kernels: CpuKernels) -> None:
        nn.Module.__init__(self)  # that of LlamaModel would make weights
        self.config, self.embed_tokens, self.rotary = model.config, model.embed_tokens, model.rotary
        self.layers, self.norm, self.lm_head = model.layers, model.norm, model.lm_head
        self.fuses_argmax = isinstance(self.lm_head, CompiledHead)
        self._kernels = kernels
        compiled = [layer for layer in self.layers if isinstance(layer, CompiledLayer)]
        self._compiled = compiled if len(compiled) == len(self.layers) else []
        self._weights = (Layer * len(self._compiled))(*[layer.arguments() for layer in self._compiled])

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, storage: KVStorage, backend: AttentionBackend
    ) -> Tensor:
        """As `LlamaModel.forward`."""
        config = self.config
        by_kind = (config.num_query_heads, config.num_kv_heads, config.num_kv_heads)
        heads = torch.empty(len(token_ids), sum(by_kind), config.head_size, dtype=self.dtype)
        query, key, value = heads.split(by_kind, dim=1)
        layer, slots = storage.layer(0), batch.slot_mapping
        if not (
            isinstance(backend, CpuBackend)
            and backend.fuses_layers
            and storage.spec.num_layers == len(self._compiled)
            and cpu_kernels.can_prefill(query, layer, self._kernels)
            and cpu_kernels.can_write(layer, key, value, slots)
        ):
            return super().forward(token_ids, batch, storage, backend)
        require_matching(query, layer, batch)
        require_tables(batch, storage.num_blocks)  # the kernels read through bare addresses
        x = self.embed_tokens(token_ids)  # [T, hidden], changed in place from layer to layer
        cos, sin = self.rotary(batch.positions)
        decodes, prompts = DecodeStep.make(batch), PrefillStep.make(batch)
        fill = torch.empty_like if decodes.arguments.num_seqs == len(x) else torch.zeros_like
        attended = fill(query, memory_format=torch.contiguous_format)  # rows that see no key stay zero
        gated = x.new_empty(len(x), config.intermediate_size)
        for step in (decodes, prompts):
            step.point_at(attended, query, layer, config.head_size**-0.5)
        self._kernels.run_layers(
            Layers(
                x=x.data_ptr(),
                heads=heads.data_ptr(),
                attended=attended.data_ptr(),
                gated=gated.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                slots=slots.data_ptr(),
                keys=storage.key.data_ptr(),
                values=storage.value.data_ptr(),
                rows=len(x),
                num_slots=storage.num_slots,
                layer_stride=storage.key.stride(0),
                num_layers=len(self._compiled),
                layers=self._weights,
                decodes=decodes.arguments,
                prompts=prompts.arguments,
            ),
            x.dtype,
        )
        return self.norm(x)

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """As `LlamaModel.argmax_tokens`; with a compiled head no logit is written down."""
        head: nn.Module = self.lm_head
        return head.argmax(hidden) if isinstance(head, CompiledHead) else super().argmax_tokens(hidden)
