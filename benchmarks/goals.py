"""What the engine is held to beside its peers, and what of it a run has shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.floor import Floor

Summaries = dict[str, dict[str, dict[str, Any]]]
"""mix -> engine -> what `summarise` returns: medians over the samples."""

OURS, TORCH, VLLM, STATIC, CONTINUOUS = (
    "minipaged",
    "minipaged-torch",
    "vllm",
    "transformers",
    "transformers-cb",
)
MIXES = ("chat48", "instruct64")


@dataclass(frozen=True)
class Goal:
    """`measure` gives the figure for one mix, or raises KeyError where a side of it was not measured."""

    text: str
    at_least: float
    aim: float
    measure: Callable[[Summaries, dict[str, Floor], str], float]
    mixes: tuple[str, ...] = MIXES
    higher_is_better: bool = True

    def met(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher_is_better else value <= limit


def ratio(field: str, ours: str, theirs: str) -> Callable[[Summaries, dict[str, Floor], str], float]:
    """Ours divided by theirs."""

    def measure(found: Summaries, floors: dict[str, Floor], mix: str) -> float:
        return found[mix][ours][field] / found[mix][theirs][field]

    return measure


def share_of_floor(found: Summaries, floors: dict[str, Floor], mix: str) -> float:
    return found[mix][OURS]["tokens_per_second"] / floors[mix].floor


SPEED = "tokens_per_second"
GOALS = (
    Goal("tokens/s against vLLM at its best", 1.0, 1.3, ratio(SPEED, OURS, VLLM)),
    Goal("share of this machine's floor", 0.65, 0.8, share_of_floor),
    Goal("tokens/s without a compiler against vLLM", 0.75, 1.0, ratio(SPEED, TORCH, VLLM)),
    Goal("tokens/s against plain torch", 1.0, 1.5, ratio(SPEED, OURS, TORCH), (*MIXES, "alone")),
    Goal("tokens/s against transformers, static batches", 4.0, 6.0, ratio(SPEED, OURS, STATIC)),
    Goal("tokens/s against transformers, continuous", 2.5, 4.0, ratio(SPEED, OURS, CONTINUOUS)),
    Goal("one request alone, against vLLM", 1.2, 1.4, ratio(SPEED, OURS, VLLM), ("alone",)),
    Goal("one request alone, against transformers", 1.5, 2.0, ratio(SPEED, OURS, STATIC), ("alone",)),
    Goal("peak memory against vLLM", 0.5, 0.35, ratio("peak_mib", OURS, VLLM), MIXES, False),
    Goal("mean TTFT against vLLM", 1.0, 0.7, ratio("ttft_mean", OURS, VLLM), MIXES, False),
)


def goal_rows(found: Summaries, floors: dict[str, Floor]) -> list[dict[str, Any]]:
    """Each goal on each of its mixes: limits, figure, and whether each is met (None: not measured)."""
    rows = []
    for goal in GOALS:
        for mix in goal.mixes:
            row: dict[str, Any] = {"text": goal.text, "mix": mix, "at_least": goal.at_least, "aim": goal.aim}
            row |= {"higher_is_better": goal.higher_is_better, "measured": None, "met": None, "aim_met": None}
            try:
                value = goal.measure(found, floors, mix)
            except KeyError:
                rows.append(row)
                continue
            verdicts = {"met": goal.met(value, goal.at_least), "aim_met": goal.met(value, goal.aim)}
            rows.append(row | {"measured": value} | verdicts)
    return rows


def goal_cells(row: dict[str, Any]) -> list[str]:
    """Goal, mix, limit, aim, figure and verdict of a row, as words."""
    sign = "≥" if row["higher_is_better"] else "≤"
    limit, aim = (f"{sign} {row[key]:.2f}" for key in ("at_least", "aim"))
    if row["measured"] is None:
        return [row["text"], row["mix"], limit, aim, "-", "not measured"]
    verdict = "aim met" if row["aim_met"] else "met" if row["met"] else "not met"
    return [row["text"], row["mix"], limit, aim, f"{row['measured']:.2f}", verdict]
