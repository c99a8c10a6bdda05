"""Chat templates: the text that a list of messages becomes, as the model's own Jinja program writes it.

The program comes with the model, from people we do not know. It runs in jinja2's immutable sandbox: it cannot
reach Python's internals and cannot change what it is given.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled chat template. Raises ValueError for a template that is not Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names a template may use, such as `bos_token` and `eos_token`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt for `messages`; ValueError when they are malformed or the template fails on them."""
        check_messages(messages)
        names = {**self._special_tokens, "tools": None, "documents": None}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except Exception as error:  # the template is a program: it may fail in any way
            raise ValueError(f"the chat template failed: {error}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless `messages` is a non-empty list of dicts with a role and a text each."""
    if isinstance(messages, (str, Mapping)) or not messages:
        raise ValueError(f"messages is {messages!r}, a list of at least one message is needed")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} is {message!r}, a dict with 'role' and 'content' is needed")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {index} has {key} {message.get(key)!r}, a string is needed")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
