"""Keep the pages with recorded figures as their files say.

In benchmarks/README.md a row for each machine, between the two markers; in the machine's own folder a page
with everything measured there.

python benchmarks/readme.py          after files in benchmarks/results/cpu have changed; `--record` does it
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import curves, prefix_sharing, records, scaling, scheduler, throughput
from benchmarks.goals import MIXES, OURS, VLLM, goal_cells

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- recorded figures: written by readme.py -->", "<!-- end of recorded figures -->"
NOT_RECORDED = "Not recorded yet."


def render_throughput(result: dict[str, Any]) -> str:
    tables = [
        f"{records.markdown(throughput.mix_rows(mix, engines))}\n\n{throughput.floor_line(result, mix)}."
        for mix, engines in result["mixes"].items()
        if engines
    ]
    return "\n\n".join(tables)


def render_goals(result: dict[str, Any]) -> str:
    """What the makers hold themselves to; of no interest to others, so it comes last."""
    header = ["goal", "mix", "at least", "aim", "measured", "verdict"]
    return records.markdown([header, *map(goal_cells, result["goals"])])


def render_curves(result: dict[str, Any]) -> str:
    return "\n\n".join(records.markdown(curves.rows(result, curve)) for curve in curves.CURVES)


def render_prefix_sharing(result: dict[str, Any]) -> str:
    return records.markdown(prefix_sharing.rows(result["runs"]))


def render_scaling(result: dict[str, Any]) -> str:
    fits = [line for name, found in result["series"].items() for line in scaling.fit_lines(name, found)]
    return "\n".join(f"- {line}" for line in [*fits, *result["reasons"]])


def render_scheduler(result: dict[str, Any]) -> str:
    tables = (scheduler.beside_rows(result), scheduler.idle_rows(result), scheduler.goal_rows(result))
    return "\n\n".join(map(records.markdown, tables))


SECTIONS = {
    "throughput": ("Side by side", render_throughput),
    "curves": ("Where the lead over transformers comes from", render_curves),
    "prefix_sharing": ("A shared system prompt", render_prefix_sharing),
    "scaling": ("How a step grows", render_scaling),
    "scheduler": ("Beside the model", render_scheduler),
}


def render_machines(folders: list[Path]) -> str:
    """A table of output tokens per second: a row for each machine of which a comparison is recorded."""
    header = ["machine", "threads", *(mix + what for mix in (*MIXES, "alone") for what in ("", " / vLLM"))]
    header += ["share of the floor", "mean TTFT / vLLM"]
    rows = []
    for folder in folders:
        result = records.read("throughput", folder)
        if result is not None:
            rows.append([f"[{result['machine']['processor']}](results/cpu/{folder.name}/README.md)"])
            rows[-1] += machine_cells(result)
    return records.markdown([header, *rows]) if rows else NOT_RECORDED


def machine_cells(result: dict[str, Any]) -> list[str]:
    """What stands in a row of that table; a dash where it was not measured."""
    mixes, cells = result["mixes"], [str(result["threads"])]

    def against(mix: str, field: str) -> str:
        found = mixes.get(mix, {})
        return f"{found[OURS][field] / found[VLLM][field]:.2f}" if {OURS, VLLM} <= found.keys() else "-"

    def rate(mix: str) -> float | None:
        return mixes.get(mix, {}).get(OURS, {}).get("tokens_per_second")

    def share(mix: str) -> str:
        found = rate(mix)
        return "-" if found is None else f"{found / result['floors'][mix]['floor']:.2f}"

    for mix in (*MIXES, "alone"):
        found = rate(mix)
        cells += ["-" if found is None else f"{found:.0f}", against(mix, "tokens_per_second")]
    both = (" and ".join(map(share, MIXES)), " and ".join(against(mix, "ttft_mean") for mix in MIXES))
    return [*cells, *both]


def render(folder: Path) -> str:
    """What is recorded of a machine as a page in its folder, one section for each script."""
    parts = ["# Recorded on this machine", "Written by [readme.py](../../../readme.py)."]
    for name, (title, section) in SECTIONS.items():
        result = records.read(name, folder)
        parts.append(f"## {title}")
        if result is None:
            parts.append(NOT_RECORDED)
            continue
        parts += [origin(name, result), section(result), f"![{title}]({name}.svg)"]
    compared = records.read("throughput", folder)
    if compared is not None:
        parts += ["## Goals", render_goals(compared)]
    return "\n\n".join(parts) + "\n"


def origin(name: str, result: dict[str, Any]) -> str:
    """When and on what it was measured, and where the samples are."""
    machine = result["machine"]
    cores = f"{result['threads']} threads on {machine['cores']} cores"
    software = f"{result['dtype']}, torch {machine['versions']['torch']}"
    file = f"[{name}.json]({name}.json)"
    return f"{result['date'][:10]}, {machine['processor']}, {cores}, {software}. Everything measured: {file}."


def replace_block(text: str, block: str) -> str:
    """The text with everything between the markers replaced. Raises ValueError without both markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the markers {BEGIN} and {END} are not there in this order")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """Every page with recorded figures, as it should be."""
    folders = records.recorded_folders()
    own = {folder / "README.md": render(folder) for folder in folders}
    return own | {README: replace_block(README.read_text(), render_machines(folders))}


def update() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    update()
