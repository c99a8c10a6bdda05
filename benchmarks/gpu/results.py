"""From what the parts found to the recorded result: goals, and the file benchmarks/results/<card>.json."""

import datetime
import hashlib
import platform
import re
from pathlib import Path
from typing import Any

import numpy
import torch
import triton

import minipaged
from benchmarks.gpu.part import write_json
from benchmarks.gpu.shapes import BATCH, GOALS, MAIN_CONTEXT, SINGLE_CONTEXT, decode_shapes, prefill_shapes

FOLDER = Path(__file__).parents[1] / "results"
FORMAT = 1
PAGED_IN_TORCH = ("varlen_attn", "FlexAttention paged")

Found = dict[str, list[dict[str, Any]]]


def measured_goals(found: Found) -> dict[str, float | None]:
    """The figure each goal is about, worst case where it names several; None where it was not measured."""
    share = {figure["name"]: figure["share_of_copy"] for figure in found.get("figures", [])}
    seconds = {figure["name"]: figure["median"] for figure in found.get("figures", [])}
    speed = {peer["name"]: peer["speed"] for peer in found.get("peers", []) if "speed" in peer}
    main = f"decode b{BATCH} c{MAIN_CONTEXT}"
    large = [
        shape.name
        for shape in decode_shapes()
        if len(shape.context_lens) >= BATCH and min(shape.context_lens) >= MAIN_CONTEXT
    ]

    def ratio(numerator: str, denominator: str) -> float | None:
        known = numerator in seconds and denominator in seconds
        return seconds[numerator] / seconds[denominator] if known else None

    prefills = [ratio(f"{shape.name} flash SDPA", shape.name) for shape in prefill_shapes()]
    return {
        "decode_bandwidth": min((share[name] for name in large if name in share), default=None),
        "paging_price": ratio(f"{main} shuffled", f"{main} identity"),
        "small_blocks": ratio(f"{main} shuffled", f"{main} block 128"),
        "against_flashinfer": speed.get("FlashInfer"),
        "against_torch_paged": min((speed[name] for name in PAGED_IN_TORCH if name in speed), default=None),
        "single_sequence": share.get(f"decode b1 c{SINGLE_CONTEXT}"),
        "prefill": min((value for value in prefills if value is not None), default=None),
    }


def goal_rows(found: Found) -> list[dict[str, Any]]:
    """Every goal with its limits, what was measured, and whether each limit is met (None: not measured)."""
    measured = measured_goals(found)
    rows = []
    for goal in GOALS:
        value = measured[goal.name]
        row = {"name": goal.name, "text": goal.text, "at_least": goal.at_least, "aim": goal.aim}
        row |= {"higher_is_better": goal.higher_is_better, "measured": value}
        row["met"] = None if value is None else goal.met(value, goal.at_least)
        row["aim_met"] = None if value is None else goal.met(value, goal.aim)
        rows.append(row)
    return rows


def describe_machine() -> dict[str, Any]:
    """The card and the software, as far as they decide a figure."""
    properties = torch.cuda.get_device_properties(0)
    device = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": getattr(properties, "L2_cache_size", None),
    }
    return {"device": device, "versions": versions(), "source": source_digest()}


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "minipaged": minipaged.__version__,
    }


def source_digest() -> str:
    """Of the kernels and their launchers: says whether a recorded figure is of the code at hand."""
    digest = hashlib.sha256()
    for path in sorted((Path(minipaged.__file__).parent / "attention").rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def result_path(card: str, folder: Path = FOLDER) -> Path:
    """benchmarks/results/nvidia-h200.json for "NVIDIA H200"."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json")


def write_result(
    found: Found,
    parts: list[dict[str, Any]],
    machine: dict[str, Any],
    *,
    complete: bool,
    folder: Path = FOLDER,
) -> Path:
    """Write what is known so far; the file is replaced whole."""
    path = result_path(machine["device"]["name"], folder)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    content = {"format": FORMAT, "date": now.isoformat(), "complete": complete, **machine}
    content |= {"parts": parts, "goals": goal_rows(found), **found}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path
