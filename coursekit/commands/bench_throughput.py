"""Serve a mix of requests as fast as this machine can, and say how fast that was.

    minipaged bench throughput
    minipaged bench throughput --mix instruct64 --kv-memory 16MiB
    minipaged bench throughput --block-size 512        # contiguous: each request reserves a strip of 512

All requests arrive at once, each runs to its own length, greedily. What the figures mean:

    output tokens/s   tokens generated for all requests together, per second of the whole run
    total tokens/s    the same with the tokens of the prompts, which are computed in fewer, larger steps
    time to first     seconds from arrival to a request's first token; waiting for room counts
    time per token    seconds between two tokens of one request; more requests at once make it longer
    at once           requests in a step: the mean, and the most
    memory            share of the KV memory reserved for requests, and of what is reserved, what holds tokens

A machine that is busy with other things makes every time longer; a share of more than a tenth is reported. To
compare with other engines on the same requests, run `make bench`.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from minipaged.commands.serving import (
    add_engine_arguments,
    engine_settings,
    refusals,
    require_model_memory,
    shows_progress,
)
from minipaged.engine.args import EngineArgs

if TYPE_CHECKING:
    from coursekit.comparison import Run

MIXES = ("chat48", "instruct64")
BUSY = 0.1  # share of the processor taken by others from which on times are doubtful


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mix", choices=MIXES, default=MIXES[0], help="which requests (default %(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--json", action="store_true", help="print every figure for a program to read")
    add_engine_arguments(parser, kv_memory="64MiB", max_model_len=512)


def run(args: argparse.Namespace) -> int:
    require_model_memory(args)
    from coursekit.comparison import serve
    from coursekit.workloads import load_mix
    from minipaged.attention import get_backend
    from minipaged.checkpoints.loading import load_model
    from minipaged.cpu.accelerate import accelerate

    settings = engine_settings(args)
    with refusals():
        requests = load_mix(args.mix)[: args.requests]
        if not requests:
            raise ValueError(f"--requests is {args.requests}, at least one is needed")
        asked = EngineArgs(**settings)
        device = asked.find_device()
        dtype = asked.find_dtype(device)
        model = load_model(args.model, dtype=dtype, device=device)
        model, _ = accelerate(model, get_backend("auto", device))
        settings |= {"model": model, "device": device}
        served = serve(args.mix, requests=requests, use_tqdm=shows_progress(args), **settings)
    report = {
        "mix": args.mix,
        "model": model.name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "block_size": args.block_size,
        **figures(served),
    }
    print(json.dumps(report) if args.json else "\n".join(lines(report)))
    return 0


def figures(served: "Run") -> dict[str, Any]:
    """Every number of a run; times in seconds, shares 0 … 1."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in served.outputs)
    tpot = [output.metrics.tpot for output in served.outputs if output.metrics.tpot is not None]
    found = served.figures()
    return {
        "requests": len(served.outputs),
        "prompt_tokens": prompt_tokens,
        "total_tokens_per_second": (prompt_tokens + found["output_tokens"]) / served.seconds,
        "tpot_mean": sum(tpot) / len(tpot) if tpot else None,
        "share_reserved": 1 - found["shares"]["free"],
        **found,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    f = report
    rows = [
        ("output tokens/s", f"{f['tokens_per_second']:.0f}"),
        ("total tokens/s", f"{f['total_tokens_per_second']:.0f}"),
        ("time to first", f"{f['ttft_mean']:.2f} s on average, {f['ttft_worst']:.2f} s at worst"),
        ("time per token", "-" if f["tpot_mean"] is None else f"{1000 * f['tpot_mean']:.1f} ms on average"),
        ("at once", f"{f['running_mean']:.1f} on average, {f['running_peak']} at most"),
        ("memory", f"{f['share_reserved']:.0%} reserved, of which {f['share_of_taken']:.0%} holds tokens"),
    ]
    found = [
        f"{f['mix']}: {f['requests']} requests, {f['prompt_tokens']} + {f['output_tokens']} tokens, in "
        f"{f['seconds']:.1f} s and {f['steps']} steps",
        f"{f['model']}, {f['dtype']}, on {f['device']}, {f['blocks']} blocks of {f['block_size']} tokens",
        *(f"  {name:<16} {value}" for name, value in rows),
    ]
    if f["foreign_share"] > BUSY:
        found.append(
            f"Other programs used {f['foreign_share']:.0%} of the processor: the times are partly theirs."
        )
    return found
