"""Makes a model as fast on a CPU as it can be there."""

from __future__ import annotations

from typing import cast

from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import LANES, NAMES
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.modules import CompiledHead, CompiledLayer, CompiledLayers, CompiledRMSNorm
from minipaged.cpu.packing import PANEL, give_freed_memory_back, pack_weights
from minipaged.model.llama import Attention, DecoderLayer, Linear, LlamaModel, RMSNorm


def use_compiled_kernels(model: LlamaModel) -> bool:
    """Replace norms and rotations of a model on a CPU, and whole layers where our products are faster.

    The plain weights of what is replaced are freed. Doing it twice changes nothing more. False, and nothing
    changed, without a compiler and for dtypes and sizes that the kernels do not know.
    """
    config = model.config
    fits = config.hidden_size % LANES == 0 and config.head_size % (2 * LANES) == 0
    fits = fits and not (config.attention_bias or config.qk_norm)  # torch serves these
    if model.device.type != "cpu" or model.dtype not in NAMES or not fits:
        return False
    kernels = cpu_kernels.load()
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
    fits = config.hidden_size % PANEL == 0 and config.intermediate_size % LANES == 0
    if fits and not isinstance(model.layers, CompiledLayers):
        layers = []
        for index, layer in enumerate(model.layers):
            layers.append(CompiledLayer(cast("DecoderLayer", layer), kernels))
            model.layers[index] = layers[-1]
            give_freed_memory_back()
        model.layers = CompiledLayers(layers, kernels)
    if config.vocab_size % PANEL == 0 and isinstance(model.lm_head, Linear):
        head = CompiledHead(model.lm_head.weight, kernels)
        model.register_module("lm_head", head)
        model.largest_logits = head.largest
        give_freed_memory_back()


def prepare_for_cpu(model: LlamaModel) -> None:
    """Make a model on a CPU as fast as it can be here; its plain weights are freed. Elsewhere nothing."""
    use_compiled_kernels(model)
    pack_weights(model)
