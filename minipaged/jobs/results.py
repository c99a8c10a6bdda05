"""The output of a job: a file that only grows, by whole lines, and that says by itself what is done.

Results are appended in chunks, each flushed to the disk before the next begins. Whatever ends the process,
what is left is whole lines and at most one half: it is cut off when the file is opened again, and its line of
the input is served once more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

try:
    import fcntl
except ImportError:  # Windows; there nothing keeps a second job away
    fcntl = None  # type: ignore[assignment]

START = b'{"line": '
HALF_LINE = re.compile(rb'\{"line": [1-9]\d*, "id": ')
HALF_START = re.compile(rb'\{"line": [1-9]\d*(,( ("(i(d("(: ?)?)?)?)?)?)?)?')
"""How every result begins, and how it begins when it was cut short: so a half-written one is told from
somebody else's text. A file of nothing but a shorter beginning might be anybody's, and is left alone."""


class ResultFile:
    """The results so far, and the way to add more.

    Attributes:
        done: line of the input -> key of the line that has a result.
        errors: lines whose result is an error. Such a line may be served again: its last result counts.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file and read what is done. A half-written last line is cut off by the first
        `append`.

        Raises ValueError, before anything is changed, when another job has it open or when it holds
        something that is no result.
        """
        if path.exists() and not path.is_file():
            raise ValueError(
                f"{path} is no plain file: a job writes its results where it can read them again"
            )
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
        self.path = path
        self.done: dict[int, str] = {}
        self.errors: set[int] = set()
        self._half = 0  # bytes of a line that was never finished
        self._file = path.open("a+b")
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def append(self, results: Iterable[Mapping[str, Any]]) -> int:
        """Add a chunk and wait until the disk has it. A line that is done already is left out.

        Returns how many were added.
        """
        new = {result["line"]: result for result in results if result["line"] not in self.done}
        lines = [json.dumps(result, ensure_ascii=False) + "\n" for result in new.values()]
        self._file.seek(0, os.SEEK_END)
        if self._half and lines:
            self._file.truncate(self._file.tell() - self._half)
            self._half = 0
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        for result in new.values():
            self._note(result)
        return len(new)

    def forget(self, line: int) -> None:
        """The result of this line, an error, holds no more: it is to be served again."""
        self.errors.remove(line)
        del self.done[line]

    @property
    def num_errors(self) -> int:
        """How many lines have an error for a result."""
        return len(self.errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        """One job at a time; the system gives the lock back when the process ends, however it ends."""
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{self.path}: another job is writing to it") from None

    def _recover(self) -> None:
        self._file.seek(0)
        for number, raw in enumerate(self._file, start=1):
            if raw.endswith(b"\n"):
                self._note(self._parse(raw, number))
                continue
            is_ours = HALF_LINE.match(raw) is not None
            if number > 1 and not is_ours:
                is_ours = START.startswith(raw) or HALF_START.fullmatch(raw) is not None
            if not is_ours:
                raise ValueError(f"{self.path}, line {number} is no result: is it another file?")
            self._half = len(raw)

    def _parse(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            result = json.loads(raw)
            if not isinstance(result["line"], int) or not isinstance(result["key"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path}, line {number} is no result: is it another file?") from None
        if result["line"] in self.done and result["line"] not in self.errors:
            raise ValueError(
                f"{self.path}, line {number} answers line {result['line']} of the input a second time"
            )
        return result

    def _note(self, result: Mapping[str, Any]) -> None:
        self.done[result["line"]] = result["key"]
        (self.errors.add if "error" in result else self.errors.discard)(result["line"])
