"""Talk with the model; the conversation is kept, and so are its keys and values.

    minipaged chat
    minipaged chat --system "You answer in one sentence." --temperature 0.7 --seed 1
    printf 'Name a river.\\nAnd another.\\n' | minipaged chat

Each line is a message. Ctrl-C during an answer stops it and keeps what was said; Ctrl-D or /quit ends.
Answers go to stdout. After each, stderr says what it cost, as in

    [61 (48 from the prefix cache) + 12 tokens in 5 blocks of 16: 1.76 MiB of KV cache; first token after ...]

Every message is sent with the whole conversation before it: here a prompt of 61 tokens. 48 of them, three
full blocks, were found where the turns before left them; only 13 were computed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from minipaged.commands import CommandError
from minipaged.commands.generate import show_stream
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
    from minipaged.engine.chat import Chat
    from minipaged.sampling_params import SamplingParams

QUIT = ("/quit", "/exit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="instructions that the model reads before the rest")
    parser.add_argument(
        "--json", action="store_true", help="no streaming: one JSON object a turn, with text and costs"
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser, kv_memory="256MiB")


def run(args: argparse.Namespace) -> int:
    require_model_memory(args)
    from minipaged.engine.chat import Chat
    from minipaged.engine.llm import LLM
    from minipaged.sampling_params import SamplingParams

    with refusals():
        params = SamplingParams(**sampling_settings(args))
        chat = Chat(LLM(**engine_settings(args)), system=args.system)
    talk(chat, params, as_json=args.json)
    return 0


def talk(chat: "Chat", params: "SamplingParams", *, as_json: bool = False) -> None:
    """One turn for each message until they end. At a terminal a refused message is no reason to stop."""
    at_terminal = sys.stdin.isatty()
    prompt = "> " if at_terminal and sys.stdout.isatty() and not as_json else ""
    if prompt:
        print("Ctrl-C stops an answer; Ctrl-D or /quit ends.", file=sys.stderr)
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  gives `input` its editing keys and history
    for text in messages(prompt):
        try:
            answer(chat, text, params, as_json=as_json)
        except ValueError as error:  # a conversation that has grown too long
            if not at_terminal:
                raise CommandError(str(error)) from error
            print(error, file=sys.stderr)


def messages(prompt: str) -> Iterator[str]:
    """What the user says, a line each, until the end of the input or /quit; blank lines are skipped."""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            if prompt:
                print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            raise CommandError(f"the input is not {error.encoding}: {error}") from error
        if text in QUIT:
            return
        if text:
            yield text


def answer(chat: "Chat", text: str, params: "SamplingParams", *, as_json: bool) -> None:
    """One turn. Ctrl-C ends the answer, not the conversation."""
    output = None
    with closing(chat.stream(text, params)) as outputs:
        try:
            output = show_stream(outputs, show=not as_json)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
            return
    cost = costs(chat.llm, output)
    if as_json:
        reply = output.outputs[0]
        print(json.dumps({"text": reply.text, "finish_reason": reply.finish_reason, **cost}), flush=True)
    else:
        print(describe(cost), file=sys.stderr)
