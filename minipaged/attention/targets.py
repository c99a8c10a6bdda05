"""The GPUs a kernel is compiled for, and the limits of one of their multiprocessors.

A kernel launcher asks a `Target` and never the card, so the same launcher decides for the card in the
machine and for a card that is not there. The limits are what occupancy follows from (see `occupancy.py`).

Sources: CUDA Programming Guide, "Technical Specifications per Compute Capability", and the occupancy
calculator of Nsight Compute for the allocation units; LLVM's AMDGPU usage guide and AMD's CDNA 3
instruction set guide for gfx942.
"""

from dataclasses import dataclass, replace

import torch

from minipaged.dtypes import arch_has_bfloat16


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    Sizes are bytes, registers are 32 bits wide. `num_multiprocessors` is that of `card`, a common card of the
    architecture; `Target.of` replaces both with what the machine really has.
    """

    name: str
    backend: str  # "cuda" or "hip", as Triton calls them
    arch: int | str  # compute capability times ten, or the gfx name
    warp_size: int
    card: str
    num_multiprocessors: int
    max_warps: int  # resident on one multiprocessor
    max_programs: int  # resident on one multiprocessor; CUDA calls a program a thread block
    registers: int  # per multiprocessor; on AMD per lane of a SIMD unit
    shared_memory: int  # per multiprocessor
    shared_per_program: int  # the most one program may ask for
    shared_reserved: int  # taken by the system for every program
    shared_unit: int  # requests are rounded up to a multiple of this

    @property
    def has_bfloat16(self) -> bool:
        """Whether the matrix units take bfloat16; Turing (sm_75) has float16 only."""
        return arch_has_bfloat16(self.arch)

    @property
    def has_float8(self) -> bool:
        """Whether float8_e4m3fn is converted in hardware: sm_89 and newer (gfx942 has another encoding)."""
        return self.backend == "cuda" and int(self.arch) >= 89

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        """The target of a device: limits as the driver reports them, the rest from the nearest older one.

        A device that is no GPU, which is where Triton's interpreter runs, counts as a small sm_80.
        """
        if device.type != "cuda":
            return replace(TARGETS["sm_80"], card="interpreter", num_multiprocessors=8)
        properties = torch.cuda.get_device_properties(device)
        card, count = properties.name, properties.multi_processor_count
        if torch.version.hip:
            name = properties.gcnArchName.split(":")[0]
            return replace(TARGETS["gfx942"], name=name, arch=name, card=card, num_multiprocessors=count)
        arch = 10 * properties.major + properties.minor
        older = [t for t in TARGETS.values() if isinstance(t.arch, int) and t.arch <= arch]
        if not older:
            raise ValueError(f"{card} is sm_{arch}, the kernels need sm_75 or newer")
        nearest = older[-1]
        return replace(
            nearest,
            name=f"sm_{arch}",
            arch=arch,
            card=card,
            num_multiprocessors=count,
            max_warps=properties.max_threads_per_multi_processor // properties.warp_size,
            shared_memory=properties.shared_memory_per_multiprocessor,
            shared_per_program=properties.shared_memory_per_multiprocessor - nearest.shared_reserved,
        )


def _cuda(arch: int, card: str, multiprocessors: int, warps: int, programs: int, shared_kib: int) -> Target:
    """An NVIDIA target. From sm_80 on the system keeps 1 KiB of shared memory per program to itself."""
    reserved = 1024 if arch >= 80 else 0
    return Target(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        card=card,
        num_multiprocessors=multiprocessors,
        max_warps=warps,
        max_programs=programs,
        registers=65536,
        shared_memory=shared_kib * 1024,
        shared_per_program=shared_kib * 1024 - reserved,
        shared_reserved=reserved,
        shared_unit=128 if arch >= 80 else 256,
    )


_GFX942 = Target(
    name="gfx942",
    backend="hip",
    arch="gfx942",
    warp_size=64,
    card="MI300X",
    num_multiprocessors=304,
    max_warps=32,  # 8 on each of 4 SIMD units
    max_programs=16,
    registers=512,
    shared_memory=64 * 1024,
    shared_per_program=64 * 1024,
    shared_reserved=0,
    shared_unit=512,
)

# From old to new.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _cuda(75, "T4", 40, 32, 16, 64),
        _cuda(80, "A100", 108, 64, 32, 164),
        _cuda(90, "H100", 132, 64, 32, 228),
        _cuda(100, "B200", 148, 64, 32, 228),
        _cuda(120, "RTX 5090", 170, 48, 24, 100),
        _GFX942,
    )
}
