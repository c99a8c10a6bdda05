"""The input of a job: one JSON object a line, read without ever giving up on the rest of the file.

A line says what it is called, what to continue and, where it wants, how:

    {"id": "a", "prompt": "The sky is", "max_tokens": 20}
    {"id": "b", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0.8, "seed": 7}
    {"id": "c", "prompt_token_ids": [1, 2, 3]}

Nothing here needs the model: what only it can tell (a prompt that is too long) comes out when it is served.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from minipaged.sampling_params import SamplingParams

MAX_LINE_BYTES = 2**24
"""A longer line is refused; it is skipped without being held in memory."""

BOM, GZIP = b"\xef\xbb\xbf", b"\x1f\x8b"
PROMPTS = ("prompt", "messages", "prompt_token_ids")
NOT_FOR_LINES = {"output_kind", "logprobs", "prompt_logprobs"}
SAMPLING = {field.name for field in fields(SamplingParams)} - NOT_FOR_LINES
KEYS = {"id", "cache_salt", *PROMPTS, *SAMPLING}


@dataclass(frozen=True)
class Task:
    """A line that can be served; plain data, so that it can travel to another machine.

    Attributes:
        line: its number in the file, from 1.
        key: fingerprint of the line and of the job's settings.
        prompt: one of PROMPTS with its value, and `cache_salt` if the line has one.
        sampling: arguments of `SamplingParams`, a seed among them.
    """

    line: int
    id: str | int
    key: str
    prompt: Mapping[str, Any]
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be served, and why. `id` is None where it has none of its own."""

    line: int
    id: str | int | None
    key: str
    error: str


def failed(item: Task | BadLine, error: str) -> dict[str, Any]:
    """The result of a line that has no answer."""
    return {"line": item.line, "id": item.id, "key": item.key, "error": error}


class LineError(ValueError):
    """What is wrong with a line; the message is for the person who wrote it."""


class TakenId(LineError):
    """The id is that of another line."""


def require_text(path: Path) -> None:
    """Raise ValueError, once for the whole file, for one that holds no lines of text."""
    with path.open("rb") as file:
        start = file.read(2**13)
    if start.startswith(GZIP):
        raise ValueError(f"{path} is packed with gzip: unpack it first")
    if b"\0" in start:
        raise ValueError(f"{path} is no UTF-8 text: byte {start.index(0)} is 0, as in a picture or in UTF-16")


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line that is not blank, without its end; CRLF and a BOM are taken off.

    Of a line beyond MAX_LINE_BYTES only the first bytes are given: one more than allowed.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            piece = raw
            while len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n"):
                piece = file.readline(MAX_LINE_BYTES + 1)
            if number == 1:
                raw = raw.removeprefix(BOM)
            if len(raw) <= MAX_LINE_BYTES:
                raw = raw.strip(b" \t\r\n")
            if raw:
                yield number, raw


def keyed_lines(path: Path, settings: Mapping[str, Any]) -> Iterator[tuple[int, str, bytes]]:
    """`raw_lines` with each line's key. Equal keys: the same line under the same settings."""
    prefix = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
    for number, raw in raw_lines(path):
        digest = prefix.copy()
        digest.update(raw)
        yield number, digest.hexdigest(), raw


def read_tasks(path: Path, settings: Mapping[str, Any]) -> Iterator[Task | BadLine]:
    """Every line of the file as what can be served or what is wrong with it, in order.

    settings: of the job; `sampling` in it is for lines that do not say, and `seed` what seeds derive from.
    """
    first_use: dict[str, int] = {}
    for number, key, raw in keyed_lines(path, settings):
        own_id = None
        try:
            values = parse_line(raw)
            own_id = _checked_id(values, first_use, number)
            _require_known_keys(values)
            yield Task(number, own_id, key, _prompt_of(values), _sampling_of(values, settings))
        except TakenId as error:  # not of this line alone, so its key is not either
            key = hashlib.blake2b(f"{key} {error}".encode(), digest_size=8).hexdigest()
            yield BadLine(number, own_id, key, str(error))
        except LineError as error:
            yield BadLine(number, own_id, key, str(error))


def parse_line(raw: bytes) -> dict[str, Any]:
    """The object that a line holds; LineError if it does not hold one."""
    if len(raw) > MAX_LINE_BYTES:
        raise LineError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}") from None
    except LineError:
        raise
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise LineError(f"a line is a JSON object, this is {type(values).__name__}")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise LineError(f"the key {name!r} is given {names.count(name)} times")
    return dict(pairs)


def _require_known_keys(values: Mapping[str, Any]) -> None:
    for name in sorted(set(values) - KEYS):
        close = get_close_matches(name, KEYS, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(KEYS))}"
        raise LineError(f"there is no key {name!r}; {meant}")


def _checked_id(values: Mapping[str, Any], first_use: dict[str, int], number: int) -> str | int:
    """The id, noted as used. 1 and "1" are two ids."""
    found = values.get("id")
    if isinstance(found, bool) or not isinstance(found, (str, int)):
        raise LineError(f"'id' is text or a whole number, got {found!r}")
    try:
        name = json.dumps(found, ensure_ascii=False)
        name.encode()
    except UnicodeEncodeError:
        raise LineError(f"'id' is not valid Unicode: {found!r}") from None
    if name in first_use:
        raise TakenId(f"id {name} is taken: line {first_use[name]} has it")
    first_use[name] = number
    return found


def _prompt_of(values: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in PROMPTS if name in values]
    if len(given) != 1:
        raise LineError(f"exactly one of {', '.join(PROMPTS)} is needed, got {given or 'none'}")
    kept = [*given, "cache_salt"] if "cache_salt" in values else given
    return {name: values[name] for name in kept}


def _sampling_of(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The line's own settings over those of the job; a seed made from the id where neither has one."""
    sampling = {**settings["sampling"], **{name: values[name] for name in SAMPLING & values.keys()}}
    if sampling.get("seed") is None:
        text = json.dumps([settings["seed"], values["id"]])
        sampling["seed"] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    try:
        SamplingParams(**sampling)
    except (ValueError, TypeError) as error:
        raise LineError(str(error)) from None
    return sampling
