"""Answer a file of prompts: JSON lines in, JSON lines out, on one engine or on many.

    minipaged batch prompts.jsonl answers.jsonl
    minipaged batch prompts.jsonl answers.jsonl --temperature 0.8 --seed 1
    minipaged batch prompts.jsonl answers.jsonl --workers 8      # through Ray, on this machine or a cluster

A line of the input is an object with an id of its own and one of prompt, messages and prompt_token_ids; it
may say how its tokens are chosen, with the names of vLLM's SamplingParams:

    {"id": "a", "prompt": "The sky is", "max_tokens": 20}
    {"id": "b", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0.8}

A line of the output has the number and the id of its line of the input, and either "outputs" (text,
token_ids, finish_reason of each sample) or "error". Results come as they finish; sort by "line" for the order
of the input.

Stopped or killed, the job goes on where it was when the same command is given again: every line is answered
once. An answer does not depend on what else was in the batch: a line without a seed gets one made from its
id, and in --dtype float32 the tokens are the same on one worker and on many.

The last line on stderr counts lines, errors and tokens. The exit code is 1 when a line has an error.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.commands import CommandError, in_words
from minipaged.commands.serving import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_settings,
    refusals,
    require_model_memory,
    sampling_settings,
    shows_progress,
)
from minipaged.engine.args import EngineArgs

if TYPE_CHECKING:
    from minipaged.jobs.batch import Serve, Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN.jsonl", help="the prompts")
    parser.add_argument(
        "target", type=Path, metavar="OUT.jsonl", help="output file; an existing one is resumed"
    )
    parser.add_argument(
        "--chunk", type=_positive, default=32, metavar="N", help="write N results at once (default 32)"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object, no bar")
    cluster = parser.add_argument_group("many engines, through Ray (make scale)")
    cluster.add_argument(
        "--workers", type=_positive, metavar="N", help="engines, each with a whole model; a GPU or core each"
    )
    cluster.add_argument(
        "--address", help='a Ray cluster that runs, or "auto" (default: RAY_ADDRESS, or one started here)'
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def run(args: argparse.Namespace) -> int:
    require_model_memory(args)
    from minipaged.jobs.batch import JobError, run_job

    start = time.perf_counter()
    try:
        # Ray tells of workers that died on stdout, which belongs to --json.
        with refusals(), redirect_stdout(sys.stderr), progress_bar(args) as on_progress:
            summary = run_job(
                args.source,
                args.target,
                server(args),
                job_settings(args),
                chunk=args.chunk,
                on_progress=on_progress,
            )
    except OSError as error:  # a full disk, a folder that is not ours, no cluster there
        raise CommandError(in_words(error, args.target)) from error
    except JobError as error:  # a worker that cannot start
        raise CommandError(str(error)) from error
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps(asdict(summary) | {"seconds": seconds}))
    else:
        print(describe(summary, seconds, args.target), file=sys.stderr)
    return 1 if summary.failed else 0


def job_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the answers depend on besides the lines. Memory and device are left free to change."""
    sampling = sampling_settings(args)
    seed = sampling.pop("seed") or 0
    engine = {name: getattr(args, name) for name in ("model", "dtype", "max_model_len")}
    return {"engine": engine, "sampling": sampling, "seed": seed}


def server(args: argparse.Namespace) -> "Serve":
    """An engine in this process, or a pool of them; loaded when the first task comes."""
    engine_args = EngineArgs(**engine_settings(args))
    if args.workers is None:
        if args.address is not None:
            raise CommandError("--address needs --workers: how many engines?")
        from minipaged.jobs.worker import serve_here

        return partial(serve_here, engine_args=engine_args)
    from minipaged.jobs.cluster import serve_on_ray

    return partial(
        serve_on_ray,
        engine_args=engine_args,
        num_workers=args.workers,
        address=args.address,
        batch_size=max(args.chunk, 64),
    )


@contextmanager
def progress_bar(args: argparse.Namespace) -> Iterator[Any]:
    """Something to call with (lines done, lines in all, output tokens)."""
    if not shows_progress(args):
        yield lambda done, total, tokens: None
        return
    from tqdm import tqdm

    with tqdm(desc="Lines", unit="line") as bar:

        def show(done: int, total: int, tokens: int) -> None:
            bar.total = total
            bar.set_postfix_str(f"{tokens} tokens", refresh=False)
            bar.update(done - bar.n)

        yield show


def describe(summary: "Summary", seconds: float, target: Path) -> str:
    """The counts for people."""
    parts = [f"{summary.lines} lines"]
    if summary.before:
        parts.append(f"{summary.before} done before")
    parts.append(f"{summary.answered} answered now")
    if summary.failed:
        parts.append(f"{summary.failed} with an error, see {target}")
    tokens = f"{summary.prompt_tokens} + {summary.output_tokens} tokens in {seconds:.1f} s"
    return f"[{', '.join(parts)}; {tokens}]"
