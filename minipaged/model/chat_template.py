"""Chat templates: the text that a list of messages becomes, as the model's own Jinja program writes it.

The program comes with the model, from people we do not know. It runs in jinja2's immutable sandbox, where it
cannot reach Python's internals and cannot change what it is given. And it runs in a process of its own, with
limits on time, memory and text: `{{ 2 ** 10 ** 9 }}` is a template like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 5.0  # for one conversation; real templates take milliseconds
START_SECONDS = 60.0  # for the process, which imports jinja2; on a busy machine
MEMORY = 2**29  # bytes
LONGEST = 2**24  # characters that a template may write
PROGRAM = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A chat template, read when it is first used: a model with a broken one still serves plain text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names a template may use, such as `bos_token` and `eos_token`."""
        self._source, self._special_tokens = source, dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork must not speak with its parent's
        self._fault: str | None = None  # why the template cannot be used at all

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt for `messages`; ValueError when they are malformed or the template fails on them.

        A template also fails by taking more than `SECONDS`, `MEMORY` or `LONGEST` allow.
        """
        check_messages(messages)
        request = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the messages are not plain data, as in JSON: {error}") from None
        with self._lock:
            process = self._start()
            answer = self._ask(process, line, SECONDS)
        if "error" in answer:
            raise ValueError(answer["error"])
        text: str = answer["text"]
        if len(text) > LONGEST:
            raise ValueError(f"the chat template failed: it wrote {len(text)} characters, at most {LONGEST}")
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        """The process that has read the template; ValueError if it cannot be read."""
        if self._fault is not None:
            raise ValueError(self._fault)
        if self._process is not None and self._owner == os.getpid():
            return self._process
        if not isinstance(self._source, str):
            self._fault = f"the chat template is of type {type(self._source).__name__}, a string is needed"
            raise ValueError(self._fault)
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for us, not for it
        )
        self._process, self._owner = process, os.getpid()
        weakref.finalize(self, _end, process)
        self._ask(process, "null", START_SECONDS)
        first = {"source": self._source, "names": self._special_tokens, "memory": MEMORY}
        self._fault = self._ask(process, json.dumps(first), SECONDS).get("error")
        if self._fault is not None:
            _end(process)
            raise ValueError(self._fault)
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> dict[str, str]:
        """The answer to a line of JSON; without one in time, or at all, the process is ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        raw = b""
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            raw = process.stdout.readline(8 * LONGEST)
        except OSError:
            pass  # it has ended
        finally:
            timer.cancel()
            if not raw.endswith(b"\n"):  # also when an interrupt comes while it works
                self._process = None
                _end(process)
        if raw.endswith(b"\n"):
            found: dict[str, str] = json.loads(raw)
            return found
        why = f"it took more than {seconds:g} s" if late.is_set() else f"it took more than {MEMORY >> 20} MiB"
        return {"error": f"the chat template failed: {why}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()


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
