"""Compiling a launch ahead of time, for a GPU that is not there.

Needs Triton's compiler, so it must run in a process that has not set `TRITON_INTERPRET`.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minipaged.attention.launch import Launch
from minipaged.attention.targets import Target
from minipaged.dtypes import DTYPES

# What else a kernel's arguments may hold: positions, slots, tables.
_OTHER_TYPES = {
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "u1",
}
_TYPES = _OTHER_TYPES | {dtype.torch: dtype.triton for dtype in DTYPES}


@dataclass(frozen=True)
class Specialisation:
    """What the compiler is told of the arguments: types, constants, and which are multiples of 16."""

    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]

    @property
    def run_time(self) -> list[str]:
        """Names of the arguments that are passed at run time, in order."""
        return [name for name, kind in self.signature.items() if kind != "constexpr"]


@dataclass(frozen=True)
class Compiled:
    """The compiler's products for one target: `asm` maps "ttgir", "ptx", "sass", "amdgcn" to text."""

    asm: dict[str, str]
    registers: int
    spill_bytes: int  # per thread, in local memory
    shared_memory: int  # per program
    run_time: list[str]


def specialise(launch: Launch) -> Specialisation:
    """Types, constants and alignments of a launch's arguments, by the rules of Triton's run time.

    A pointer or integer that is a multiple of 16 is compiled for as such (that is what allows loads of 16
    bytes), and an integer 1 becomes a constant.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible = []
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.args[parameter.name]
        kind = "constexpr" if parameter.is_constexpr or value is None else _type_of(value)
        if kind in ("i32", "i64") and isinstance(value, int) and not parameter.do_not_specialize:
            if value == 1:
                kind = "constexpr"
            elif value % 16 == 0:
                divisible.append(name)
        elif isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0:
            divisible.append(name)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
    return Specialisation(signature, constants, tuple(divisible))


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile a launch for a target. Raises what Triton raises when the kernel does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = specialise(launch)
    order = list(known.signature)
    attributes = {(order.index(name),): [["tt.divisibility", 16]] for name in known.divisible}
    compiled = triton.compile(
        ASTSource(launch.kernel, known.signature, known.constants, attributes),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    asm = {stage: str(compiled.asm[stage]) for stage in ("ttgir", "ptx", "amdgcn") if stage in compiled.asm}
    if target.backend == "hip":
        registers, spills = _amd_resources(asm["amdgcn"])
    else:
        asm["sass"], usage = _disassemble(compiled.asm["cubin"], Path(triton.__file__).parent)
        registers, spills = _nvidia_resources(usage)
    return Compiled(asm, registers, spills, compiled.metadata.shared, known.run_time)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel argument of type {type(value).__name__} has no Triton type")


def _disassemble(cubin: bytes, triton_folder: Path) -> tuple[str, str]:
    """SASS with source lines, and the resource usage, by the tools that the triton wheel carries."""
    tools = triton_folder / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = (["nvdisasm", "-g", "-c"], ["cuobjdump", "--dump-resource-usage"])
        sass, usage = (
            subprocess.run(
                [str(tools / name), *options, file.name], capture_output=True, text=True, check=True
            )
            for name, *options in commands
        )
    return sass.stdout, usage.stdout


def _nvidia_resources(usage: str) -> tuple[int, int]:
    """Registers and bytes of local memory per thread, which only spills take in a Triton kernel."""
    fields = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return fields["REG"], fields["STACK"] + fields["LOCAL"]


def _amd_resources(amdgcn: str) -> tuple[int, int]:
    """Vector registers and bytes of scratch per lane, from the metadata at the end of the listing."""
    fields = dict(re.findall(r"^    (\.\w+): +(\d+)$", amdgcn, re.MULTILINE))
    return int(fields[".vgpr_count"]), int(fields[".private_segment_fixed_size"])
