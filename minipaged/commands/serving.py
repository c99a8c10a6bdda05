"""What the commands that serve a model share: options, and from them an engine and sampling settings.

No command of its own: `generate`, `chat`, `batch` and `bench throughput` use it.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minipaged.commands import CommandError
from minipaged.machine import DEFAULT_MODEL, MIB, SERVING_MEMORY, require_memory

if TYPE_CHECKING:
    from minipaged.engine.llm import LLM
    from minipaged.engine.output_processor import RequestOutput


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("how tokens are chosen")
    sampling.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="stop after N (default 256)"
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token each time (default); 1 draws from the model's own distribution",
    )
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share P"
    )
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest (0: all)"
    )
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed draws the same text again")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text (repeatable)"
    )


def add_engine_arguments(parser: argparse.ArgumentParser, kv_memory: str | None) -> None:
    """kv_memory: the default; None leaves it to the engine."""
    engine = parser.add_argument_group("model and memory")
    engine.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a name, a .gguf file, a Hugging Face folder or hub id (default %(default)s)",
    )
    engine.add_argument(
        "--dtype", default="auto", help="float32, bfloat16 or float16 (default: what is fast here)"
    )
    engine.add_argument("--device", default="auto", help="cpu or cuda (default: a GPU where there is one)")
    engine.add_argument(
        "--kv-memory",
        default=kv_memory,
        metavar="SIZE",
        help=f"size of the KV cache (default: {kv_memory or 'a share of the free memory'})",
    )
    engine.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens per block (default 16)"
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and output")
    engine.add_argument("--attention-backend", default="auto", help="torch, triton or reference")


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM`, as plain data."""
    names = ["model", "dtype", "device", "kv_memory", "block_size", "max_model_len", "attention_backend"]
    return {name: getattr(args, name) for name in names}


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `SamplingParams`, as plain data."""
    names = ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop"]
    return {name: getattr(args, name) for name in names}


def require_model_memory(args: argparse.Namespace) -> None:
    """CommandError, before torch is imported, where the default model would not fit."""
    if args.model == DEFAULT_MODEL:
        require_memory(SERVING_MEMORY, "serving the model")


@contextmanager
def refusals() -> Iterator[None]:
    """What the engine refuses becomes one sentence: its errors name the value and the limit."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise CommandError(str(error)) from error


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether to draw a bar: only for people who look. TQDM_DISABLE is tqdm's own affair."""
    return not args.json and sys.stderr.isatty()


def costs(llm: "LLM", output: "RequestOutput") -> dict[str, Any]:
    """What serving this request took. Times in seconds, `kv_bytes` are those of the blocks it ended with."""
    from minipaged.memory import blocks_for

    num_prompt_tokens, num_output_tokens = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    storage = llm.engine.storage
    # The last token drawn is never fed back, so its keys and values are never stored.
    blocks = blocks_for(num_prompt_tokens + num_output_tokens - 1, storage.block_size)
    return {
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": num_output_tokens,
        "block_size": storage.block_size,
        "blocks": blocks,
        "kv_bytes": blocks * storage.spec.bytes_per_block(storage.block_size),
        "ttft": output.metrics.ttft,
        "tpot": output.metrics.tpot,
    }


def describe(cost: dict[str, Any]) -> str:
    """The costs as one line for people."""
    cached = f" ({cost['cached_tokens']} from the prefix cache)" if cost["cached_tokens"] else ""
    tokens = f"{cost['prompt_tokens']}{cached} + {cost['output_tokens']} tokens"
    memory = f"{cost['blocks']} blocks of {cost['block_size']}: {cost['kv_bytes'] / MIB:.2f} MiB of KV cache"
    times = f"first token after {cost['ttft']:.2f} s"
    if cost["tpot"]:
        times += f", then {1 / cost['tpot']:.0f} tokens/s"
    return f"[{tokens} in {memory}; {times}]"
