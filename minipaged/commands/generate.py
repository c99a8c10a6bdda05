"""Answer one prompt, streaming the text as it is made.

    minipaged generate "Why is the sky blue?"
    minipaged generate --raw "Once upon a time" --temperature 0.8 --seed 1
    echo "Name three rivers." | minipaged generate -

The prompt is put into the model's chat template unless --raw asks for a plain continuation. The text goes to
stdout. What it cost goes to stderr: tokens, blocks of the KV cache, time to the first token, tokens a second.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minipaged.commands import CommandError
from minipaged.machine import DEFAULT_MODEL, MIB, SERVING_MEMORY, require_memory

if TYPE_CHECKING:
    from minipaged.engine.llm import LLM
    from minipaged.engine.outputs import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help='the text, or "-" to read it from stdin')
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, no chat template")
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions that the model reads before the prompt"
    )
    parser.add_argument(
        "--json", action="store_true", help="no streaming: one JSON object with text and costs"
    )

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
    engine.add_argument("--kv-memory", default="64MiB", help="size of the KV cache (default %(default)s)")
    engine.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens per block (default 16)"
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and output")
    engine.add_argument("--attention-backend", default="auto", help="torch, triton or reference")


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or stdin's text for "-" and for a pipe."""
    if prompt is None and sys.stdin.isatty():
        raise CommandError('no prompt given: minipaged generate "Why is the sky blue?"')
    text = sys.stdin.read().rstrip("\n") if prompt in (None, "-") else prompt
    if not text:
        raise CommandError("the prompt is empty: give some text")
    return text


def make_prompt(llm: "LLM", text: str, *, raw: bool, system: str | None) -> Any:
    """What the engine is given: the text itself, or the token ids of the chat template around it."""
    if raw:
        return text
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    tokenizer = llm.get_tokenizer()
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return {"prompt_token_ids": tokenizer.encode(chat, add_special_tokens=False)}


def show_stream(outputs: Iterable["RequestOutput"], *, show: bool) -> "RequestOutput":
    """Print each piece of text when it is final, if `show`. Returns the finished output."""
    shown = 0
    for output in outputs:
        text = output.outputs[0].text
        if show and len(text) > shown:
            print(text[shown:], end="", flush=True)
            shown = len(text)
    if show:
        print()
    return output


def costs(llm: "LLM", output: "RequestOutput") -> dict[str, Any]:
    """What serving this request took. Times in seconds, `kv_bytes` are those of the blocks it ended with."""
    from minipaged.memory import blocks_for

    num_prompt_tokens, num_output_tokens = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    storage = llm.engine.storage
    # The last token drawn is never fed back, so its keys and values are never stored.
    blocks = blocks_for(num_prompt_tokens + num_output_tokens - 1, storage.block_size)
    return {
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "block_size": storage.block_size,
        "blocks": blocks,
        "kv_bytes": blocks * storage.spec.bytes_per_block(storage.block_size),
        "ttft": output.metrics.ttft,
        "tpot": output.metrics.tpot,
    }


def describe(cost: dict[str, Any]) -> str:
    """The costs as one line for people."""
    tokens = f"{cost['prompt_tokens']} + {cost['output_tokens']} tokens"
    memory = f"{cost['blocks']} blocks of {cost['block_size']}: {cost['kv_bytes'] / MIB:.2f} MiB of KV cache"
    times = f"first token after {cost['ttft']:.2f} s"
    if cost["tpot"]:
        times += f", then {1 / cost['tpot']:.0f} tokens/s"
    return f"[{tokens} in {memory}; {times}]"


def run(args: argparse.Namespace) -> int:
    text = read_prompt(args.prompt)
    if args.raw and args.system:
        raise CommandError("--system needs the chat template: leave out --raw")
    if args.model == DEFAULT_MODEL:
        require_memory(SERVING_MEMORY, "serving the model")
    from minipaged.engine.llm import LLM
    from minipaged.engine.sampling_params import SamplingParams

    try:
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            stop=args.stop,
        )
        llm = LLM(
            args.model,
            dtype=args.dtype,
            device=args.device,
            kv_memory=args.kv_memory,
            block_size=args.block_size,
            max_model_len=args.max_model_len,
            attention_backend=args.attention_backend,
        )
        prompt = make_prompt(llm, text, raw=args.raw, system=args.system)
        outputs = llm.stream(prompt, params)
    except (ValueError, ImportError) as error:  # both name the value and the limit, or what to install
        raise CommandError(str(error)) from error
    output = show_stream(outputs, show=not args.json)
    cost = costs(llm, output)
    if args.json:
        answer = output.outputs[0]
        print(json.dumps({"text": answer.text, "finish_reason": answer.finish_reason, **cost}))
    else:
        print(describe(cost), file=sys.stderr)
    return 0
