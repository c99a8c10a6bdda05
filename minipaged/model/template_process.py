"""What runs in the process that renders a chat template: reads requests from stdin, answers on stdout.

Started by `chat_template.py`, as a script, with jinja2 and the standard library only. Every request and
answer is a line of JSON. The first only asks whether it has started, the second is {"source", "names",
"memory"}; each one after them is {"messages", "add_generation_prompt"} and gets {"text"} or {"error"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}`: marks text for training, and changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def compile_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def limit_memory(size: int) -> None:
    """Bytes this process may take; nothing where the system has no such limit."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):
        return


def answer(make: Callable[[], Any], fault: str) -> tuple[Any, dict[str, str]]:
    """What `make` gives, or the error that says what went wrong: a template is a program, and may fail."""
    try:
        return make(), {}
    except Exception as error:
        what = str(error) or type(error).__name__
        return None, {"error": f"the chat template {fault}: {what}"}


def serve(requests: Any, answers: Any) -> None:
    def reply(value: dict[str, str]) -> None:
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()

    requests.readline()
    reply({})  # it has started
    first = json.loads(requests.readline())
    limit_memory(first["memory"])
    template, fault = answer(lambda: compile_template(first["source"]), "is not valid Jinja")
    reply(fault)
    for line in requests:
        names = {**json.loads(line), **first["names"], "tools": None, "documents": None}
        text, fault = answer(lambda names=names: template.render(**names), "failed")  # type: ignore[misc]
        reply(fault or {"text": text})


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        serve(sys.stdin.buffer, sys.stdout.buffer)
