"""GPU measurements recorded in benchmarks/results/, for whoever wants to tell them; never anything else.

    results = recorded_results()            None as long as no GPU has been seen
    print(goals_text())                     a table per card, or "not recorded yet"

The files are written by `benchmarks/gpu_check.sh`; benchmarks/results/README.md says what is in them.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
NOT_RECORDED = "not recorded yet"


def recorded_results(folder: Path = FOLDER) -> list[dict[str, Any]] | None:
    """Every recorded card's results, by file name; None where there are none.

    Raises ValueError, naming the file, for one that cannot be read.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    return found or None


def recorded_figure(name: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]] | None:
    """The figure called `name` (such as "decode b32 c4096") of every card that has it; None if none has."""
    found = {
        result["device"]["name"]: figure
        for result in recorded_results(folder) or []
        for figure in result.get("figures", [])
        if figure["name"] == name
    }
    return found or None


def goals_text(folder: Path = FOLDER) -> str:
    """What was measured beside what is aimed for, one table per card; or `NOT_RECORDED`."""
    results = recorded_results(folder)
    if results is None:
        return NOT_RECORDED
    return "\n\n".join(_card_text(result) for result in results)


def _card_text(result: dict[str, Any]) -> str:
    versions = result["versions"]
    software = f"torch {versions['torch']}, triton {versions['triton']}"
    lines = [
        f"{result['device']['name']}, {result['date'][:10]}, {software}",
        f"{'goal':<52} {'limit':>7} {'aim':>7} {'measured':>9}",
    ]
    for goal in result["goals"]:
        sign = ">=" if goal["higher_is_better"] else "<="
        measured = "-" if goal["measured"] is None else f"{goal['measured']:.2f}"
        verdict = {None: "not measured", True: "met", False: "not met"}[goal["met"]]
        limit, aim = (f"{sign} {goal[key]:.2f}" for key in ("at_least", "aim"))
        lines.append(f"{goal['text']:<52} {limit:>7} {aim:>7} {measured:>9}  {verdict}")
    return "\n".join(lines)
