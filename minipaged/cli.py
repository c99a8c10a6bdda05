"""The `minipaged` command: finds the subcommand, imports only that one, runs it.

Exit codes: 0 done, 1 failed with one sentence on stderr, 2 wrong usage, 130 stopped with Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from minipaged import __version__
from minipaged.commands import CommandError

# command -> where its module is, and one line for the list; `a b` lives in a_b.py. Commands that need request
# mixes, figures or graders belong to the course, of which nothing else in this package knows.
ENGINE, COURSE = "minipaged.commands", "coursekit.commands"
COMMANDS = {
    "doctor": (ENGINE, "say what this machine has, and what will run on it"),
    "demo": (COURSE, "serve one batch under both memory policies and compare"),
    "generate": (ENGINE, "answer one prompt, streaming"),
    "chat": (ENGINE, "talk with the model; each turn computes only what is new"),
    "serve": (ENGINE, "answer HTTP requests in OpenAI's form, and show the memory on a live page"),
    "top": (COURSE, "watch the memory of a server in the terminal, one cell a block"),
    "batch": (ENGINE, "answer a file of prompts, on one engine or on many; goes on where it was stopped"),
    "bench throughput": (COURSE, "serve a mix of requests and say how fast that was"),
    "bench memory": (COURSE, "measure how much of the KV memory holds tokens, per policy and block size"),
    "exercises status": (COURSE, "show how far you are in the exercises, and what comes next"),
    "exercises check": (COURSE, "check what you wrote in one exercise"),
    "exercises reset": (COURSE, "start one exercise again; yours is kept"),
    "exercises grade": (COURSE, "mark a class's submissions: a table, and a report for each learner"),
    "kernels": (COURSE, "compile the Triton kernels for real GPUs, without one, and print what they cost"),
}


def load_command(name: str) -> ModuleType:
    """Import the module of a command of COMMANDS."""
    package, _ = COMMANDS[name]
    return import_module(f"{package}.{name.replace(' ', '_')}")


def command_list(prefix: str = "") -> str:
    """The help text: every command that starts with `prefix`, one a line."""
    rows = [f"  {name:<17} {text}" for name, (_, text) in COMMANDS.items() if name.startswith(prefix)]
    return "\n".join(
        [
            f"usage: minipaged {prefix or 'COMMAND'} [options]",
            "",
            "Serve a language model from a paged KV cache, and see where the memory goes.",
            "",
            *rows,
            "",
            "`minipaged COMMAND --help` explains one of them. Start with `minipaged doctor`.",
        ]
    )


def find_command(arguments: Sequence[str]) -> tuple[str, list[str]] | None:
    """Split ["bench", "memory", "--json"] into ("bench memory", ["--json"]); None if unknown."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS and len(arguments) >= words:
            return name, list(arguments[words:])
    return None


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Parse the command's own arguments and run it."""
    module = load_command(name)
    parser = argparse.ArgumentParser(
        prog=f"minipaged {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


def whole_parser() -> argparse.ArgumentParser:
    """All commands in one parser, as completion wants it; running a command needs only its own."""
    whole = argparse.ArgumentParser(prog="minipaged")
    groups = {"": whole.add_subparsers()}
    for name, (_, text) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            members = ", ".join(n.removeprefix(f"{group} ") for n in COMMANDS if n.startswith(f"{group} "))
            groups[group] = groups[""].add_parser(group, help=members).add_subparsers()
        load_command(name).add_arguments(groups[group].add_parser(last, help=text))
    return whole


def completion(shell: str) -> str:
    """What the shell reads to complete commands and options. CommandError for a shell that is not known."""
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        raise CommandError(f"the shells are {', '.join(shtab.SUPPORTED_SHELLS)}, got {shell!r}")
    return str(shtab.complete(whole_parser(), shell))


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` start with, or print the list of commands."""
    if arguments and arguments[0] in {"--version", "-V"}:
        print(f"minipaged {__version__}")
        return 0
    if arguments and arguments[0] == "--print-completion":
        try:
            print(completion(arguments[1] if len(arguments) > 1 else ""))
        except CommandError as error:
            print(f"minipaged: {error}", file=sys.stderr)
            return 2
        return 0
    if arguments and arguments[0] in {"-h", "--help", "help"}:
        print(command_list())
        return 0
    found = find_command(arguments)
    if found is None:
        is_group = bool(arguments) and any(name.startswith(f"{arguments[0]} ") for name in COMMANDS)
        if arguments and not is_group:
            close = get_close_matches(arguments[0], {name.split()[0] for name in COMMANDS}, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            print(f"minipaged: there is no command {arguments[0]!r}{meant}\n", file=sys.stderr)
        print(command_list(arguments[0] if is_group else ""), file=sys.stderr)
        return 2
    try:
        return run_command(*found)
    except CommandError as error:
        print(f"minipaged {found[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nminipaged {found[0]}: stopped", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `minipaged` and `python -m minipaged`; returns the exit code."""
    try:
        try:
            return dispatch(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output left, as in `minipaged demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
