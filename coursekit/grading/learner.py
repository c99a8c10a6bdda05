"""The grader's end of a learner's process: start it, call what it defines, end it.

    with Learner({"block_table": source}) as learner:
        table = learner.MyBlockTable(learner.Pool(8), 4)     # objects stay in the other process
        table.append(5)
        table.blocks                                         # plain values come back as copies

Every way in which the process can fail, hang or lie ends in one of the LearnerError exceptions here.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import coursekit
import minipaged
from coursekit.grading import wire

ENGINE, COURSE = (Path(package.__path__[0]).resolve() for package in (minipaged, coursekit))
START_SECONDS = 120.0  # libraries are read from a cold disk, on a busy machine
ANSWER_SECONDS = 20.0  # an answer defines things; it computes nothing yet
WAIT_SECONDS = 0.1  # between two looks at whether a silent process still lives
WIDEST_ARGUMENT = 60  # characters of an argument in a message
EXIT_SECONDS = 10.0  # from closing its pipes to its end: at once, unless others keep the processor


class LearnerError(Exception):
    """The learner's process did not do what it was asked. `str()` says why, for the learner to read."""


class Raised(LearnerError):
    """The learner's code raised an exception: `types` names its class and every base class."""

    def __init__(self, types: Sequence[str], message: str, line: str, function: str = "") -> None:
        self.types, self.message, self.line, self.function = tuple(types), message, line, function
        text = self.types[0] + (f": {message}" if message else "") + (f"\nat {line}" if line else "")
        if self.types[0] == "NameError":
            text += "\nimports and helpers of an answer must stand in the answer's own cell"
        super().__init__(text)


class Ended(LearnerError):
    """The process is gone: it exited, crashed, ran out of time, did what is refused or sent nonsense."""


class Remote:
    """Something that lives in the learner's process: a class, a function, an object, a tensor to change.

    `kind` is the name of its type there, `label` how messages name it, as in "MyBlockPool(4)".
    """

    __slots__ = ("_kind", "_label", "_learner", "_number")

    def __init__(self, learner: "Learner", number: int, kind: str = "", label: str = "") -> None:
        for name, value in (("learner", learner), ("number", number), ("kind", kind), ("label", label)):
            object.__setattr__(self, f"_{name}", value)

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
        kind = object.__getattribute__(self, "_kind")
        if kind in ("method", "function"):
            return f"a {kind}, where a value was asked for: is @property missing?"
        return f"an object of your class {kind}" if kind else "an object of yours"


class Learner:
    """One fresh process with the answers in it; use it as a context manager.

    `sources`: answers by name, run in this order after `preamble`, which is trusted and may import from
    `coursekit.given`. Names that they define are attributes. Raises LearnerError when they do not run.
    """

    def __init__(self, sources: Mapping[str, str], *, preamble: str = "") -> None:
        self._sources, self._preamble = dict(sources), preamble
        self._folder = tempfile.TemporaryDirectory(prefix="minipaged-answer-", ignore_cleanup_errors=True)
        self._why_killed = ""
        self.calls: list[str] = []  # what was asked of the answer, as text, since somebody emptied the list
        self.last: Any = None  # what came back last
        start = f"import sys; sys.path.insert(0, {str(COURSE.parent)!r}); import runpy; runpy.run_module("
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start + "'coursekit.grading.worker', run_name='__main__')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env=_environment(self._folder.name),
            start_new_session=True,
        )
        try:
            with self.time_limit(START_SECONDS):
                self._exchange({"preamble": preamble, "forbidden": forbidden_folders()})
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
        text = text_of(op, fields)
        self.calls.append(text)
        message = {
            key: field if key == "name" else wire.encode(field, _number) for key, field in fields.items()
        }
        self.last = self._exchange({"op": op, **message}, label=text)
        if op != "call":  # a look changes nothing: it is no part of a history
            self.calls.pop()
        return self.last

    def _exchange(self, message: Any, label: str = "") -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            wire.send(Pipe(self._process.stdin, self._is_over), message)  # type: ignore[arg-type]
            reply = wire.receive(Pipe(self._process.stdout, self._is_over), wire.MOST_ITEMS)
            if "refused" in reply:
                self._kill(f"refused: it {str(reply['refused'])[:200]}")
            elif "raised" in reply:
                raised = reply["raised"]
                names = [str(name)[:100] for name in raised["type"][:20]] or ["an exception"]
                texts = str(raised["message"])[:500], str(raised["line"])[:200]
                raise Raised(names, *texts, str(raised.get("function", ""))[:100])
            else:
                return wire.decode(reply["value"], lambda number, kind: Remote(self, number, kind, label))
        except (EOFError, OSError, ValueError):
            self._kill("")
        except (wire.WireError, TypeError, KeyError, AttributeError, MemoryError, RecursionError):
            self._kill("the process of your code answered with nonsense")
        raise Ended(self._why_killed or self._exit_text())

    def _is_over(self) -> bool:
        return bool(self._why_killed) or self._process.poll() is not None

    def _exit_text(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"your code crashed its process ({signal_name(-code)})"
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


class Pipe:
    """One end of a pipe to a process; given up when `is_over()` and nothing moves any more.

    Without that a program which the answer left behind, and which has the other end too, would keep the
    grader waiting.
    """

    def __init__(self, stream: Any, is_over: Callable[[], bool]) -> None:
        self._stream, self._is_over = stream, is_over
        if os.name == "posix":
            os.set_blocking(stream.fileno(), False)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer when the pipe has ended."""
        if os.name != "posix":
            return bytes(self._stream.read(size))
        data = bytearray()
        while len(data) < size:
            if select.select([self._stream], [], [], WAIT_SECONDS)[0]:
                part = os.read(self._stream.fileno(), min(size - len(data), 2**20))
                if not part:
                    break
                data += part
            elif self._is_over():
                break
        return bytes(data)

    def write(self, data: bytes) -> None:
        """All of `data`. OSError when nobody takes it any more."""
        if os.name != "posix":
            self._stream.write(data)
            return
        left = memoryview(data)
        while left:
            if select.select([], [self._stream], [], WAIT_SECONDS)[1]:
                left = left[os.write(self._stream.fileno(), left) :]
            elif self._is_over():
                raise BrokenPipeError("the process is gone")

    def flush(self) -> None:
        if os.name != "posix":
            self._stream.flush()


def text_of(op: str, fields: Mapping[str, Any]) -> str:
    """A request as the learner would write it, as in "MyBlockPool(4).allocate(2)"."""
    of = _brief(fields["of"]) if "of" in fields else ""
    if op in ("get", "set"):
        return f"{of}.{fields['name']}"
    if op == "item":
        return f"{of}[{_brief(fields['key'])}]"
    if op == "call":
        named = [f"{name}={_brief(value)}" for name, value in fields["kwargs"].items()]
        return f"{of}({', '.join([*map(_brief, fields['args']), *named])})"
    return str(fields["name"]) if op == "name" else _brief(fields["value"])


def _brief(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_label") or "…"
    if hasattr(type(value), "shape"):
        return f"a tensor {tuple(value.shape)}" if value.ndim else str(value.item())
    text = repr(value)
    return text if len(text) <= WIDEST_ARGUMENT else text[: WIDEST_ARGUMENT - 1] + "…"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def forbidden_folders() -> list[str]:
    """Where answers stand: the engine, the course, and all else in the repository but its Python.

    The repository is the folder of an installed checkout and the one that the grader runs in.
    """
    found = {ENGINE, COURSE}
    python = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix)]
    for root in {COURSE.parent, Path.cwd()}:
        if (root / "solutions").is_dir():
            found |= {path.resolve() for path in root.iterdir() if path.is_dir()}
    return sorted(str(path) for path in found if not any(own.is_relative_to(path) for own in python))


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
