"""Answer one prompt, streaming the text as it is made.

    minipaged generate "Why is the sky blue?"
    minipaged generate --raw "Once upon a time" --temperature 0.8 --seed 1
    echo "Name three rivers." | minipaged generate -

The prompt is put into the model's chat template unless --raw asks for a plain continuation. The text goes to
stdout. What it cost goes to stderr, as in

    [35 + 9 tokens in 3 blocks of 16: 1.05 MiB of KV cache; first token after 0.12 s, then 41 tokens/s]

35 tokens of prompt (the template's own among them) and 9 of answer fill 3 blocks; a block costs the same
however full it is. The first token waits for the whole prompt to be computed, each later one for one step.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minipaged.commands import CommandError
from minipaged.commands.serving import (
    add_engine_arguments,
    add_sampling_arguments,
    costs,
    describe,
    engine_settings,
    refusals,
    require_model_memory,
    sampling_settings,
)

if TYPE_CHECKING:
    from minipaged.engine.llm import LLM
    from minipaged.engine.output_processor import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help='the text, or "-" to read it from stdin')
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, no chat template")
    parser.add_argument(
        "--system", metavar="TEXT", help="instructions that the model reads before the prompt"
    )
    parser.add_argument(
        "--json", action="store_true", help="no streaming: one JSON object with text and costs"
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser, kv_memory="64MiB")


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or stdin's text for "-" and for a pipe."""
    if prompt is None and sys.stdin.isatty():
        raise CommandError('no prompt given: minipaged generate "Why is the sky blue?"')
    try:
        text = sys.stdin.read().rstrip("\n") if prompt in (None, "-") else prompt
    except UnicodeDecodeError as error:
        raise CommandError(f"the input is not {error.encoding}: {error}") from error
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


def run(args: argparse.Namespace) -> int:
    text = read_prompt(args.prompt)
    if args.raw and args.system:
        raise CommandError("--system needs the chat template: leave out --raw")
    require_model_memory(args)
    from minipaged.engine.llm import LLM
    from minipaged.sampling_params import SamplingParams

    with refusals():
        params = SamplingParams(**sampling_settings(args))
        llm = LLM(**engine_settings(args))
        outputs = llm.stream(make_prompt(llm, text, raw=args.raw, system=args.system), params)
    output = show_stream(outputs, show=not args.json)
    cost = costs(llm, output)
    if args.json:
        answer = output.outputs[0]
        print(json.dumps({"text": answer.text, "finish_reason": answer.finish_reason, **cost}))
    else:
        print(describe(cost), file=sys.stderr)
    return 0
