"""Where the time of a decoding step goes: plain torch, packed weights, our own kernels, side by side.

    python benchmarks/profile_step.py              about a minute; writes out/benchmarks/profile.json
    python benchmarks/profile_step.py --record     recorded, and put into docs/profile.md

Three engines on the same model take turns in one process. A step is timed without clocks inside; a second
time with clocks around its parts, which gives the shares. A turn beside other work is taken again.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.quiet import FOREIGN_LIMIT, when_quiet
from coursekit.stopwatch import Stopwatch
from minipaged.attention import get_backend
from minipaged.checkpoints.loading import load_model
from minipaged.config import CacheConfig, EngineConfig
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.accelerate import accelerate
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.modules import CompiledLinear, CompiledRMSNorm
from minipaged.cpu.packing import PackedLinear, pack_weights
from minipaged.engine import engine as engine_module
from minipaged.engine.engine import Engine
from minipaged.model import llama
from minipaged.model.llama import MLP, Linear, RMSNorm
from minipaged.sampling_params import SamplingParams

PAGE = records.ROOT / "docs" / "profile.md"
BEGIN, END = "<!-- profile: written by benchmarks/profile_step.py -->", "<!-- end of profile -->"
VARIANTS = ("plain torch", "packed weights", "own kernels")
ROWS = (1, 32)
CONTEXT, WARM_STEPS, STEPS = 128, 4, 24  # tokens of each request's prompt; steps of one turn
PARTS = (
    "matrix products",
    "head",
    "norms",
    "rotation",
    "keys and values written",
    "attention",
    "gate of the MLP",
    "residual sums, views, calls",
    "sampling",
    "tables, scheduling, bookkeeping",
)


def new_engine(variant: str, dtype: torch.dtype) -> Engine:
    """An engine for SmolLM2 on the CPU, made of what the variant allows."""
    model, backend = load_model("smollm2-135m", dtype=dtype), get_backend("torch")
    if variant == "packed weights":
        pack_weights(model.model)
    elif variant == "own kernels":
        model, backend = accelerate(model, backend)
    return Engine(
        model.model,
        CacheConfig(num_blocks=1024, dtype=dtype, enable_prefix_caching=False),
        EngineConfig(max_model_len=512, max_num_batched_tokens=max(ROWS) * CONTEXT),
        tokenizer=model.tokenizer,
        backend=backend,
    )


def start_decoding(engine: Engine, rows: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=WARM_STEPS + 4 * STEPS, ignore_eos=True)
    for i in range(rows):
        engine.add_request(str(i), [7 + (i * 31 + j) % 1000 for j in range(CONTEXT)], params)
    for _ in range(1 + WARM_STEPS):
        engine.step()


def time_steps(engine: Engine) -> float:
    """Median seconds of a step."""
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def watch_parts(engine: Engine, watch: Stopwatch) -> None:
    """Put clocks around everything that `PARTS` names."""
    model: Any = engine.runner.model
    watch.around(engine, "step", "tables, scheduling, bookkeeping")
    watch.around(engine_module, "sample", "sampling")
    watch.around(engine.runner, "greedy_tokens", "sampling")
    watch.around(model, "forward", "residual sums, views, calls")
    for head in ("compute_logits", "argmax_tokens"):
        watch.around(model, head, "head")
    watch.around(model.rotary, "forward", "rotation")
    watch.around(llama, "rotate", "rotation")
    kernels = cpu_kernels.load()
    if kernels is not None:
        watch.around(kernels, "rotate", "rotation")
    watch.around(engine.runner.backend, "write_kv", "keys and values written")
    watch.around(engine.runner.backend, "paged_attention", "attention")
    for module in model.modules():
        if isinstance(module, RMSNorm | CompiledRMSNorm):
            watch.around(module, "forward", "norms")
        elif isinstance(module, Linear | PackedLinear | CompiledLinear) and module is not model.lm_head:
            watch.around(module, "forward", "matrix products")
        elif isinstance(module, MLP):
            watch.around(module, "forward", "gate of the MLP")


def measure(engine: Engine, rows: int) -> dict[str, Any]:
    """{"seconds": of a step, "one_by_one": of one that fuses no layers, "shares": of the latter's parts}.

    The clocks' own time is in the shares only.
    """
    start_decoding(engine, rows)
    seconds = time_steps(engine)
    backend = engine.runner.backend
    if isinstance(backend, CpuBackend):  # all layers in one call have no place for clocks
        engine.runner.backend = CpuBackend(fuses_layers=False)
    one_by_one = time_steps(engine)
    with Stopwatch() as watch:
        watch_parts(engine, watch)
        time_steps(engine)
        taken = watch.take()
    for request_id in list(engine.requests):
        engine.abort_request(request_id)
    engine.runner.backend = backend
    whole = sum(taken.values())
    return {
        "seconds": seconds,
        "one_by_one": one_by_one,
        "shares": {part: taken.get(part, 0.0) / whole for part in PARTS},
    }


def profile(repeat: int, limit: float, dtype: torch.dtype) -> dict[str, Any]:
    """Everything: for each number of rows and variant the turn of median length."""
    engines = {variant: new_engine(variant, dtype) for variant in VARIANTS}
    gc.freeze()
    rows: dict[str, dict[str, Any]] = {}
    for count in ROWS:
        turns: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for _ in range(repeat):
            for variant, engine in engines.items():
                turn, foreign = when_quiet(lambda e=engine, n=count: measure(e, n), limit)  # type: ignore[misc]
                turns[variant].append(turn | {"foreign_share": foreign})
        rows[str(count)] = {
            variant: sorted(taken, key=lambda turn: turn["seconds"])[len(taken) // 2]
            for variant, taken in turns.items()
        }
    settings = {"threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch.")}
    return settings | {"context": CONTEXT, "repeat": repeat, "foreign_limit": limit, "rows": rows}


def rows_of_table(result: dict[str, Any], count: str) -> list[list[str]]:
    """Milliseconds, and of the first and last variant percent of the step."""
    turns = result["rows"][count]
    before, after = VARIANTS[0], VARIANTS[-1]
    table = [["part of a step", *(f"{v}, ms" for v in VARIANTS), f"{before}, %", f"{after}, %"]]
    for part in (*PARTS, "whole step"):
        shares = {v: 1.0 if part == "whole step" else turns[v]["shares"][part] for v in VARIANTS}
        times = [f"{turns[v]['seconds'] * 1e3 * shares[v]:.2f}" if shares[v] else "–" for v in VARIANTS]
        table.append([part, *times, f"{shares[before]:.0%}", f"{shares[after]:.0%}"])
    return table


def render(result: dict[str, Any] | None) -> str:
    """The part of the page on one machine."""
    if result is None:
        return "Not recorded yet: it takes a quiet machine."
    machine = result["machine"]
    first, last = VARIANTS[0], VARIANTS[-1]
    lines = [
        f"{machine['processor']}, {result['threads']} threads, {result['dtype']}, torch "
        f"{machine['versions']['torch']}, {result['date'][:10]}; upper median of {result['repeat']} turns of "
        f"{STEPS} steps each; contexts of some {result['context'] + STEPS} tokens.",
    ]
    for count, turns in result["rows"].items():
        ratio = turns[first]["seconds"] / turns[last]["seconds"]
        rate = int(count) / turns[last]["seconds"]
        title = "One request" if count == "1" else f"{count} requests"
        lines += ["", f"### {title}", "", records.markdown(rows_of_table(result, count)), ""]
        lines += [f"{first} / {last}: {ratio:.2f} × as long a step; {rate:.0f} tokens a second now."]
        if "one_by_one" in turns[last]:  # recorded since 2026-12
            slower = turns[last]["one_by_one"] / turns[last]["seconds"]
            lines[-1] += f" With layers called one by one, as for the shares: {slower:.2f} × as long."
    return "\n".join(lines)


def render_all() -> str:
    """The block of the page: one part for each machine of which a profile is recorded."""
    found = [records.read("profile", folder) for folder in records.recorded_folders()]
    return "\n\n".join(map(render, filter(None, found))) or render(None)


def write_page(block: str, page: Path = PAGE) -> None:
    """Replace what stands between the two marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    records.add_argument(parser)
    parser.add_argument("--repeat", type=int, default=3, help="turns of each engine (default: 3)")
    parser.add_argument("--threads", type=int, default=len(psutil.Process().cpu_affinity()))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--foreign-limit", type=float, default=FOREIGN_LIMIT, help="share others may use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = profile(args.repeat, args.foreign_limit, getattr(torch, args.dtype))
    for count in result["rows"]:
        print(f"\n{count} running\n{records.table(rows_of_table(result, count))}")
    path = records.write("profile", result, {}, record=args.record)
    if args.record:
        write_page(render_all())
    print(f"\nwritten to {path.relative_to(records.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
