"""The seam between the engine and this folder: a model and its attention go in, faster ones come out.

The engine knows nothing else of this folder. What cannot be made faster comes out as it went in: on a GPU,
without a compiler, in a dtype or of a size that the kernels do not know. A Qwen, whose queries and keys have
biases or norms, keeps its layers in plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from minipaged.attention.backend import AttentionBackend
from minipaged.attention.torch_backend import TorchBackend
from minipaged.checkpoints.loading import LoadedModel
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import LANES, NAMES
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.modules import (
    CompiledAttention,
    CompiledHead,
    CompiledLayer,
    CompiledRMSNorm,
    CpuLlama,
)
from minipaged.cpu.packing import PANEL, give_freed_memory_back, pack_weights
from minipaged.model.llama import DecoderLayer, LlamaModel, RMSNorm


def accelerate(
    loaded: LoadedModel, backend: AttentionBackend, *, keep_weights: bool = False
) -> tuple[LoadedModel, AttentionBackend]:
    """The model and its attention backend, as fast as they can be on the CPU here.

    The model that is given is used up: its plain weights are freed one by one. With `keep_weights` it stays
    as it is, and only attention is faster.
    """
    if loaded.model.device.type != "cpu":
        return loaded, backend
    if not keep_weights:
        loaded = replace(loaded, model=accelerate_model(loaded.model))
    return loaded, accelerate_backend(backend)


def accelerate_backend(backend: AttentionBackend) -> AttentionBackend:
    """`CpuBackend` in the place of plain torch, where its kernels can be built."""
    is_plain = type(backend) is TorchBackend
    return CpuBackend() if is_plain and cpu_kernels.load() is not None else backend


def accelerate_model(model: LlamaModel) -> LlamaModel:
    """A model with compiled kernels and weights laid out for them; the one given is used up.

    One that went through here already comes back as it is.
    """
    if isinstance(model, CpuLlama):
        return model
    model = use_compiled_kernels(model)
    pack_weights(model)
    return model


def use_compiled_kernels(model: LlamaModel) -> LlamaModel:
    """The same model with compiled norms and rotations, and whole layers where our products are faster.

    The very model, and nothing changed, without a compiler and for dtypes and sizes the kernels do not know.
    """
    config = model.config
    fits = config.hidden_size % LANES == 0 and config.head_size % (2 * LANES) == 0
    fits = fits and not (config.attention_bias or config.qk_norm)  # torch serves these
    if model.device.type != "cpu" or model.dtype not in NAMES or not fits:
        return model
    kernels = cpu_kernels.load()
    if kernels is None:
        return model
    if kernels.multiplies_fast(model.dtype):
        replace_products(model, kernels)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, CompiledRMSNorm(child, kernels))
        if isinstance(module, DecoderLayer):
            module.register_module("attention", CompiledAttention(module.attention, kernels))
    return CpuLlama(model, kernels)


def replace_products(model: LlamaModel, kernels: CpuKernels) -> None:
    """The layers and the head, each where its sizes are whole panels. One at a time, to save memory."""
    config = model.config
    if config.hidden_size % PANEL == 0 and config.intermediate_size % LANES == 0:
        for index, layer in enumerate(model.layers):
            model.layers[index] = CompiledLayer(cast("DecoderLayer", layer), kernels)
            give_freed_memory_back()
    if config.vocab_size % PANEL == 0:
        model.register_module("lm_head", CompiledHead(model.lm_head.weight, kernels))
        give_freed_memory_back()
