"""What the commands that serve a model share: options, and from them an engine and sampling settings.

No command of its own: `generate`, `chat`, `batch` and `bench throughput` use it.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from minipaged.commands import CommandError
from minipaged.engine.args import EngineArgs
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


# What of `EngineArgs` the commands offer, and what stands for the value in their help.
ENGINE_OPTIONS = {
    "model": None,
    "dtype": None,
    "device": None,
    "kv_memory": "SIZE",
    "block_size": "N",
    "max_model_len": "N",
    "attention_backend": None,
}


def add_engine_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Options for the settings in ENGINE_OPTIONS, with the engine's defaults but for those given here."""
    add_options(parser.add_argument_group("model and memory"), EngineArgs, ENGINE_OPTIONS, **defaults)


def add_options(
    group: "argparse._ArgumentGroup", settings: type, options: Mapping[str, str | None], **defaults: Any
) -> None:
    """An option for each setting that `options` names, explained as the dataclass `settings` does.

    options: names, and what stands for the value in the help. N is a whole number, S are seconds.
    """
    texts, kinds = explanations(settings), {"N": int, "BYTES": int, "S": float}
    for field in fields(settings):
        if field.name in options:
            metavar, default = options[field.name], defaults.get(field.name, field.default)
            shown = "" if default in (None, ()) else f" (default: {default})"
            group.add_argument(
                "--" + field.name.replace("_", "-"),
                type=kinds.get(metavar or "", str),
                default=default,
                metavar=metavar,
                nargs="*" if default == () else None,
                help=texts.get(field.name, "").replace("%", "%%") + shown,
            )


def explanations(settings: type) -> dict[str, str]:
    """The first sentence about each setting in the section "Attributes" of a docstring."""
    _, _, section = (settings.__doc__ or "").partition("Attributes:")
    section, _, _ = section.partition("Raises:")
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: re.split(r"\.(?: |$)", " ".join(text.split()))[0] for name, text in found}


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `EngineArgs`, which are those of `LLM`, as plain data."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS}


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `SamplingParams`, as plain data."""
    names = ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop"]
    return {name: getattr(args, name) for name in names}


def require_model_memory(args: argparse.Namespace) -> None:
    """CommandError, before torch is imported, where the default model would not fit."""
    if args.model == DEFAULT_MODEL:
        with refusals():
            require_memory(SERVING_MEMORY, "serving the model")


@contextmanager
def refusals() -> Iterator[None]:
    """What the engine refuses becomes one sentence: its errors name the value and the limit."""
    try:
        yield
    except (ValueError, ImportError, MemoryError) as error:
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
