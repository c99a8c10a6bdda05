"""What sharing a system prompt does to the time to first token, on against off in one run.

    python benchmarks/prefix_sharing.py          about half a minute on two cores

32 requests with the same system prompt of 512 tokens and a question of their own arrive at once, three times:
    off     nothing is shared: every request computes the prompt
    cold    sharing on, the cache empty: the first computes it, the others read it in the same step
    warm    sharing on, the prompt was served before, with other questions
While all of them run, the pool is asked how many blocks it has given out, and the tables which ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import figures, records
from benchmarks.mixes import Mix, mix_of
from benchmarks.processes import MODEL, add_arguments, export_model, settings_from
from benchmarks.quiet import when_quiet
from minipaged import LLM, SamplingParams
from minipaged.engine.engine import Engine

REQUESTS, SYSTEM_PROMPT, QUESTION, OUTPUT = 32, 512, 24, 48  # so long that all run at once for a while
KV_BYTES, MAX_LEN = 1 << 29, 1024
GOAL = 5.0  # times better mean TTFT
RUNS = ("off", "cold", "warm")


def shared_mixes() -> tuple[Mix, Mix]:
    """Two mixes whose requests all begin with the same tokens; no question is asked twice."""
    (system,) = mix_of([SYSTEM_PROMPT], [OUTPUT])
    questions = mix_of([QUESTION] * 2 * REQUESTS, [OUTPUT] * 2 * REQUESTS)
    prefix = system["prompt_token_ids"]
    requests = [q | {"prompt_token_ids": prefix + q["prompt_token_ids"]} for q in questions]
    return requests[:REQUESTS], requests[REQUESTS:]


def serve(llm: LLM, mix: Mix) -> dict[str, Any]:
    """TTFT of each request in seconds, and of the last step in which all ran: what `count_blocks` says."""
    engine, found = llm.engine, {}

    def look(plan: object) -> None:
        if len(engine.scheduler.running) == len(mix):
            found.update(count_blocks(engine))

    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in mix]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in mix]
    engine.on_step = look
    outputs = llm.generate(prompts, params, use_tqdm=False)
    engine.on_step = None
    ttft = [output.metrics.ttft for output in outputs]
    return {"ttft": ttft, "ttft_mean": statistics.mean(ttft), **found}


def count_blocks(engine: Engine) -> dict[str, int]:
    """Entries of all block tables, blocks that the pool has given out, and copies of the system prompt.

    Raises AssertionError if a block that several tables share is counted more than once.
    """
    tables = [request.table for request in engine.scheduler.running]
    held = engine.pool.num_blocks - engine.pool.num_free
    different = {block for table in tables for block in table.blocks}
    assert held == len(different), f"the pool has given out {held} blocks, the tables hold {len(different)}"
    return {
        "entries": sum(len(table.blocks) for table in tables),
        "blocks": held,
        "prompt_copies": len({table.blocks[0] for table in tables}),
    }


def compare(sharing_off: LLM, sharing_on: LLM) -> dict[str, dict[str, Any]]:
    """One run of each kind. Raises AssertionError if with sharing the prompt is there more than once."""
    first, second = shared_mixes()
    sharing_on.reset_prefix_cache()
    runs = [serve(sharing_off, first), serve(sharing_on, first), serve(sharing_on, second)]
    copies = [run["prompt_copies"] for run in runs]
    assert copies == [REQUESTS, 1, 1], f"copies of the system prompt: {copies}"
    return dict(zip(RUNS, runs, strict=True))


def summarise(samples: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The sample with the median mean TTFT of each kind, and how many times better than `off` it is."""
    runs = {}
    for name in RUNS:
        ordered = sorted((sample[name] for sample in samples), key=lambda run: run["ttft_mean"])
        runs[name] = dict(ordered[len(ordered) // 2])
    for run in runs.values():
        run["times_better"] = runs["off"]["ttft_mean"] / run["ttft_mean"]
    return runs


def rows(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A table: a header, then a row for each kind of run."""
    table = [["sharing", "mean TTFT (s)", "times better", "goal", "table entries", "blocks", "prompt copies"]]
    for name, run in runs.items():
        better = run["times_better"]
        verdict = "-" if name == "off" else f"≥ {GOAL:.0f}, {'met' if better >= GOAL else 'not met'}"
        counts = [str(run[key]) for key in ("entries", "blocks", "prompt_copies")]
        table.append([name, f"{run['ttft_mean']:.2f}", f"{better:.1f} ×", verdict, *counts])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs; medians are told (default: 3)")
    add_arguments(parser)
    records.add_argument(parser)
    args = parser.parse_args()
    settings = settings_from(args)
    export_model()
    torch.set_num_threads(settings.threads)
    engines = [
        LLM(MODEL, dtype=settings.dtype, kv_memory=KV_BYTES, max_model_len=MAX_LEN, enable_prefix_caching=on)
        for on in (False, True)
    ]
    compare(*engines)  # warms up
    samples = [when_quiet(lambda: compare(*engines), settings.foreign_limit) for _ in range(args.repeat)]
    runs = summarise([sample for sample, _ in samples])
    print(records.table(rows(runs)))
    result = {
        "threads": settings.threads,
        "dtype": settings.dtype,
        "foreign_limit": settings.foreign_limit,
        "foreign_shares": [share for _, share in samples],
        "runs": runs,
    }
    pictures = {"prefix_sharing": figures.prefix_sharing(result)}
    path = records.write("prefix_sharing", result, pictures, record=args.record)
    print(f"written to {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
