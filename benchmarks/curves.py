"""How the lead over transformers grows: with the spread of output lengths, and with requests × context.

    python benchmarks/curves.py                 both curves, about two minutes on two cores
    python benchmarks/curves.py --repeat 3

A static batch runs until its longest answer is done, so what it wastes grows with the spread of the lengths.
transformers' continuous batching multiplies every query of a step with the keys of all requests and masks
what is not its own, so what it wastes grows with requests × context.

The mixes are made from a seed. Engines take turns in one run, as in throughput.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import figures, records
from benchmarks.goals import CONTINUOUS, OURS, STATIC
from benchmarks.mixes import Mix, mix_of, spread_lengths
from benchmarks.processes import (
    RunningEngine,
    add_arguments,
    export_model,
    installed,
    settings_from,
    started,
)
from benchmarks.quiet import NotQuietError

BATCH = 16  # of the static batches
SPREADS = (0.0, 0.4, 0.8, 1.2)  # standard deviation of the logarithm of a length
REQUESTS, PROMPT, MEAN_OUTPUT = 32, 32, 24
SHAPES = ((4, 64), (8, 128), (16, 128), (16, 256), (24, 256))  # requests, tokens of context each
OUTPUT = 32


def static_mixes() -> list[tuple[float, Mix]]:
    """(steps of the static batches for a token of each request, mix), the same number of tokens in each."""
    mixes = []
    for spread in SPREADS:
        lengths = spread_lengths(REQUESTS, MEAN_OUTPUT, spread)
        mixes.append((longest_over_mean(lengths), mix_of([PROMPT] * REQUESTS, lengths)))
    return mixes


def longest_over_mean(lengths: list[int]) -> float:
    """Steps that batches in arrival order take, divided by those they would take if all were equally long."""
    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
    return sum(map(max, batches)) / sum(map(statistics.mean, batches))


def continuous_mixes() -> list[tuple[float, Mix]]:
    """(requests × tokens of context halfway through the answers, mix)."""
    return [
        (count * context, mix_of([context - OUTPUT // 2] * count, [OUTPUT] * count))
        for count, context in SHAPES
    ]


def measure(
    ours: RunningEngine, theirs: RunningEngine, mixes: list[tuple[float, Mix]], repeat: int
) -> list[dict[str, Any]]:
    """One point for each mix: x, the ratio of the two median rates, and the rates in tokens per second.

    A point for which the machine was never quiet is named on stderr and left out.
    """
    rates: list[dict[str, list[float]]] = [{"ours": [], "theirs": []} for _ in mixes]
    for _ in range(repeat):
        for (x, mix), taken in zip(mixes, rates, strict=True):
            for side, engine in (("ours", ours), ("theirs", theirs)):
                try:
                    result = engine.sample(f"at {x:.3g}", mix)
                except NotQuietError as error:
                    print(f"  at {x:.3g}: {error}", file=sys.stderr)
                    continue
                taken[side].append(result["output_tokens"] / result["seconds"])
    return [
        {"x": x, "ratio": statistics.median(taken["ours"]) / statistics.median(taken["theirs"]), **taken}
        for (x, _), taken in zip(mixes, rates, strict=True)
        if taken["ours"] and taken["theirs"]
    ]


CURVES = {
    "static": (STATIC, static_mixes, "longest / mean"),
    "continuous": (CONTINUOUS, continuous_mixes, "requests × context"),
}


def rows(result: dict[str, Any], curve: str) -> list[list[str]]:
    """A table of one curve: a header, then a row for each point."""
    theirs, _, x_label = CURVES[curve]
    table = [[x_label, "minipaged, tokens/s", f"{theirs}, tokens/s", "ratio"]]
    for point in result[curve]:
        ours, other = (f"{statistics.median(point[side]):.0f}" for side in ("ours", "theirs"))
        x = f"{point['x']:.0f}" if point["x"] >= 100 else f"{point['x']:.2g}"  # tokens, or a ratio
        table.append([x, ours, other, f"{point['ratio']:.2f} ×"])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=1, help="samples of each point (default: 1)")
    parser.add_argument("--points", type=int, help="only so many of each curve, for a try")
    add_arguments(parser)
    records.add_argument(parser)
    args = parser.parse_args()
    settings = settings_from(args)
    export_model()
    result: dict[str, Any] = {
        "threads": settings.threads,
        "dtype": settings.dtype,
        "foreign_limit": settings.foreign_limit,
    }
    with started(installed([OURS, STATIC, CONTINUOUS]), settings) as running:
        for curve, (theirs, mixes, _) in CURVES.items():
            result[curve] = measure(running[OURS], running[theirs], mixes()[: args.points], args.repeat)
            print(records.table(rows(result, curve)), end="\n\n", flush=True)
    path = records.write("curves", result, {"curves": figures.curves(result)}, record=args.record)
    print(f"written to {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
