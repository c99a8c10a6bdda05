"""What a step costs beside the model: planning, tables, sampling, stop checks and bookkeeping.

    python benchmarks/scheduler.py [--json out/scheduler.json] [--steps 200]

For 1, 64 and 1024 decoding requests on a model that computes nothing it prints the time of a step per running
request (median of many) and where it goes. Then 64 requests again with pools of 1e4 to 1e6 blocks: the time
must not depend on the pool. Last, 64 requests on SmolLM2 that stream their text: the share of a step that is
not the model, with sampling over the whole vocabulary and detokenisation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipaged import LLM, RequestOutputKind
from minipaged.attention.batch import AttentionBatch
from minipaged.config import CacheConfig, EngineConfig, ModelConfig
from minipaged.course.stopwatch import Stopwatch
from minipaged.engine import engine as engine_module
from minipaged.engine.engine import Engine
from minipaged.engine.sampling_params import SamplingParams

MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_query_heads=1,
    num_kv_heads=1,
    head_size=2,
    max_position_embeddings=8192,
)
GOAL = 5.0  # µs per running request and step
SHARE_GOAL = 0.02  # of a step of the real model
SUMS = ("step_us", "beside_us", "share")


class IdleModel:
    """Hands back logits that were made once."""

    config = MODEL

    def __init__(self, num_running: int) -> None:
        self.hidden = torch.zeros(520 * num_running, MODEL.hidden_size)  # room for all prompts in one step
        self.logits = torch.randn(num_running, MODEL.vocab_size, generator=torch.Generator().manual_seed(0))

    def __call__(self, token_ids: Tensor, batch: AttentionBatch, storage: Any, backend: Any) -> Tensor:
        return self.hidden[: batch.num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits[: len(hidden)]


def watch_parts(engine: Engine, watch: Stopwatch) -> None:
    """Put clocks around the parts of `Engine.step`."""
    watch.around(engine.scheduler, "schedule", "plan")
    watch.around(engine.runner.builder, "build", "batch")
    watch.around(engine_module, "sample", "sample")
    watch.around(engine, "_commit", "commit")
    watch.around(engine._recorder, "record", "record")
    watch.around(engine_module, "make_output", "output")


def decoding_engine(num_running: int, num_blocks: int, steps: int) -> Engine:
    """An engine in which `num_running` requests decode, each with a context of some 500 tokens."""
    cache = CacheConfig(num_blocks=num_blocks, dtype=torch.float32, block_size=16)
    limits = EngineConfig(max_model_len=8192, max_num_seqs=num_running, max_num_batched_tokens=1 << 20)
    engine = Engine(IdleModel(num_running), cache, limits)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=4 * steps + 100, ignore_eos=True, detokenize=False)
    for i in range(num_running):
        prompt = [(i * 7 + j) % 256 for j in range(480 + i % 40)]
        engine.add([engine.make_request(str(i), prompt, params)])
    for _ in range(20):
        engine.step()
    assert len(engine.scheduler.running) == num_running
    return engine


def time_steps(engine: Engine, steps: int) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(num_running: int, num_blocks: int, steps: int) -> dict[str, Any]:
    engine = decoding_engine(num_running, num_blocks, steps)
    seconds = time_steps(engine, steps)
    with Stopwatch() as watch:
        watch_parts(engine, watch)
        time_steps(engine, steps)
        taken = watch.take()
    parts = {name: total / steps * 1e6 / num_running for name, total in taken.items()}
    return {
        "running": num_running,
        "blocks": num_blocks,
        "step_us": seconds * 1e6,
        "us_per_request": seconds * 1e6 / num_running,
        "parts_us_per_request": parts,
    }


def beside_the_model(num_running: int, steps: int) -> dict[str, float]:
    """What is not the model in the steps of a real one, SmolLM2, whose requests all stream text.

    {"step_us", "beside_us", "share", and µs of each part}: sampling goes over its whole vocabulary.
    """
    llm = LLM("smollm2-135m", num_blocks=16 * num_running, max_num_seqs=num_running, max_model_len=1024)
    engine = llm.engine
    params = SamplingParams(
        temperature=0, max_tokens=steps + 30, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for i in range(num_running):
        engine.add_request(str(i), [7 + (i * 31 + j) % 1000 for j in range(48)], params)
    for _ in range(20):
        engine.step()
    with Stopwatch() as watch:
        watch_parts(engine, watch)
        watch.around(engine, "step", "rest")
        watch.around(engine.runner.model, "forward", "model")
        watch.around(engine.runner.model, "compute_logits", "model")
        time_steps(engine, steps)
        taken = watch.take()
    micros = {name: seconds / steps * 1e6 for name, seconds in taken.items()}
    step, model = sum(micros.values()), micros.pop("model")
    return {"step_us": step, "beside_us": step - model, "share": 1 - model / step, **micros}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the real model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    beside = beside_the_model(64, 40)
    torch.set_num_threads(1)
    results = [measure(running, 100 * running + 1000, args.steps) for running in (1, 64, 1024)]
    results += [measure(64, blocks, args.steps) for blocks in (10**4, 10**5, 10**6)]
    print(f"{'running':>8} {'blocks':>8} {'µs/step':>9} {'µs/request':>11}   of which µs/request")
    for result in results:
        parts = "  ".join(f"{name} {value:.2f}" for name, value in result["parts_us_per_request"].items())
        print(
            f"{result['running']:8d} {result['blocks']:8d} {result['step_us']:9.0f} "
            f"{result['us_per_request']:11.2f}   {parts}"
        )
    worst = max(r["us_per_request"] for r in results if r["running"] >= 64)
    print(f"goal: {GOAL} µs per running request at 64 and more; worst here {worst:.2f}")
    parts = "  ".join(f"{name} {beside[name]:.0f}" for name in beside if name not in SUMS)
    print(
        f"\n64 running on SmolLM2, text streamed: {beside['step_us']:.0f} µs/step, of it beside the model "
        f"{beside['beside_us']:.0f} = {beside['share']:.1%} (goal: {SHARE_GOAL:.0%})   of which {parts}"
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"idle_model": results, "smollm2": beside}, indent=1))


if __name__ == "__main__":
    main()
