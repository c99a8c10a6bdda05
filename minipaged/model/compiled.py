"""Norms and rotations of a model on a CPU by compiled kernels: the same formulas in one pass over memory.

In torch a norm is eight operations, a rotation seven. Each makes a tensor and costs a microsecond or more
before it computes anything: for a few rows that is as long as the matrix products of a layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from minipaged.attention import cpu_kernel
from minipaged.attention.cpu_kernel import LANES, NAMES, CpuKernels
from minipaged.model.llama import Attention, LlamaModel, RMSNorm


class CompiledRMSNorm(nn.Module):
    """`RMSNorm` in one pass. CPU only."""

    def __init__(self, norm: RMSNorm, kernels: CpuKernels) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps)  # [T, hidden], contiguous, in and out


def use_compiled_kernels(model: LlamaModel) -> bool:
    """Replace the norms and rotations of a model on a CPU. Doing it twice changes nothing more.

    False, and nothing changed, without a compiler and for dtypes and sizes that the kernels do not know.
    """
    config = model.config
    fits = config.hidden_size % LANES == 0 and config.head_size % (2 * LANES) == 0
    if model.device.type != "cpu" or model.dtype not in NAMES or not fits:
        return False
    kernels = cpu_kernel.load()
    if kernels is None:
        return False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, CompiledRMSNorm(child, kernels))
        if isinstance(module, Attention):
            module.rotate = kernels.rotate
    return True
