"""Every kernel, compiled for other processors than this one, computes what plain loops in double do.

kernels_on_any_processor.cpp is compiled together with the kernels, with the flags of build.py, and run: here,
or for Arm in an emulator. All of it is slow: each build takes the compiler some ten seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from minipaged.cpu import build

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("kernels_on_any_processor.cpp")
# No fast maths: the program must know NaN.
PROGRAM_FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
NATIVE, *_, ANY_COMPILER = build.OPTIONAL_FLAGS


@dataclass(frozen=True)
class Build:
    """One way to compile the kernels.

    flags: what stands beside build.py's own; kernel_flags: of the kernels and the link alone. needs:
    instructions of the processor that runs the program. compiler, emulator: programs that must be installed;
    None: the compiler of this machine, no emulator.
    """

    flags: tuple[str, ...]
    kernel_flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    compiler: str | None = None
    emulator: str | None = None


SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
# The instructions of AMX, six for products of bfloat16, in plain C++.
TILES = ("-DMINIPAGED_EMULATE_TILES",)
KERNELS = ("norm", "turn", "store", "product", "decode", "prefill", "layers")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
BUILDS = {
    "this machine": Build(NATIVE),
    "what any compiler takes": Build(ANY_COMPILER),
    "AVX2": Build(("-march=x86-64-v3", "-fopenmp"), needs=("avx2", "fma", "bmi2")),
    "AVX-512 without bfloat16": Build(("-march=skylake-avx512", "-fopenmp"), needs=AVX512),
    "AMX, emulated": Build((*NATIVE, *TILES)),
    "Arm": Build(("-fopenmp", "-static"), compiler="aarch64-linux-gnu-g++", emulator="qemu-aarch64"),
    "sanitizers, AMX emulated": Build((*NATIVE, *TILES), SANITIZERS),
}


def instructions() -> set[str]:
    """Of this machine's processor, as Linux calls them; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    print(done.stdout, done.stderr)
    return done


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    """name of a build -> the command that runs its program; skips, by name, what this machine has not."""

    @cache
    def built(name: str) -> list[str]:
        kind, folder = BUILDS[name], tmp_path_factory.mktemp("program")
        compiler = kind.compiler or build.find_compiler()
        programs = [compiler or "C++ compiler", *filter(None, [kind.emulator])]
        missing = [program for program in programs if not shutil.which(program)]
        missing += [needed for needed in kind.needs if needed not in instructions()]
        if missing:
            pytest.skip(f"this machine has no {', '.join(missing)}")
        objects = []
        for source in (*build.SOURCES, PROGRAM):
            own = PROGRAM_FLAGS if source is PROGRAM else (*build.COMPILE_FLAGS, *kind.kernel_flags)
            flags = [*own, *kind.flags, "-I", str(build.FOLDER)]
            objects.append(str(folder / f"{source.stem}.o"))
            run([compiler, *flags, "-c", str(source), "-o", objects[-1]]).check_returncode()
        path = str(folder / "program")
        run([compiler, *kind.flags, *kind.kernel_flags, *objects, "-o", path]).check_returncode()
        return [*filter(None, [kind.emulator]), path]

    return built


@pytest.mark.parametrize("name", BUILDS)
def test_every_kernel_is_right_on(name: str, program):
    done = run(program(name), OMP_NUM_THREADS="2")
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.endswith(": right")]
    right = {" ".join(line.split(" cases")[0].split()[:-1]) for line in lines}
    assert {f"{kernel} {dtype}" for kernel in KERNELS for dtype in ("float32", "bfloat16")} <= right
    if set(TILES) <= set(BUILDS[name].flags):
        assert {f"{kernel} bfloat16, tiles" for kernel in ("product", "prefill", "layers")} <= right


def test_a_kernel_that_reads_beyond_the_cache_is_reported_by_the_sanitizers(program):
    """Else their silence would say nothing."""
    done = run([*program("sanitizers, AMX emulated"), "beyond"])
    assert done.returncode and "heap-buffer-overflow" in done.stderr and "decode.cpp" in done.stderr
