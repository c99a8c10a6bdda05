"""Serve the same requests twice within one KV budget, and see where the memory went.

First every request reserves one contiguous strip for the longest sequence that the server accepts. Then the
same engine, model and kernels take blocks of 16 tokens, each only when a token needs it. A short chat at the
end shows that the model is a real one. --live shows both at once in the terminal instead, block by block.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coursekit.comparison import Run
    from minipaged.checkpoints.loading import LoadedModel

BLOCK_SIZE = 16
NEEDED_MEMORY = 2 * 2**30  # bytes: torch, the model in float32 and one cache at a time
QUICK_STRIDE = 3
BUSY = 0.1  # share of the processor taken by others from which on times are doubtful
QUESTION = "Why do libraries keep books on many short shelves?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK_STRIDE}rd request only")
    parser.add_argument(
        "--kv-memory", default="64MiB", help="KV budget of both policies (default: %(default)s)"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=512,
        help="longest sequence accepted, and the length of a contiguous strip (default: %(default)s)",
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="name, file, folder or hub id of another model"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder for the picture (default: out/demo)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--json", action="store_true", help="print every figure for a program to read, and no chat"
    )
    output.add_argument(
        "--live", action="store_true", help="watch the memory of both while they serve; nothing is measured"
    )


def run(args: argparse.Namespace) -> int:
    from minipaged.commands import CommandError
    from minipaged.extras import how_to_install
    from minipaged.machine import require_memory

    try:
        if not args.live:
            require_writable(args.out)
        require_memory(NEEDED_MEMORY, "the demo")
        return demonstrate(args)
    except ImportError as error:
        raise CommandError(
            f"the demo needs the course's packages: {how_to_install('course')} ({error})"
        ) from error
    except (ValueError, MemoryError) as error:  # a model that cannot be loaded, a budget below one request
        raise CommandError(str(error)) from error


def require_writable(folder: Path) -> None:
    """Make the folder; CommandError, before any work, where nothing can be written in it."""
    from minipaged.commands import CommandError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(
            f"cannot write in {folder}: {error.strerror}. --out names another folder for the picture"
        ) from error


def demonstrate(args: argparse.Namespace) -> int:
    from coursekit.comparison import equal_outputs, serve
    from coursekit.figures import memory_over_time, save
    from coursekit.workloads import load_mix
    from minipaged.attention import get_backend
    from minipaged.checkpoints.loading import load_model
    from minipaged.checks import parse_bytes
    from minipaged.cpu.accelerate import accelerate
    from minipaged.engine.args import EngineArgs

    asked = EngineArgs(
        args.model, dtype=args.dtype, kv_memory=args.kv_memory, max_model_len=args.max_model_len
    )
    device = asked.find_device()
    model = load_model(args.model, dtype=asked.find_dtype(device), device=device)
    model, _ = accelerate(model, get_backend("auto", device))
    requests = load_mix("chat48")[:: QUICK_STRIDE if args.quick else 1]
    dtype = str(model.model.dtype).removeprefix("torch.")
    policies = {
        f"strips of {args.max_model_len} tokens": args.max_model_len,
        f"blocks of {BLOCK_SIZE}": BLOCK_SIZE,
    }
    if not args.json:
        print(
            f"{model.name}, {dtype}, on {device}: {len(requests)} requests, sequences of up to "
            f"{args.max_model_len} tokens, {args.kv_memory} of KV memory"
        )
    if args.live:
        from coursekit.live import race

        print()
        race(model, requests, policies, kv_memory=args.kv_memory, max_model_len=args.max_model_len)
        return 0
    runs = []
    for policy, block_size in policies.items():
        if not args.json:
            print(f"\n{policy}:", flush=True)
        runs.append(
            serve(
                policy,
                model,
                requests,
                block_size=block_size,
                kv_memory=args.kv_memory,
                max_model_len=args.max_model_len,
                use_tqdm=not args.json,
            )
        )
    if not args.json:
        print_comparison(runs)  # before the picture, which a full disk may still refuse
    figure = memory_over_time(
        {run.policy: run.samples for run in runs}, parse_bytes(args.kv_memory, "--kv-memory")
    )
    pictures = save(figure, args.out / "memory_over_time")
    same = equal_outputs(*runs)
    if args.json:
        figures = {run.policy: run.figures() for run in runs}
        print(
            json.dumps({"policies": figures, "equal_outputs": same, "pictures": [str(p) for p in pictures]})
        )
        return 0
    foreign = max(run.foreign_share for run in runs)
    if foreign > BUSY:
        print(f"Other programs used up to {foreign:.0%} of the processor: the times are partly theirs.")
    print(f"Same answer, token for token, under both: {same} of {len(requests)} requests.")
    if same < len(requests):
        print(f"({dtype} rounds differently in a batch of another size; --dtype float32 agrees everywhere.)")
    print(f"Picture of the memory over time: {', '.join(map(str, pictures))}\n")
    chat(model)
    return 0


def print_comparison(runs: "Sequence[Run]") -> None:
    """The table, one column per policy, and the ratio where one is meant."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        caption="Memory: share of the budget, mean over the steps.\n"
        "Holes: too small for one more strip or block. TTFT: time to first token.",
        caption_justify="left",
    )
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")
    table.add_column("ratio", justify="right")
    for row in comparison_rows([run.figures() for run in runs]):
        table.add_row(*row)
    print()
    Console().print(table)


def comparison_rows(figures: "Sequence[dict[str, Any]]") -> list[list[str]]:
    """Cells of the table: a name, one value per policy, and second / first where that says something."""

    def row(name: str, values: list[float], form: str, *, ratio: bool = False) -> list[str]:
        times = f"{values[1] / values[0]:.2f} x" if ratio and values[0] else ""
        return [name, *(form.format(value) for value in values), times]

    def share(name: str, kind: str) -> list[str]:
        return row(name, [f["shares"][kind] for f in figures], "{:.1%}")

    return [
        row("requests at once, mean", [f["running_mean"] for f in figures], "{:.1f}", ratio=True),
        row("requests at once, peak", [f["running_peak"] for f in figures], "{:d}", ratio=True),
        share("memory: holds tokens", "used"),
        share("  for tokens to come", "to_come"),
        share("  for tokens that never come", "never"),
        share("  holes", "external"),
        share("  free", "free"),
        row("share of what is taken", [f["share_of_taken"] for f in figures], "{:.1%}", ratio=True),
        row("tokens per second", [f["tokens_per_second"] for f in figures], "{:.0f}", ratio=True),
        row("TTFT, mean (s)", [f["ttft_mean"] for f in figures], "{:.2f}", ratio=True),
        row("TTFT, worst (s)", [f["ttft_worst"] for f in figures], "{:.2f}", ratio=True),
        row("steps", [f["steps"] for f in figures], "{:d}", ratio=True),
        row("seconds", [f["seconds"] for f in figures], "{:.1f}", ratio=True),
    ]


def chat(model: "LoadedModel") -> None:
    """One question and its answer, greedy; nothing is printed for a model that has no chat template."""
    from minipaged.engine.llm import LLM
    from minipaged.sampling_params import SamplingParams

    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        return
    llm = LLM(model, kv_memory="16MiB", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=80)
    (output,) = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    print(f"> {QUESTION}\n{output.outputs[0].text.strip()}")
