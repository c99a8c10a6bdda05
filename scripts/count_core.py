"""The size and the shape of the engine, counted: what README and CONTRIBUTING say of it.

    python scripts/count_core.py              lines and files, import circles, upward imports
    python scripts/count_core.py --trace      and the Python files that one warm request opens, in order

Imports are read from the syntax tree, those inside functions and under TYPE_CHECKING included.
"""

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("minipaged", "coursekit")
CORE = ("cache", "attention", "core", "model", "engine", "sampling_params.py")
"""What counts as the engine: what a request passes through."""
BESIDE = ("cpu", "checkpoints")
"""Counted beside it: the fast path for CPUs, and the readers of strangers' model files, which run once."""

# Who may import whom: a module imports from its own layer and from those above it in this list, never from
# one below. Modules are matched by their longest prefix.
LAYERS = (
    ("minipaged.cgroup",),
    ("minipaged.threads",),
    (
        "minipaged.checks",
        "minipaged.config",
        "minipaged.dtypes",
        "minipaged.extras",
        "minipaged.memory",
        "minipaged.sampling_params",
    ),
    ("minipaged.cache",),
    ("minipaged.attention",),
    ("minipaged.model",),
    ("minipaged.checkpoints",),
    ("minipaged.cpu",),
    ("minipaged.machine",),
    ("minipaged.core",),
    ("minipaged.engine",),
    ("minipaged.recording",),
    ("minipaged.jobs", "minipaged.serve"),
    ("minipaged.live",),
    ("minipaged.commands", "minipaged.cli", "minipaged.__main__"),
    ("coursekit",),
)
FRONT_DOOR = "minipaged"  # its names are loaded when they are first used: it belongs to no layer


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files() -> dict[str, Path]:
    """Module name -> file."""
    return {module_name(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}


def imports_of(tree: ast.Module, known: Iterable[str]) -> set[str]:
    """The modules of `known` that a file imports, wherever the statement stands."""
    known, found = set(known), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module}
    return found & known


def import_graph() -> dict[str, set[str]]:
    """For every module the modules of this repository that it imports."""
    files = python_files()
    graph = {}
    for name, file in files.items():
        graph[name] = imports_of(ast.parse(file.read_text(encoding="utf-8")), files) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, largest first (Tarjan 1972). The front door is left out."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module] - {FRONT_DOOR}:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph.keys() - {FRONT_DOOR}):
        if module not in index:
            visit(module)
    return sorted(found, key=len, reverse=True)


def layer_of(module: str) -> int:
    """Its place in LAYERS. Raises ValueError for a module that has none: say there where it belongs."""
    prefixes = {module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)} | {module}
    for place, members in enumerate(LAYERS):
        if prefixes & set(members):
            return place
    raise ValueError(f"{module} is in no layer of LAYERS in scripts/count_core.py")


def upward_imports(graph: dict[str, set[str]]) -> list[str]:
    """Imports from a layer below in LAYERS, as "module -> module"."""
    return [
        f"{module} -> {other}"
        for module in sorted(graph.keys() - {FRONT_DOOR})
        for other in sorted(graph[module] - {FRONT_DOOR})
        if layer_of(other) > layer_of(module)
    ]


def count(part: str) -> tuple[int, int, int]:
    """Files, those of them that are not `__init__`, and lines of a folder or file of `minipaged`."""
    path = ROOT / "minipaged" / part
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return len(files), sum(file.name != "__init__.py" for file in files), lines


def trace_request() -> list[str]:
    """The files of `minipaged` that run while one warm request is served, in the order they are entered."""
    from minipaged import LLM, SamplingParams

    llm = LLM("smollm2-135m", num_blocks=64, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=3)
    llm.generate("The sky is", params, use_tqdm=False)
    llm.reset_prefix_cache()
    package, opened = str(ROOT / "minipaged"), dict[str, None]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            opened[Path(file).relative_to(package).as_posix()] = None

    sys.setprofile(note)
    try:
        llm.generate("The sky is", params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    return list(opened)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", action="store_true", help="also trace one warm request")
    arguments = parser.parse_args()

    total_files = total_lines = 0
    print(f"{'minipaged/':20} {'files':>6} {'lines':>7}      (files without __init__.py)")
    for part in CORE:
        _, files, lines = count(part)
        total_files, total_lines = total_files + files, total_lines + lines
        print(f"{part:20} {files:6} {lines:7,}")
    print(f"{'the engine':20} {total_files:6} {total_lines:7,}")
    for part in BESIDE:
        _, files, lines = count(part)
        total_files, total_lines = total_files + files, total_lines + lines
        print(f"{'with ' + part:20} {total_files:6} {total_lines:7,}")

    graph = import_graph()
    found, upward = circles(graph), upward_imports(graph)
    print(f"\n{len(found)} import circles", *(" <-> ".join(group) for group in found), sep="\n  ")
    print(f"\n{len(upward)} upward imports", *upward, sep="\n  ")

    if arguments.trace:
        opened = trace_request()
        print(f"\none warm request opens {len(opened)} Python files", *opened, sep="\n  ")


if __name__ == "__main__":
    main()
