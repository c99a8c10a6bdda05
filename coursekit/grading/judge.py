"""Notebooks judged in a process of their own, so that a crash or a hang there costs one learner's marks.

What comes back from an answer is compared in that process, which has limits on memory. The process that
writes the marks sets it a limit on time, and starts another when it is gone.

    with Judge() as judge:
        results = list(judge.grade_file(path, "04"))
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coursekit.grading import guard, wire
from coursekit.grading.grade import TaskResult
from coursekit.grading.learner import COURSE, Pipe, signal_name
from coursekit.grading.notebook import grade_task, tasks_of
from coursekit.grading.task import CheckResult, Task

MEMORY_LIMIT = 4 * 2**30  # bytes of addresses on top of what it has after its imports
SPARE_SECONDS = 200.0  # beyond the limits of a task's checks: libraries, the model of exercise 12


class Judge:
    """The process that judges, started when it is first needed; use it as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = False

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def grade_file(self, path: Path, exercise: str) -> Iterator[TaskResult]:
        """As notebook.grade_file: one result a task, whatever becomes of the process."""
        for index, task in enumerate(tasks_of(exercise)):
            yield self._grade(path, task, index)

    def _grade(self, path: Path, task: Task, index: int) -> TaskResult:
        process = self._process or self._start()
        self._is_late = False
        seconds = SPARE_SECONDS + sum(check.seconds for check in task.checks)
        timer = threading.Timer(seconds, self._stop)
        timer.start()
        try:
            wire.send(process.stdin, [str(path), task.exercise, index])  # type: ignore[arg-type]
            reply = wire.receive(Pipe(process.stdout, lambda: process.poll() is not None))
            return TaskResult(task, [CheckResult(**check) for check in reply["checks"]], reply["problem"])
        except (EOFError, OSError, ValueError, wire.WireError):
            timer.cancel()
            self.close()
            return TaskResult(task, [], self._why(process.returncode, seconds))
        finally:
            timer.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        start = f"import sys; sys.path.insert(0, {str(COURSE.parent)!r}); from coursekit.grading import judge"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start + "; judge.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        return self._process

    def _stop(self) -> None:
        self._is_late = True
        self.close()

    def _why(self, code: int | None, seconds: float) -> str:
        if self._is_late:
            return f"judging this answer was not done after {seconds:g} seconds"
        how = signal_name(-code) if code and code < 0 else f"exit code {code}"
        return f"judging this answer ended the judging process ({how})"

    def close(self) -> None:
        """End the process; a later call of grade_file starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]


def main() -> None:
    """The judging process: one task of one notebook after the other, until its input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that is printed is a reply
    import torch  # noqa: F401  before the limit, so that its own addresses do not count

    guard.limit_memory(MEMORY_LIMIT)
    with contextlib.suppress(EOFError):
        while True:
            path, exercise, index = wire.receive(requests)
            wire.send(replies, as_plain(grade_task(Path(path), exercise, index)))


def as_plain(result: TaskResult) -> dict[str, Any]:
    """A result as JSON has it."""
    checks = [dict(vars(check)) for check in result.checks]
    return {"checks": checks, "problem": result.problem}
