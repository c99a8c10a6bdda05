"""What a step costs beside the model: planning, tables, sampling, stop checks, text and bookkeeping.

    python benchmarks/scheduler.py               about a minute on two cores

First 64 requests on SmolLM2, once reported when they end and once streaming their text: the share of a step
that is not the model. The model reads all its weights in between, so nothing of the engine is in the
processor's caches when its turn comes. Then a model that computes nothing: the time of a step for each of 1,
64 and 1024 running requests, and for 64 requests with pools of 1e4 to 1e6 blocks. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import figures, records
from benchmarks.processes import add_arguments, settings_from
from benchmarks.quiet import when_quiet
from coursekit.stopwatch import Stopwatch
from minipaged import LLM, RequestOutputKind, SamplingParams
from minipaged.attention.batch import AttentionBatch
from minipaged.config import CacheConfig, EngineConfig, ModelConfig
from minipaged.engine import engine as engine_module
from minipaged.engine.engine import Engine

RUNNING, MANY = 64, 1024
POOLS = (10**4, 10**5, 10**6)
KINDS = {"at the end": RequestOutputKind.FINAL_ONLY, "streamed": RequestOutputKind.DELTA}
WARM_STEPS, STEPS = 20, 40  # of the real model
SHARE_GOAL, MICROS_GOAL = 0.02, 5.0  # of a step; µs for each running request
NOISE = 1.1  # two times that differ by less are the same
IDLE = ModelConfig(
    vocab_size=256,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_query_heads=1,
    num_kv_heads=1,
    head_size=2,
    max_position_embeddings=8192,
)


class IdleModel:
    """Hands back logits that were made once."""

    config = IDLE
    fuses_argmax = False

    def __init__(self, num_running: int) -> None:
        self.hidden = torch.zeros(520 * num_running, IDLE.hidden_size)  # room for all prompts in one step
        self.logits = torch.randn(num_running, IDLE.vocab_size, generator=torch.Generator().manual_seed(0))

    def __call__(self, token_ids: Tensor, batch: AttentionBatch, storage: Any, backend: Any) -> Tensor:
        return self.hidden[: batch.num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits[: len(hidden)]


def start_idle(num_running: int, num_blocks: int, steps: int) -> Engine:
    """An engine in which `num_running` requests decode, each with a context of some 500 tokens."""
    cache = CacheConfig(num_blocks=num_blocks, dtype=torch.float32, block_size=16)
    limits = EngineConfig(max_model_len=8192, max_num_seqs=num_running, max_num_batched_tokens=1 << 20)
    engine = Engine(IdleModel(num_running), cache, limits)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=4 * steps + 100, ignore_eos=True, detokenize=False)
    for i in range(num_running):
        prompt = [(i * 7 + j) % 256 for j in range(480 + i % 40)]
        engine.add([engine.make_request(str(i), prompt, params)])
    for _ in range(WARM_STEPS):
        engine.step()
    assert len(engine.scheduler.running) == num_running
    return engine


def measure_idle(num_running: int, num_blocks: int, steps: int) -> dict[str, Any]:
    """Median µs of a step and of each of its parts, a running request."""
    engine = start_idle(num_running, num_blocks, steps)
    whole = time_steps(engine, steps, with_parts=False)["rest"] / num_running
    parts = time_steps(engine, steps, with_parts=True)
    return {
        "running": num_running,
        "blocks": num_blocks,
        "us_per_request": whole,
        "parts": {name: micros / num_running for name, micros in parts.items()},
    }


def measure_beside(llm: LLM, kind: RequestOutputKind, num_running: int = RUNNING) -> dict[str, Any]:
    """Median µs of the model and of all that is beside it in a step, and of the parts of the latter.

    The parts are timed in a second run, since their clocks take some time too.
    """
    engine, steps = llm.engine, STEPS
    params = SamplingParams(
        temperature=0, max_tokens=2 * steps + WARM_STEPS, ignore_eos=True, output_kind=kind
    )
    for i in range(num_running):
        engine.add_request(str(i), [7 + (i * 31 + j) % 200 for j in range(48)], params)
    for _ in range(WARM_STEPS - 2):
        engine.step()
    assert len(engine.scheduler.running) == num_running
    whole = time_steps(engine, steps, with_parts=False)
    parts = time_steps(engine, steps, with_parts=True)
    while engine.has_unfinished_requests():
        engine.step()
    beside, model = whole["rest"], whole["model"]
    del parts["model"]
    return {"model_us": model, "beside_us": beside, "share": beside / (beside + model), "parts": parts}


def time_steps(engine: Engine, steps: int, *, with_parts: bool) -> dict[str, float]:
    """Median µs of a step in "model", in each part if they are asked for, and in "rest" what is left."""
    taken: dict[str, list[float]] = {}
    with Stopwatch() as watch:
        watch.around(engine, "step", "rest")
        if isinstance(engine.runner.model, torch.nn.Module):
            watch.around(engine.runner.model, "forward", "model")
            for head in ("compute_logits", "argmax_tokens"):
                watch.around(engine.runner.model, head, "model")
        if with_parts:
            watch_parts(engine, watch)
        for _ in range(steps):
            engine.step()
            for name, seconds in watch.take().items():
                taken.setdefault(name, []).append(1e6 * seconds)
    taken["rest"] = taken.pop("rest")  # to the end
    return {name: statistics.median(micros) for name, micros in taken.items()}


def watch_parts(engine: Engine, watch: Stopwatch) -> None:
    """Put clocks around the parts of `Engine.step`."""
    watch.around(engine.scheduler, "schedule", "planning")
    watch.around(engine.runner.builder, "build", "tables")
    watch.around(engine_module, "sample", "sampling")
    watch.around(engine.runner, "greedy_tokens", "sampling")
    watch.around(engine._recorder, "record", "records")
    watch.around(engine, "_commit", "new tokens")
    watch.around(engine._outputs, "find_ended", "new tokens")
    watch.around(engine._outputs, "make_outputs", "text and outputs")


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its limit, what was measured (larger is worse) and whether it is met."""
    by_size = {found["running"]: found["us_per_request"] for found in result["idle"]}
    pools = [found["us_per_request"] for found in result["pools"]]
    shares = [
        (f"share of a step at {RUNNING} requests, text {kind}", SHARE_GOAL, found["share"])
        for kind, found in result["smollm2"].items()
    ]
    others = [
        (f"µs a running request at {RUNNING}, idle model", MICROS_GOAL, by_size[RUNNING]),
        (f"linear: the same at {MANY} against {RUNNING}", NOISE, by_size[MANY] / by_size[RUNNING]),
        ("independent of the pool: slowest against fastest", NOISE, max(pools) / min(pools)),
    ]
    keys = ("text", "at_most", "measured", "met")
    return [dict(zip(keys, (*row, row[2] <= row[1]), strict=True)) for row in (*shares, *others)]


def beside_rows(result: dict[str, Any]) -> list[list[str]]:
    """A table of the real model: a header, then a row for each way of reporting; µs of a step."""
    names = list(result["smollm2"]["streamed"]["parts"])
    rows = [["text", "model (µs)", "beside it (µs)", *names]]
    for kind, found in result["smollm2"].items():
        parts = [f"{found['parts'].get(name, 0):.0f}" for name in names]
        rows.append([kind, f"{found['model_us']:.0f}", f"{found['beside_us']:.0f}", *parts])
    return rows


def idle_rows(result: dict[str, Any]) -> list[list[str]]:
    """A table of the idle model: µs of a step for each running request."""
    found = [*result["idle"], *result["pools"]]
    names = list(found[0]["parts"])
    rows = [["running", "blocks", "µs a request", *names]]
    for point in found:
        parts = [f"{point['parts'][name]:.2f}" for name in names]
        rows.append([str(point["running"]), str(point["blocks"]), f"{point['us_per_request']:.2f}", *parts])
    return rows


def goal_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = [["goal", "at most", "measured", "verdict"]]
    for goal in judge(result):
        limit, measured = (f"{goal[key]:.3g}" for key in ("at_most", "measured"))
        rows.append([goal["text"], limit, measured, "met" if goal["met"] else "not met"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of the idle model (default: 200)")
    add_arguments(parser)
    records.add_argument(parser)
    args = parser.parse_args()
    settings = settings_from(args)
    torch.set_num_threads(settings.threads)
    llm = LLM(
        "smollm2-135m", dtype=settings.dtype, num_blocks=16 * RUNNING, max_num_seqs=RUNNING, max_model_len=256
    )
    quiet = partial(when_quiet, limit=settings.foreign_limit)
    smollm2 = {name: quiet(partial(measure_beside, llm, kind)) for name, kind in KINDS.items()}
    torch.set_num_threads(1)
    idle = [quiet(partial(measure_idle, n, 100 * n + 1000, args.steps)) for n in (1, RUNNING, MANY)]
    pools = [quiet(partial(measure_idle, RUNNING, blocks, args.steps)) for blocks in POOLS]
    result = {
        "threads": settings.threads,
        "dtype": settings.dtype,
        "foreign_limit": settings.foreign_limit,
        "smollm2": {name: found | {"foreign_share": share} for name, (found, share) in smollm2.items()},
        "idle": [found | {"foreign_share": share} for found, share in idle],
        "pools": [found | {"foreign_share": share} for found, share in pools],
    }
    for rows in (beside_rows(result), idle_rows(result), goal_rows(result)):
        print(records.table(rows), end="\n\n")
    pictures = {"scheduler": figures.beside_the_model(result)}
    path = records.write("scheduler", result, pictures, record=args.record)
    print(f"written to {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
