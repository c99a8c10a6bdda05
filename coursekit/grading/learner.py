"""The grader's end of a learner's process: start it, call what it defines, end it.

    with Learner({"block_table": source}) as learner:
        table = learner.MyBlockTable(learner.Pool(8), 4)     # objects stay in the other process
        table.append(5)
        table.blocks                                         # plain values come back as copies

Every way in which the process can fail, hang or lie ends in one of the LearnerError exceptions here.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import coursekit
import minipaged
from coursekit.grading import wire

ENGINE, COURSE = (Path(package.__path__[0]).resolve() for package in (minipaged, coursekit))
START_SECONDS = 120.0  # libraries are read from a cold disk, on a busy machine
ANSWER_SECONDS = 20.0  # an answer defines things; it computes nothing yet
EXIT_SECONDS = 10.0  # from closing its pipes to its end: at once, unless others keep the processor


class LearnerError(Exception):
    """The learner's process did not do what it was asked. `str()` says why, for the learner to read."""


class Raised(LearnerError):
    """The learner's code raised an exception: `types` names its class and every base class."""

    def __init__(self, types: Sequence[str], message: str, line: str) -> None:
        self.types, self.message, self.line = tuple(types), message, line
        text = self.types[0] + (f": {message}" if message else "") + (f"\nat {line}" if line else "")
        if self.types[0] == "NameError":
            text += "\nimports and helpers of an answer must stand in the answer's own cell"
        super().__init__(text)


class Ended(LearnerError):
    """The process is gone: it exited, crashed, ran out of time, did what is refused or sent nonsense."""


class Remote:
    """Something that lives in the learner's process: a class, a function, an object, a tensor to change."""

    __slots__ = ("_learner", "_number")

    def __init__(self, learner: "Learner", number: int) -> None:
        object.__setattr__(self, "_learner", learner)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._learner.request("call", of=self, args=args, kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._learner.request("get", of=self, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._learner.request("set", of=self, name=name, value=value)

    def __getitem__(self, key: Any) -> Any:
        return self._learner.request("item", of=self, key=key)

    def __repr__(self) -> str:
        return "an object of yours"


class Learner:
    """One fresh process with the answers in it; use it as a context manager.

    `sources`: answers by name, run in this order after `preamble`, which is trusted and may import from
    `coursekit.given`. Names that they define are attributes. Raises LearnerError when they do not run.
    """

    def __init__(self, sources: Mapping[str, str], *, preamble: str = "") -> None:
        self._sources, self._preamble = dict(sources), preamble
        self._folder = tempfile.TemporaryDirectory(prefix="minipaged-answer-", ignore_cleanup_errors=True)
        self._why_killed = ""
        start = f"import sys; sys.path.insert(0, {str(COURSE.parent)!r}); import runpy; runpy.run_module("
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start + "'coursekit.grading.worker', run_name='__main__')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env=_environment(self._folder.name),
            start_new_session=True,
        )
        try:
            with self.time_limit(START_SECONDS):
                self._exchange({"preamble": preamble, "forbidden": [str(ENGINE), str(COURSE)]})
            with self.time_limit(ANSWER_SECONDS):
                self._exchange([(f"answer {name}", source) for name, source in sources.items()])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.request("name", name=name)

    def keep(self, value: Any) -> Any:
        """Copy `value` (a tensor, a list) to the other process once; calls there can change it in place."""
        return self.request("keep", value=value)

    def fetch(self, value: Any) -> Any:
        """What a remote object holds now: a tensor's elements, an iterable's items."""
        return self.request("fetch", value=value)

    def again(self, preamble: str | None = None) -> "Learner":
        """The same answers in a second fresh process, after the same preamble or another."""
        return Learner(self._sources, preamble=self._preamble if preamble is None else preamble)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Kill the process if the body is not done in `seconds`; a request in it then raises Ended."""
        timer = threading.Timer(
            seconds, self._kill, [f"not done after {seconds:g} seconds: an endless loop?"]
        )
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def request(self, op: str, **fields: Any) -> Any:
        """One call there and back. `fields` other than `name` are values."""
        message = {
            key: field if key == "name" else wire.encode(field, _number) for key, field in fields.items()
        }
        return self._exchange({"op": op, **message})

    def _exchange(self, message: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            wire.send(self._process.stdin, message)  # type: ignore[arg-type]
            reply = wire.receive(self._process.stdout)  # type: ignore[arg-type]
            if "refused" in reply:
                self._kill(f"refused: it {str(reply['refused'])[:200]}")
            elif "raised" in reply:
                raised = reply["raised"]
                names = [str(name)[:100] for name in raised["type"][:20]] or ["an exception"]
                raise Raised(names, str(raised["message"])[:500], str(raised["line"])[:200])
            else:
                return wire.decode(reply["value"], lambda number: Remote(self, int(number)))
        except (EOFError, OSError, ValueError):
            self._kill("")
        except (wire.WireError, TypeError, KeyError, AttributeError):
            self._kill("the process of your code answered with nonsense")
        raise Ended(self._why_killed or self._exit_text())

    def _exit_text(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"your code crashed its process ({signal.Signals(-code).name})"
        return f"your code ended its process (exit code {code})"

    def _kill(self, why: str) -> None:
        self._why_killed = self._why_killed or why
        if not why:
            with suppress(subprocess.TimeoutExpired):  # it is ending by itself: learn how
                self._process.wait(EXIT_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def close(self) -> None:
        """End the process and remove its folder. A second call does nothing."""
        self._kill("closed")
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._folder.cleanup()


def _number(value: Any) -> int:
    """A remote object travels back as its number; other objects of the grader do not travel."""
    if not isinstance(value, Remote):
        raise TypeError(f"{type(value).__name__} cannot be sent to the learner's process")
    return int(object.__getattribute__(value, "_number"))


def _environment(folder: str) -> dict[str, str]:
    """What the process may know of ours: where programs are. Kernels run in Triton's interpreter."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "LANG") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own = {"HOME": folder, "TMPDIR": folder, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    return kept | threads | own
