"""Where benchmarks write what they measured: JSON with the machine it was measured on, and figures."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.quiet import FOREIGN_LIMIT
from coursekit.figures.style import save

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "cpu"
UNRECORDED = ROOT / "out" / "benchmarks"
PACKAGES = ("minipaged", "torch", "transformers", "numpy")


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        action="store_true",
        help="write to benchmarks/results/cpu and the README instead of out/benchmarks",
    )


def describe_machine() -> dict[str, Any]:
    """Processor, memory and software, as far as they decide a figure."""
    return {
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: metadata.version(package) for package in PACKAGES},
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name, with its instructions for bfloat16 if it has any."""
    try:
        lines = [line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line]
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, value in lines}
    bfloat16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return ", ".join([facts.get("model name", platform.machine()), *bfloat16])


def write(name: str, result: dict[str, Any], figures: dict[str, Figure], *, record: bool) -> Path:
    """Write name.json and each figure as stem.svg and stem.png; returns the path of the JSON.

    A result that is recorded must say so of itself: `foreign_limit` above the usual limit is refused, since
    figures from a busy machine mean nothing.
    """
    if record and result["foreign_limit"] > FOREIGN_LIMIT:
        raise ValueError(f"a limit of {result['foreign_limit']} is not recorded, at most {FOREIGN_LIMIT} is")
    folder = RECORDED if record else UNRECORDED
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": now, "machine": describe_machine()} | result, indent=1) + "\n")
    for stem, figure in figures.items():
        save(figure, folder / stem)
    if record:  # in a process of its own, since it imports the script that is running
        subprocess.run([sys.executable, ROOT / "benchmarks" / "readme.py"], check=True)
    return path


def read(name: str, folder: Path = RECORDED) -> dict[str, Any] | None:
    """A recorded result; None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(rows: list[list[str]]) -> str:
    """Rows of words in columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()

    return "\n".join(map(line, rows))


def markdown(rows: list[list[str]]) -> str:
    """The same as a Markdown table."""
    marks = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], marks, *rows[1:]])
