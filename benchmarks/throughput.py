"""Every engine on the same requests, side by side in one run: output tokens per second, TTFT, TPOT, memory.

    python benchmarks/throughput.py                        what is installed, three mixes
    python benchmarks/throughput.py --engines minipaged,vllm --mix chat48 --repeat 5
    make peers                                             installs vLLM's CPU build in .peers/

Each engine is a process of its own under its own interpreter. They are loaded once and take turns; whoever
does not serve is stopped. All requests of a mix arrive at once and run to their exact length. A sample during
which other processes used more than 10 % of the processors is thrown away and taken again. The machine's
bandwidth and GFLOP/s are measured before and after, and from the better figures the least time of a mix.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import figures, records
from benchmarks.floor import ModelCost, floor_of, measure_rates
from benchmarks.goals import OURS, Summaries, goal_cells, goal_rows
from benchmarks.mixes import Mix, named_mix
from benchmarks.processes import (
    ENGINES,
    MODEL,
    RunningEngine,
    add_arguments,
    export_model,
    installed,
    settings_from,
    started,
)
from benchmarks.quiet import NotQuietError
from minipaged.checkpoints.hf_folder import read_config

DEFAULT = ("minipaged", "minipaged-torch", "vllm", "transformers", "transformers-cb")


def take_samples(running: dict[str, RunningEngine], mixes: dict[str, Mix], repeat: int) -> Summaries:
    """mix -> engine -> summary. Engines take turns; one that fails is named on stderr and left out."""
    samples: dict[str, dict[str, list[dict]]] = {mix: {name: [] for name in running} for mix in mixes}
    alive = dict(running)
    for round_ in range(repeat):
        for name, engine in list(alive.items()):
            if round_ % engine.engine.every:
                continue
            for mix, requests in mixes.items():
                try:
                    samples[mix][name].append(engine.sample(mix, requests))
                except NotQuietError as error:
                    print(f"  {name}, {mix}: no sample in this round: {error}", file=sys.stderr)
                except RuntimeError as error:
                    print(f"  {name} is left out from now on: {error}", file=sys.stderr)
                    del alive[name]
                    break
        print(f"round {round_ + 1} of {repeat} is done", file=sys.stderr)
    return {
        mix: {name: summarise(taken) for name, taken in engines.items() if taken}
        for mix, engines in samples.items()
    }


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the samples, the slowest and the fastest rate, and the samples themselves."""
    rates = [sample["output_tokens"] / sample["seconds"] for sample in samples]
    medians = {key: statistics.median(s[key] for s in samples) for key in ("ttft_mean", "peak_mib")}
    tpot = [sample["tpot_mean"] for sample in samples if sample["tpot_mean"] is not None]
    return {
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        **medians,
        "tpot_mean": statistics.median(tpot) if tpot else None,
        "samples": samples,
    }


HEADER = ["tokens/s", "spread", "TTFT (s)", "TPOT (ms)", "peak MiB", "ours / this"]


def mix_rows(mix: str, engines: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A table of one mix: a header, then a row for each engine."""
    rows = [[mix, *HEADER]]
    for name, found in engines.items():
        rate = found["tokens_per_second"]
        against = f"{engines[OURS]['tokens_per_second'] / rate:.2f} ×" if OURS in engines else "-"
        tpot = "-" if found["tpot_mean"] is None else f"{1000 * found['tpot_mean']:.1f}"
        spread = f"{found['spread'][0]:.0f} – {found['spread'][1]:.0f}"
        peak = f"{found['peak_mib']:.0f}"
        rows.append([name, f"{rate:.0f}", spread, f"{found['ttft_mean']:.2f}", tpot, peak, against])
    return rows


def floor_line(result: dict[str, Any], mix: str) -> str:
    """The floor of a mix in words, and our share of it."""
    bandwidth, operations = (result["rates"][key] / 1e9 for key in ("bandwidth", "operations"))
    floor = result["floors"][mix]
    found = result["mixes"][mix].get(OURS)
    text = (
        f"{mix}: at {bandwidth:.0f} GB/s and {operations:.0f} GFLOP/s the floor is "
        f"{floor['floor']:.0f} tokens/s, {floor['overlapped']:.0f} if reading hides behind multiplying"
    )
    if found is None:
        return text
    shares = (found["tokens_per_second"] / floor[key] for key in ("floor", "overlapped"))
    return f"{text}; minipaged reaches {' and '.join(f'{share:.2f}' for share in shares)} of them"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(ENGINES)
    parser.add_argument("--engines", default=",".join(DEFAULT), help=f"comma-separated, of {names}")
    parser.add_argument("--mix", default="chat48,instruct64,alone", help="comma-separated")
    parser.add_argument("--requests", type=int, help="only so many of each mix, for a try")
    parser.add_argument(
        "--repeat", type=int, default=3, help="rounds; transformers in every second (default: 3)"
    )
    add_arguments(parser)
    records.add_argument(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    settings = settings_from(args)
    mixes = {name: named_mix(name)[: args.requests] for name in args.mix.split(",")}
    engines = installed(args.engines.split(","))
    export_model()
    dtype = getattr(torch, settings.dtype)
    cost = ModelCost.from_config(read_config(MODEL), dtype)
    rates = measure_rates(dtype, settings.threads)
    with started(engines, settings) as running:
        found = take_samples(running, mixes, args.repeat)
    rates = rates.best_with(measure_rates(dtype, settings.threads))
    floors = {name: floor_of(mix, cost, rates) for name, mix in mixes.items()}
    before = records.read("throughput", records.machine_folder())
    result = {
        "threads": settings.threads,
        "dtype": settings.dtype,
        "preloads": [Path(path).name for path in settings.preloads],
        "foreign_limit": settings.foreign_limit,
        "rates": asdict(rates),
        "floors": {name: asdict(floor) for name, floor in floors.items()},
        "goals": goal_rows(found, floors, (before or {}).get("mixes")),
        "mixes": found,
    }
    for mix, engines_found in found.items():
        print(records.table(mix_rows(mix, engines_found)), floor_line(result, mix), sep="\n", end="\n\n")
    header = ["goal", "mix", "at least", "aim", "measured", ""]
    print(records.table([header, *map(goal_cells, result["goals"])]))
    path = records.write("throughput", result, {"throughput": figures.throughput(result)}, record=args.record)
    print(f"written to {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
