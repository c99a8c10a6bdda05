"""How the time of a decode step and its memory grow: with requests, with context, with the block size.

    python benchmarks/scaling.py                 about a minute on two cores

A step computes one token for each running request: block tables from a real pool, keys and values that are
there, the model, the head, the largest logit. Requests and context are fitted by a line a + b·x, the step
time of the block sizes by a line over their table entries; least squares. The residual is the root of the
mean squared distance to the line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import figures, records
from benchmarks.floor import ModelCost, Rates, measure_rates
from benchmarks.processes import MODEL, add_arguments, export_model, settings_from
from benchmarks.quiet import NotQuietError, when_quiet
from minipaged import LLM
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import BlockPool, BlockTable, KVStorage
from minipaged.checkpoints.hf_folder import read_config
from minipaged.core.runner import ModelRunner
from minipaged.memory import KVSpec

BLOCK_SIZE = 16
REQUESTS, AT_CONTEXT = (1, 2, 4, 8, 16, 32, 64, 96, 128), 256
CONTEXTS, AT_REQUESTS = (64, 512, 1024, 2048, 4096, 6144, 8192), 4
BLOCK_SIZES, AT_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (16, 512)  # requests, mean context
STEPS, LEAST_SECONDS = 5, 0.3
SEED = 0


def fit_line(x: list[float], y: list[float]) -> dict[str, float]:
    """Least squares: {"a", "b", "residual"} of y ≈ a + b·x; the residual has the unit of y."""
    if len(set(x)) < 2:
        raise ValueError(f"a line needs two different x, there are {len(set(x))}")
    b, a = np.polyfit(x, y, 1)
    return {"a": float(a), "b": float(b), "residual": float(np.sqrt(np.mean((a + b * np.array(x) - y) ** 2)))}


def fill_tables(contexts: list[int], block_size: int) -> tuple[BlockPool, list[BlockTable]]:
    """A pool that is just large enough and a table for each context; the blocks are dealt out in turns."""
    pool = BlockPool(sum(-(-context // block_size) for context in contexts))
    tables = [BlockTable(pool, block_size) for _ in contexts]
    for start in range(0, max(contexts), block_size):
        for table, context in zip(tables, contexts, strict=True):
            if start < context:
                table.append(min(block_size, context - start))
    return pool, tables


@torch.inference_mode()
def measure_step(runner: ModelRunner, contexts: list[int], block_size: int) -> dict[str, float]:
    """Median seconds of a step in which each request reads `context` keys, and what its memory is.

    `bytes`: of the blocks held; `entries`: of all block tables.
    """
    model, backend = runner.model, runner.backend
    pool, tables = fill_tables(contexts, block_size)
    spec = KVSpec.from_model(model.config, runner.storage.spec.dtype)
    storage = KVStorage(spec, pool.num_blocks, block_size)
    for tensor in (storage.key, storage.value):
        tensor.normal_(generator=torch.Generator().manual_seed(SEED))
    batch = AttentionBatch.build([t.blocks for t in tables], [1] * len(tables), contexts, block_size)
    token_ids = torch.arange(len(contexts))

    def step() -> None:
        model.compute_logits(model(token_ids, batch, storage, backend)).argmax(-1)

    held = pool.num_blocks - pool.num_free
    times = repeat_steps(step)
    return {
        "seconds": statistics.median(times),
        "bytes": held * spec.bytes_per_block(block_size),
        "entries": sum(len(table.blocks) for table in tables),
    }


def repeat_steps(step: Any) -> list[float]:
    """Seconds of each of several steps; the first, which warms up, is left out."""
    step()
    times: list[float] = []
    while len(times) < STEPS or sum(times) < LEAST_SECONDS:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def mixed_contexts(count: int, mean: int) -> list[int]:
    """Lengths around a mean, so that the last block of each request is filled differently."""
    return np.random.default_rng(SEED).integers(mean // 2, 3 * mean // 2, count).tolist()


def measure_series(runner: ModelRunner, foreign_limit: float) -> dict[str, dict[str, Any]]:
    """Points and fits of the three series, by name; a point without a quiet moment is left out."""
    requests, mean = AT_LENGTHS
    plans = {
        "requests": ("requests that run", f"context of {AT_CONTEXT}", "x", [
            (n, [AT_CONTEXT] * n, BLOCK_SIZE) for n in REQUESTS
        ]),
        "context": ("tokens of context", f"{AT_REQUESTS} requests", "x", [
            (context, [context] * AT_REQUESTS, BLOCK_SIZE) for context in CONTEXTS
        ]),
        "block size": ("block size (tokens)", f"{requests} requests, context about {mean}", "entries", [
            (size, mixed_contexts(requests, mean), size) for size in BLOCK_SIZES
        ]),
    }  # fmt: skip
    series = {}
    for name, (x_label, title, against, points) in plans.items():
        measured = []
        for x, contexts, block_size in points:
            try:
                point, share = when_quiet(partial(measure_step, runner, contexts, block_size), foreign_limit)
            except NotQuietError as error:
                print(f"  {name} {x}: {error}", file=sys.stderr)
                continue
            measured.append({"x": x, "foreign_share": share, **point})
        fits = {}
        for kind, key, along in (("step", "seconds", against), ("memory", "bytes", "x")):
            line = fit_line([point[along] for point in measured], [point[key] for point in measured])
            fits[kind] = {"against": along, **line}
        series[name] = {"title": title, "x_label": x_label, "points": measured, "fits": fits}
    return series


def explain(series: dict[str, dict[str, Any]], cost: ModelCost, spec: KVSpec, rates: Rates) -> list[str]:
    """What bandwidth and GFLOP/s predict beside each fit, in words with figures."""
    requests, context, size = (series[name]["fits"] for name in ("requests", "context", "block size"))
    reading, products = cost.step_seconds(1, 1, rates)
    token = spec.bytes_per_token / rates.bandwidth  # seconds to read its keys and values
    per_request, per_token = requests["step"]["b"], context["step"]["b"] / AT_REQUESTS
    slots = size["memory"]["b"] / AT_LENGTHS[0] / spec.bytes_per_token
    return [
        f"requests: a step takes {1e3 * requests['step']['a']:.1f} ms + {1e3 * per_request:.3f} ms for each. "
        f"{cost.weight_bytes / 1e6:.0f} MB of weights take {1e3 * reading:.1f} ms to read, the products of a "
        f"request {1e3 * products:.3f} ms, keys and values {1e3 * AT_CONTEXT * token:.3f} ms. It bends at "
        f"{cost.rows_at_the_bend(rates):.0f} requests: fewer multiply faster than the weights are read.",
        f"context: {1e9 * per_token:.0f} ns for each token of each request. Its {spec.bytes_per_token} bytes "
        f"of keys and values take {1e9 * token:.0f} ns to read: {token / per_token:.2f} of the bandwidth.",
        f"block size: {1e9 * size['step']['b']:.0f} ns for each entry of a block table. Each token of block "
        f"size costs each request {slots:.2f} slots; half of its last block on average would be 0.5.",
    ]


def series_rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    """A table of one series: a header, then a row for each point."""
    rows = [[name, "step (ms)", "KV (MiB)", "table entries"]]
    for point in found["points"]:
        step, held = f"{1e3 * point['seconds']:.2f}", f"{point['bytes'] / 2**20:.1f}"
        rows.append([str(point["x"]), step, held, str(point["entries"])])
    return rows


def fit_lines(name: str, found: dict[str, Any]) -> list[str]:
    """The fits of one series in words."""
    lines = []
    for kind, scale, unit in (("step", 1e3, "ms"), ("memory", 2**-20, "MiB")):
        fit = found["fits"][kind]
        a, b, residual = (round(scale * fit[key], 5) + 0.0 for key in ("a", "b", "residual"))  # never "-0"
        along = name if fit["against"] == "x" else "table entries"
        line = f"{a:.2f} {unit} + {b:.5f} {unit} × {along}, residual {residual:.2f} {unit}"
        lines.append(f"{kind} against {name}: {line}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    records.add_argument(parser)
    args = parser.parse_args()
    settings = settings_from(args)
    export_model()
    dtype = getattr(torch, settings.dtype)
    config = read_config(MODEL)
    torch.set_num_threads(settings.threads)
    rates = measure_rates(dtype, settings.threads)
    cost, spec = ModelCost.from_config(config, dtype), KVSpec.from_model(config, dtype)
    llm = LLM(MODEL, dtype=dtype, num_blocks=BLOCK_SIZE, max_model_len=BLOCK_SIZE)  # its cache is not used
    series = measure_series(llm.engine.runner, settings.foreign_limit)
    rates = rates.best_with(measure_rates(dtype, settings.threads))
    series["requests"]["bend"] = cost.rows_at_the_bend(rates)
    reasons = explain(series, cost, spec, rates)
    for name, found in series.items():
        print(records.table(series_rows(name, found)), *fit_lines(name, found), sep="\n", end="\n\n")
    print("\n".join(reasons))
    result = {
        "threads": settings.threads,
        "dtype": settings.dtype,
        "foreign_limit": settings.foreign_limit,
        "rates": asdict(rates),
        "series": series,
        "reasons": reasons,
    }
    path = records.write("scaling", result, {"scaling": figures.scaling(result)}, record=args.record)
    print(f"written to {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
