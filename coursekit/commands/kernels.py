"""Compile the Triton kernels for real GPUs, without one, and print what they cost.

    minipaged kernels                             every kernel for every GPU generation
    minipaged kernels --target sm_90 --kernel decode
    minipaged kernels --show sass decode          the machine code, with its hot loop marked

Registers, spills and shared memory decide how many programs a GPU keeps in flight; the width of the loads and
the matrix instructions decide what each of them gets done. All of it is read from the compiler's output.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from minipaged.commands import CommandError

if TYPE_CHECKING:
    from coursekit.aot.cases import KernelCase
    from minipaged.attention.targets import Target

DEFAULT_SHOWN = "sm_90"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", metavar="NAME", help="only this target (repeatable)")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel (repeatable)")
    parser.add_argument(
        "--show",
        nargs=2,
        metavar=("KIND", "KERNEL"),
        help=f"print the ptx or sass of a kernel for --target (default {DEFAULT_SHOWN})",
    )
    parser.add_argument("--json", action="store_true", help="print the reports for a program to read")


def run(args: argparse.Namespace) -> int:
    if os.environ.get("TRITON_INTERPRET"):
        return _in_compiling_process(args)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise CommandError(f"Triton does not load ({error}); it exists for Linux and Windows only") from None
    if args.show:
        return _show(args)
    targets = [_target(name) for name in args.target or _all_targets()]
    return _print_json(args, targets) if args.json else _print_tables(args, targets)


def _in_compiling_process(args: argparse.Namespace) -> int:
    """Triton reads TRITON_INTERPRET when it is imported, so compiling takes a process that lacks it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "minipaged", "kernels"]
    for option in ("target", "kernel"):
        command += [word for value in getattr(args, option) or [] for word in (f"--{option}", value)]
    command += ["--show", *args.show] if args.show else []
    command += ["--json"] if args.json else []
    return subprocess.run(command, env=environment).returncode


def _all_targets() -> list[str]:
    from minipaged.attention.targets import TARGETS

    return list(TARGETS)


def _target(name: str) -> "Target":
    from minipaged.attention.targets import TARGETS

    if name not in TARGETS:
        raise CommandError(f"there is no target {name!r}; the targets are {', '.join(TARGETS)}")
    return TARGETS[name]


def _cases(args: argparse.Namespace, target: "Target") -> list["KernelCase"]:
    """The target's cases that `--kernel` asks for."""
    from coursekit.aot.cases import kernel_cases

    cases = kernel_cases(target)
    names = sorted({case.name for case in cases})
    for name in args.kernel or []:
        if name not in names:
            raise CommandError(f"there is no kernel {name!r}; the kernels are {', '.join(names)}")
    return [case for case in cases if not args.kernel or case.name in args.kernel]


def _show(args: argparse.Namespace) -> int:
    from coursekit.aot.compile import compile_launch
    from coursekit.aot.report import listing_of
    from coursekit.aot.table import marked

    kind, args.kernel = args.show[0], [args.show[1]]
    if kind not in ("ptx", "sass"):
        raise CommandError(f"cannot show {kind!r}, only ptx or sass")
    target = _target((args.target or [DEFAULT_SHOWN])[0])
    case = _cases(args, target)[0]
    print(f"{case.name} ({case.variant}) for {target.name}, {case.launch.num_warps} warps")
    print(marked(listing_of(compile_launch(case.launch, target), kind)))
    return 0


def _print_json(args: argparse.Namespace, targets: list["Target"]) -> int:
    from coursekit.aot.report import report_case

    reports = [asdict(report_case(case, target)) for target in targets for case in _cases(args, target)]
    print(json.dumps(reports, indent=1))
    return 0


def _print_tables(args: argparse.Namespace, targets: list["Target"]) -> int:
    from coursekit.aot import table
    from coursekit.aot.report import report_case

    for target in targets:
        print(table.heading(target))
        print(table.COLUMNS)
        for case in _cases(args, target):
            print(table.row(report_case(case, target)), flush=True)
        print()
    print(table.FOOTER)
    return 0
