"""The number formats of weights and caches, and which machine multiplies bfloat16."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """One number format.

    Attributes:
        torch: torch's dtype; its `itemsize` is the bytes a number takes.
        names: what a user may call it; the first is the usual one.
        short: in tables of kernels.
        triton: in the signature of a Triton kernel.
        largest: None for what a model computes in. A quantised cache stores numbers up to this magnitude,
            with one float32 scale per token and head. int8 leaves -128 out so that signs are symmetric.
    """

    torch: torch.dtype
    names: tuple[str, ...]
    short: str
    triton: str
    largest: float | None = None

    @property
    def has_scale(self) -> bool:
        """Whether what is stored needs a scale to be read."""
        return self.largest is not None


DTYPES = (
    DType(torch.float32, ("float32", "float"), "fp32", "fp32"),
    DType(torch.float16, ("float16", "half"), "fp16", "fp16"),
    DType(torch.bfloat16, ("bfloat16",), "bf16", "bf16"),
    DType(torch.int8, ("int8",), "int8", "i8", largest=127.0),
    DType(torch.float8_e4m3fn, ("fp8", "fp8_e4m3"), "fp8", "fp8e4nv", largest=448.0),
)
OF_TORCH = {dtype.torch: dtype for dtype in DTYPES}
# What a model computes in, what a cache stores, and the largest magnitude of those that need a scale.
COMPUTE_DTYPES = tuple(dtype.torch for dtype in DTYPES if not dtype.has_scale)
KV_DTYPES = tuple(dtype.torch for dtype in DTYPES)
LARGEST = {dtype.torch: dtype.largest for dtype in DTYPES if dtype.largest is not None}


def named(value: object, supported: tuple[torch.dtype, ...], what: str) -> torch.dtype:
    """The dtype that a name means, or the dtype itself. Raises ValueError unless it is one of `supported`."""
    names = {name: dtype for dtype in supported for name in OF_TORCH[dtype].names}
    if isinstance(value, torch.dtype) and value in supported:
        return value
    if isinstance(value, str) and value in names:
        return names[value]
    raise ValueError(f"{what} is {value!r}, supported are 'auto', {', '.join(map(repr, names))}")


def fast_dtype(device: torch.device) -> torch.dtype:
    """What a model computes in on `device` unless it is told otherwise.

    bfloat16 where the device multiplies it; else float16 on a GPU, and on a CPU float32, with a warning.
    """
    if device.type == "cuda":
        return torch.bfloat16 if gpu_has_bfloat16(device) else torch.float16
    if cpu_has_bfloat16():
        return torch.bfloat16
    warnings.warn("this CPU multiplies no bfloat16: the model runs in float32, which is slower", stacklevel=2)
    return torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 by this processor's own instructions: AVX512-BF16, AMX or Arm's BF16.

    It does so through oneDNN, which torch for macOS is built without.
    """
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has_instructions = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return has_instructions and torch.backends.mkldnn.is_available()


def gpu_has_bfloat16(device: torch.device | int | None = None) -> bool:
    """Whether a GPU of this machine, the current one by default, has matrix units for bfloat16."""
    if torch.version.hip:
        return True  # as of every AMD GPU that Triton compiles for
    major, minor = torch.cuda.get_device_capability(device)
    return arch_has_bfloat16(10 * major + minor)


def arch_has_bfloat16(arch: int | str) -> bool:
    """The same for an architecture: NVIDIA's compute capability times ten, or AMD's gfx name.

    Turing (75) has float16 only; every AMD GPU that Triton compiles for has both.
    """
    return isinstance(arch, str) or arch >= 80
