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
class Run:
    """What a run has shown, and what was recorded on such a machine before; empty: nothing was."""

    found: Summaries
    floors: dict[str, Floor]
    recorded: Summaries


Measure = Callable[[Run, str], float]


@dataclass(frozen=True)
class Goal:
    """`measure` gives the figure for one mix, or raises KeyError where a side of it was not measured."""

    text: str
    at_least: float
    aim: float
    measure: Measure
    mixes: tuple[str, ...] = MIXES
    higher_is_better: bool = True

    def met(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher_is_better else value <= limit


def ratio(field: str, ours: str, theirs: str) -> Measure:
    """Ours divided by theirs."""

    def measure(run: Run, mix: str) -> float:
        return run.found[mix][ours][field] / run.found[mix][theirs][field]

    return measure


SPEED = "tokens_per_second"


def share_of_floor(run: Run, mix: str) -> float:
    return run.found[mix][OURS][SPEED] / run.floors[mix].floor


def share_of_record(run: Run, mix: str) -> float:
    """Our lead over vLLM, as a share of the recorded one: both sides had the machine of their day."""
    now, then = (mixes[mix][OURS][SPEED] / mixes[mix][VLLM][SPEED] for mixes in (run.found, run.recorded))
    return now / then


# Limits hold on every kind of machine.
GOALS = (
    Goal("tokens/s against vLLM at its best", 1.6, 2.0, ratio(SPEED, OURS, VLLM)),
    Goal("the same against this machine's record", 0.98, 1.0, share_of_record),
    Goal("share of this machine's floor", 0.75, 0.9, share_of_floor, ("chat48",)),
    Goal("share of this machine's floor", 0.65, 0.9, share_of_floor, ("instruct64",)),
    Goal("tokens/s without a compiler against vLLM", 0.75, 1.0, ratio(SPEED, TORCH, VLLM)),
    Goal("tokens/s against plain torch", 1.0, 1.5, ratio(SPEED, OURS, TORCH), (*MIXES, "alone")),
    Goal("tokens/s against transformers, static batches", 4.0, 6.0, ratio(SPEED, OURS, STATIC)),
    Goal("tokens/s against transformers, continuous", 2.5, 4.0, ratio(SPEED, OURS, CONTINUOUS)),
    Goal("one request alone, against vLLM", 2.0, 2.5, ratio(SPEED, OURS, VLLM), ("alone",)),
    Goal("one request alone, against transformers", 1.5, 2.0, ratio(SPEED, OURS, STATIC), ("alone",)),
    Goal("peak memory against vLLM", 0.5, 0.35, ratio("peak_mib", OURS, VLLM), MIXES, False),
    Goal("mean TTFT against vLLM", 1.0, 0.7, ratio("ttft_mean", OURS, VLLM), MIXES, False),
)


def goal_rows(
    found: Summaries, floors: dict[str, Floor], recorded: Summaries | None = None
) -> list[dict[str, Any]]:
    """Each goal on each of its mixes: limits, figure, and whether each is met (None: not measured)."""
    run, rows = Run(found, floors, recorded or {}), []
    for goal in GOALS:
        for mix in goal.mixes:
            row: dict[str, Any] = {"text": goal.text, "mix": mix, "at_least": goal.at_least, "aim": goal.aim}
            row |= {"higher_is_better": goal.higher_is_better, "measured": None, "met": None, "aim_met": None}
            try:
                value = goal.measure(run, mix)
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
