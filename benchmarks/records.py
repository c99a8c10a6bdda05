"""Where benchmarks write what they measured: JSON with the machine it was measured on, and figures.

Each kind of machine has a folder of its own in benchmarks/results/cpu, so that no machine's record takes the
place of another's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
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
RECORDED = ROOT / "benchmarks" / "results" / "cpu"  # a folder for each kind of machine
CPUINFO = Path("/proc/cpuinfo")
UNRECORDED = ROOT / "out" / "benchmarks"
PACKAGES = ("minipaged", "torch", "transformers", "numpy")


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        action="store_true",
        help="write to this machine's folder in benchmarks/results/cpu and the README, not to out/benchmarks",
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


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The model's name, with its instructions for bfloat16 if it has any."""
    facts = processor_facts(cpuinfo)
    name = facts.get("model name") or platform.processor() or platform.machine()
    return ", ".join([name, *bfloat16_instructions(facts)])


def processor_facts(cpuinfo: Path) -> dict[str, str]:
    """What Linux tells of a processor; nothing elsewhere."""
    try:
        lines = [line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, value in lines}


def bfloat16_instructions(facts: dict[str, str]) -> list[str]:
    """Those of them that multiply bfloat16: AVX512-BF16, AMX, or Arm's."""
    known = set(facts.get("flags", facts.get("Features", "")).split())
    return [name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in known]


def machine_folder(cpuinfo: Path = CPUINFO, cores: int | None = None) -> Path:
    """Where the records of this kind of machine are: amd-epyc-25-17-avx512-bf16-2-cores, for example.

    The name, then family and model, since clouds give the same name to different processors; Arm has
    numbers of implementer and part instead.
    """
    facts = processor_facts(cpuinfo)
    name = facts.get("model name") or platform.processor() or platform.machine()
    name = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", " ", name, flags=re.IGNORECASE)  # Intel(R) Xeon(R) CPU @ 2.10GHz
    numbers = [facts[key] for key in ("cpu family", "model", "CPU implementer", "CPU part") if key in facts]
    words = [name, *numbers, *bfloat16_instructions(facts), f"{cores or psutil.cpu_count()} cores"]
    return RECORDED / re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def recorded_folders() -> list[Path]:
    """The folder of each kind of machine that something is recorded of, by name."""
    return sorted({path.parent for path in RECORDED.glob("*/*.json")})


def write(name: str, result: dict[str, Any], figures: dict[str, Figure], *, record: bool) -> Path:
    """Write name.json and each figure as stem.svg and stem.png; returns the path of the JSON.

    A result that is recorded must say so of itself: `foreign_limit` above the usual limit is refused, since
    figures from a busy machine mean nothing.
    """
    if record and result["foreign_limit"] > FOREIGN_LIMIT:
        raise ValueError(f"a limit of {result['foreign_limit']} is not recorded, at most {FOREIGN_LIMIT} is")
    folder = machine_folder() if record else UNRECORDED
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": now, "machine": describe_machine()} | result, indent=1) + "\n")
    for stem, figure in figures.items():
        save(figure, folder / stem)
    if record:  # in a process of its own, since it imports the script that is running
        subprocess.run([sys.executable, ROOT / "benchmarks" / "readme.py"], check=True)
    return path


def read(name: str, folder: Path) -> dict[str, Any] | None:
    """What is recorded in the folder of a machine; None where nothing is."""
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
