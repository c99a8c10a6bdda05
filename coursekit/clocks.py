"""What a step of a running engine spends its time on, beside the same step without clocks.

On most CPUs with a C++ compiler all layers of the model are one call, in which there is no place for a clock.
So a watched step calls layer by layer, and `take_turns` sets it beside steps that run as usual.
"""

import time

import numpy as np
import torch

from coursekit.stopwatch import Stopwatch
from minipaged.cpu.backend import CpuBackend
from minipaged.engine import engine as engine_module
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM

PARTS = ["weights", "attention", "norms, rotary …", "head", "sampler", "scheduler", "bookkeeping"]
WAYS = {
    "as you run it": {"clocks": False, "fused": True},
    "layer by layer": {"clocks": False, "fused": False},
    "with clocks": {"clocks": True, "fused": False},
}


def put_clocks(watch: Stopwatch, engine: Engine) -> None:
    """Which call counts to which part."""
    model, runner = engine.runner.model, engine.runner
    watch.around(engine, "step", "bookkeeping")
    watch.around(engine.scheduler, "schedule", "scheduler")
    watch.around(runner, "forward", "norms, rotary …")
    watch.around(runner.builder, "build", "bookkeeping")
    for name in ("write_kv", "paged_attention"):
        watch.around(runner.backend, name, "attention")
    for name in ("compute_logits", "argmax_tokens"):  # the second needs no logits, for greedy rows
        watch.around(model, name, "head")
    watch.around(engine_module, "sample", "sampler")
    watch.around(runner, "greedy_tokens", "sampler")
    for name, module in model.named_modules():  # type: ignore[attr-defined]
        if name.endswith(("qkv_proj", "o_proj", "gate_up_proj", "down_proj")):
            watch.around(module, "forward", "weights")


def timed_step(engine: Engine, *, clocks: bool, fused: bool) -> tuple[float, dict[str, float]]:
    """One step: its seconds, and those of each part if there are clocks."""
    backend = engine.runner.backend
    if not fused and isinstance(backend, CpuBackend):
        engine.runner.backend = CpuBackend(fuses_layers=False)
    wait = torch.cuda.synchronize if engine.storage.key.is_cuda else None
    with Stopwatch(wait=wait) as watch:
        if clocks:
            put_clocks(watch, engine)
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
    engine.runner.backend = backend
    return seconds, watch.take()


def take_turns(llm: LLM, rounds: int = 8) -> tuple[dict[str, float], dict[str, float]]:
    """Decode steps in each of the ways, in turns: medians of the seconds, and of the parts."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    laps: list[dict[str, float]] = []
    while len(laps) < rounds:
        for way, how in WAYS.items():
            taken, lap = timed_step(llm.engine, **how)
            if not llm.trace[-1].prefill_tokens:
                seconds[way].append(taken)
                laps += [lap] if lap else []
    parts = {part: float(np.median([lap[part] for lap in laps])) for part in PARTS}
    return {way: float(np.median(taken)) for way, taken in seconds.items()}, parts
