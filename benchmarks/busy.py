"""One fixed job beside programs that keep the processors busy: its wall time and its processor seconds.

    python benchmarks/busy.py                     some three minutes on two cores
    python benchmarks/busy.py --loops 0,4 --engines minipaged,vllm

A laptop with a video call and a class on one server are like that. Threads that wait for each other may burn
the time of the one they wait for: then the same job costs many times the processor seconds, and neighbours
lose as much. The loops are Python processes that only count. Engines run as installed, nothing is preloaded;
"minipaged-spinning" is ours with OpenMP's own way of waiting, which minipaged/threads.py changes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.goals import goal_cells
from benchmarks.mixes import mix_of
from benchmarks.processes import (
    RunningEngine,
    add_arguments,
    export_model,
    installed,
    settings_from,
    started,
)
from benchmarks.quiet import NotQuietError

OURS, SPINNING = "minipaged", "minipaged-spinning"
DEFAULT = (OURS, SPINNING, "vllm", "transformers-cb")
REQUESTS, PROMPT, ANSWER = 16, 64, 16  # of the job: requests, tokens of each

Found = dict[str, dict[int, dict[str, float]]]
"""engine -> busy loops -> medians: "seconds" of wall time, "cpu_seconds"."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that count as fast as they can."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(running: dict[str, RunningEngine], loops: list[int], repeat: int) -> Found:
    """Engines take turns within each number of loops; 0 of them needs a quiet machine."""
    job = mix_of([PROMPT] * REQUESTS, [ANSWER] * REQUESTS)
    found: Found = {name: {} for name in running}
    for count in loops:
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        with busy_loops(count):
            for _ in range(repeat):
                for name, engine in running.items():
                    try:
                        sample = engine.serve(job) if count else engine.sample("quiet", job)
                    except NotQuietError as error:
                        print(f"  {name}: no sample in this round: {error}", file=sys.stderr)
                        continue
                    samples[name].append(sample)
                    wall, cpu = sample["seconds"], sample["cpu_seconds"]
                    print(f"  {name} beside {count}: {wall:.2f} s, {cpu:.2f} s CPU", file=sys.stderr)
        for name, taken in samples.items():
            if taken:
                found[name][count] = {
                    key: statistics.median(sample[key] for sample in taken)
                    for key in ("seconds", "cpu_seconds")
                }
    return found


def rows(found: Found) -> list[list[str]]:
    """A table: a header, then a row for each engine and number of loops. Times are against the quiet ones."""
    table = [["engine", "busy loops", "wall (s)", "against quiet", "CPU (s)", "against quiet"]]
    for name, by_loops in found.items():
        for count, times in by_loops.items():
            cells = [name, str(count)]
            for key in ("seconds", "cpu_seconds"):
                against = f"{times[key] / by_loops[0][key]:.2f} ×" if 0 in by_loops else "-"
                cells += [f"{times[key]:.2f}", against]
            table.append(cells)
    return table


def goals(found: Found) -> list[dict[str, Any]]:
    """What neighbours may cost us and we them; `measured` is None where a side of it is missing."""
    ours, spinning = found.get(OURS, {}), found.get(SPINNING, {})
    cpu = ours[4]["cpu_seconds"] / ours[0]["cpu_seconds"] if {0, 4} <= set(ours) else None
    price = ours[0]["seconds"] / spinning[0]["seconds"] if 0 in ours and 0 in spinning else None
    return [
        {
            "text": text, "mix": mix, "at_least": limit, "aim": aim, "higher_is_better": False,
            "measured": value,
            "met": None if value is None else value <= limit,
            "aim_met": None if value is None else value <= aim,
        }
        for text, mix, limit, aim, value in (
            ("CPU seconds against quiet", "4 busy loops", 1.3, 1.1, cpu),
            ("wall time against spinning", "quiet", 1.02, 1.0, price),
        )
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(DEFAULT), help="comma-separated")
    parser.add_argument("--loops", default="0,2,4", help="comma-separated numbers of busy loops")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the median counts (default: 3)")
    add_arguments(parser)
    records.add_argument(parser)
    args = parser.parse_args()
    settings = replace(settings_from(args), preloads=())
    engines = installed(args.engines.split(","))
    export_model()
    with started(engines, settings) as running:
        found = measure(running, [int(count) for count in args.loops.split(",")], args.repeat)
    result = {
        "threads": settings.threads,
        "dtype": settings.dtype,
        "foreign_limit": settings.foreign_limit,
        "job": {"requests": REQUESTS, "prompt_tokens": PROMPT, "answer_tokens": ANSWER},
        "goals": goals(found),
        "engines": found,
    }
    print(records.table(rows(found)), end="\n\n")
    header = ["goal", "when", "at least", "aim", "measured", ""]
    print(records.table([header, *map(goal_cells, result["goals"])]))
    path = records.write("busy", result, {}, record=args.record)
    print(f"written to {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
