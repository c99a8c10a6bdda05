"""Talk with the model; the conversation is kept, and so are its keys and values.

    minipaged chat
    minipaged chat --system "You answer in one sentence." --temperature 0.7 --seed 1
    printf 'Name a river.\\nAnd another.\\n' | minipaged chat

Each line is a message; at a terminal a pasted text of many lines is one too. Ctrl-C during an answer stops
it and keeps what was said; at the prompt it clears the line. Ctrl-D or /quit ends, /help lists all commands.
Answers go to stdout. After each, stderr says what it cost, as in

    [61 (48 from the prefix cache) + 12 tokens in 5 blocks of 16: 1.76 MiB of KV cache; first token after ...]

Every message is sent with the whole conversation before it: here a prompt of 61 tokens. 48 of them, three
full blocks, were found where the turns before left them; only 13 were computed.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.commands import CommandError, in_words
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
    from minipaged.core.request import StepPlan
    from minipaged.engine.chat import Chat
    from minipaged.sampling_params import SamplingParams

COMMANDS = {
    "/help": ("", "this list"),
    "/new": ("", "forget the conversation and start another one; the system message stays"),
    "/system": ("TEXT", "start another conversation with this system message; without TEXT: with none"),
    "/save": ("FILE", "write the conversation to a new file, as JSON messages"),
    "/quit": ("", "end; so does Ctrl-D"),
}
ALSO = {"/exit": "/quit", "/bye": "/quit", "/?": "/help"}
LONG_MESSAGE = 512  # tokens; reading fewer is hardly noticed


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
    if not (at_terminal and sys.stdout.isatty()) or as_json:
        converse(chat, params, input, as_json=as_json, stop_at_errors=not at_terminal)
        return
    print("/help lists the commands. Ctrl-C stops an answer; Ctrl-D or /quit ends.", file=sys.stderr)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late for an answer is no reason to end
    try:
        converse(chat, params, prompt_reader(), show_reading=True)
    finally:
        signal.signal(signal.SIGINT, before)


def converse(
    chat: "Chat",
    params: "SamplingParams",
    read: Callable[[], str],
    *,
    as_json: bool = False,
    show_reading: bool = False,
    stop_at_errors: bool = False,
) -> None:
    """Answer messages and obey commands until `read` has no more or /quit comes."""
    for text in messages(read):
        try:
            command = as_command(text)
            if command == ("/quit", ""):
                return
            if command is not None:
                obey(chat, *command)
            else:
                answer(chat, text, params, as_json=as_json, show_reading=show_reading)
        except (ValueError, CommandError) as error:  # a conversation that has grown too long, a wrong command
            if stop_at_errors:
                raise CommandError(str(error)) from error
            print(f"{error}{hint(error)}", file=sys.stderr)


def prompt_reader() -> Callable[[], str]:
    """Reads a message at a terminal: with history, completed commands, and pasted lines as one message.

    Enter sends, Alt-Enter begins a line. The reader raises EOFError at Ctrl-D.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    completer = WordCompleter(list(COMMANDS), sentence=True)
    session: PromptSession[str] = PromptSession(
        "> ", completer=completer, complete_while_typing=False, key_bindings=keys
    )

    def read() -> str:
        while True:
            try:
                return session.prompt()
            except KeyboardInterrupt:  # the line is cleared
                continue

    return read


def messages(read: Callable[[], str]) -> Iterator[str]:
    """What the user says, one `read` each, until the end of the input; blank ones are skipped."""
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise CommandError(f"the input is not {error.encoding}: {error}") from error
        if text:
            yield text


def as_command(text: str) -> tuple[str, str] | None:
    """("/save", "talk.json") for "/save talk.json"; None for a message, such as "/etc/hosts: what is it?".

    CommandError for a word in the form of a command that is none: it is not meant for the model.
    """
    match = re.fullmatch(r"(/[a-zA-Z]+|/\?)(?:\s+(.*))?", text, re.DOTALL)
    if match is None:
        return None
    name = ALSO.get(match[1].lower(), match[1].lower())
    rest = (match[2] or "").strip()
    if name not in COMMANDS:
        if "\n" in text:  # pasted
            return None
        close = get_close_matches(name, [*COMMANDS, *ALSO], n=1)
        meant = f"did you mean {close[0]}?" if close else "/help lists them"
        raise CommandError(f"there is no command {match[1]}: {meant}")
    argument, _ = COMMANDS[name]
    if rest and not argument:
        raise CommandError(f"{name} stands alone, got {rest!r} after it")
    return name, rest


def obey(chat: "Chat", name: str, rest: str) -> None:
    """Carry out a command other than /quit. CommandError where it cannot be."""
    if name == "/help":
        rows = [(f"{name} {argument}", text) for name, (argument, text) in COMMANDS.items()]
        print("\n".join(f"  {usage:<13} {text}" for usage, text in rows), file=sys.stderr)
        print("  Alt-Enter begins a new line of the message; pasted lines are one message.", file=sys.stderr)
    elif name == "/new":
        chat.start_anew(chat.system)
        print("[a new conversation]", file=sys.stderr)
    elif name == "/system":
        chat.start_anew(rest or None)
        what = "with this system message" if rest else "without a system message"
        print(f"[a new conversation, {what}]", file=sys.stderr)
    elif name == "/save":
        save(chat.messages, rest)


def save(conversation: list[dict[str, str]], name: str) -> None:
    """Write the messages to a file that does not exist yet."""
    if not name:
        raise CommandError("/save needs the name of a file: /save talk.json")
    path = Path(name).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(conversation, file, ensure_ascii=False, indent=1)
            file.write("\n")
    except FileExistsError as error:
        raise CommandError(f"{path} exists already: give another name") from error
    except OSError as error:
        raise CommandError(in_words(error, path)) from error
    print(f"[{len(conversation)} messages saved in {path}]", file=sys.stderr)


def hint(error: Exception) -> str:
    """The command that helps against it."""
    from minipaged.engine.chat import ConversationFull

    return " with /new" if isinstance(error, ConversationFull) else ""


def answer(
    chat: "Chat", text: str, params: "SamplingParams", *, as_json: bool, show_reading: bool = False
) -> None:
    """One turn. Ctrl-C ends the answer, not the conversation."""
    output = None
    num_unread = chat.num_unread_tokens(text) if show_reading else 0
    try:
        with stoppable(), reading(chat, num_unread), closing(chat.stream(text, params)) as outputs:
            output = show_stream(outputs, show=not as_json)
    except KeyboardInterrupt:
        print("\n[stopped]", file=sys.stderr)
        return
    cost = costs(chat.llm, output)
    reply = output.outputs[0]
    if as_json:
        print(json.dumps({"text": reply.text, "finish_reason": reply.finish_reason, **cost}), flush=True)
        return
    if reply.finish_reason == "length":
        print(why_cut(cost, params, chat.llm.max_model_len), file=sys.stderr)
    print(describe(cost), file=sys.stderr)


def why_cut(cost: dict[str, Any], params: "SamplingParams", max_model_len: int) -> str:
    """Which of the two limits ended an answer before the model did."""
    if params.max_tokens is not None and cost["output_tokens"] >= params.max_tokens:
        return f"[cut after {params.max_tokens} tokens, which is --max-tokens]"
    return f"[cut: the conversation is full, max_model_len is {max_model_len}; /new starts another one]"


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C in here raises KeyboardInterrupt, once. After that it means again what it did before."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def reading(chat: "Chat", num_unread: int) -> Iterator[None]:
    """While a long message is computed, stderr says how much of it is; nothing for a short one.

    The line is gone before the first word of the answer.
    """
    if num_unread < LONG_MESSAGE:
        yield
        return
    engine, read = chat.llm.engine, 0

    def show(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def on_step(plan: "StepPlan") -> None:
        nonlocal read
        read += plan.num_prefill_tokens
        if plan.sampled:
            engine.on_step = None
            show("")
        else:
            show(f"reading {num_unread} tokens … {min(1, read / num_unread):.0%}")

    engine.on_step = on_step
    show(f"reading {num_unread} tokens …")
    try:
        yield
    finally:
        if engine.on_step is not None:
            engine.on_step = None
            show("")
