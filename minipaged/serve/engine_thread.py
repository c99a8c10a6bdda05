"""The engine's thread. Everything that changes the engine happens here, between two steps.

Other threads hand functions over with `call` and never wait for a step. What a step reports leaves through
the sink, whose methods are called in this thread and must return at once.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minipaged.core.request import ParentRequest
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput
from minipaged.serve.snapshot import Camera, Recorder

BLOCKS, STRIPS = "blocks", "strips"  # the lanes: the server's engine, and contiguous memory shown beside it
log = logging.getLogger("minipaged.serve")


class Sink(Protocol):
    """Takes what the thread has to say."""

    def outputs(self, outputs: list[RequestOutput]) -> None: ...

    def failed(self, request_ids: Sequence[str], reason: str) -> None: ...

    def frame(self, line: str) -> None: ...


class EngineThread:
    """Steps the engine while it has requests and nobody paused it.

    Attributes:
        error: why the last step failed; None while steps succeed.
        paused, delay: set by the page; seconds that every turn waits.
    """

    def __init__(self, llm: LLM, sink: Sink, *, frame_rate: float = 10.0) -> None:
        self.lanes = {BLOCKS: llm}
        self.error: str | None = None
        self.paused, self.delay = False, 0.0
        self._steps = 0  # that may be taken although paused
        self._sink, self._interval = sink, 1 / frame_rate
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._cameras: dict[str, Camera] = {}  # of the page; none while no page is open
        self._shown: dict[str, float] = {}  # lane -> when its last frame was taken
        self._recorder: Recorder | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # From other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, command: Callable[[], object]) -> None:
        """Run `command` in the engine's thread before its next step."""
        self._commands.put(command)

    def add(self, requests: list[ParentRequest], lane: str = BLOCKS) -> None:
        def queue_them() -> None:
            if lane in self.lanes:
                self.lanes[lane].engine.add(requests)

        self.call(queue_them)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, in every lane, and free their blocks before the next step."""
        ids = list(request_ids)
        self.call(lambda: [e.engine.abort_request(i) for e in self.lanes.values() for i in ids])

    def control(self, *, paused: bool | None = None, step: int = 0, delay: float | None = None) -> None:
        def change() -> None:
            self.paused = self.paused if paused is None else paused
            self.delay = self.delay if delay is None else delay
            self._steps = step if self.paused else 0

        self.call(change)

    def watch(self, watched: bool) -> None:
        """Send frames from now on, the first of them whole; or none, and nothing stays slowed down."""

        def change() -> None:
            self._cameras = {n: Camera(e.engine, n, e.name) for n, e in self.lanes.items() if watched}
            if not watched:
                self.paused, self.delay = False, 0.0
            self._hook()
            for camera in self._cameras.values():
                self._sink.frame(_line(camera.header()))
            self._show_all()

        self.call(change)

    def add_lane(self, name: str, llm: LLM) -> None:
        """Step another engine in turn with the first. To be followed by `watch`."""
        self.call(lambda: self.lanes.setdefault(name, llm))

    def remove_lane(self, name: str) -> None:
        """What runs in it is forgotten with it. To be followed by `watch`."""
        self.call(lambda: self.lanes.pop(name, None))

    def record(self, recorder: Recorder) -> None:
        """Write a frame of every step, until the thread ends."""
        self._recorder = recorder
        self._hook()

    def stop(self) -> None:
        """End the thread after the step that is under way; what is unfinished is aborted."""

        def change() -> None:
            self._stopping = True
            for llm in self.lanes.values():
                for request_id in list(llm.engine.requests):
                    llm.engine.abort_request(request_id)

        self.call(change)
        self._thread.join()

    # In the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey(None if self._rests() else 0.0)
                if not self._stopping and not self._rests():
                    self._turn()
                    if self.delay:
                        self._obey(self.delay)
        finally:
            if self._recorder is not None:
                self._recorder.close()

    def _rests(self) -> bool:
        busy = any(llm.engine.has_unfinished_requests() for llm in self.lanes.values())
        return not busy or (self.paused and not self._steps)

    def _obey(self, seconds: float | None) -> None:
        """Run the commands that came; wait for the first up to `seconds`, or for as long as it takes."""
        try:
            command = self._commands.get(seconds != 0, seconds or None)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            pass
        if self._cameras and self._rests():  # no step will show what came or was given up
            self._show_all()

    def _turn(self) -> None:
        """One step of each lane that has something to do."""
        self._steps = max(0, self._steps - 1)
        for name, llm in self.lanes.items():
            if not llm.engine.has_unfinished_requests():
                continue
            try:
                outputs = llm.engine.step()
            except Exception as error:
                self._fail(name, error)
                continue
            self.error = None
            if name == BLOCKS and outputs:
                self._sink.outputs(outputs)
            if self._cameras and not llm.engine.has_unfinished_requests():
                self._show(name)  # the last frame shows what the end left behind

    def _fail(self, name: str, error: Exception) -> None:
        """A step raised: who waits is told, everything is given back, and the next ones may fare better."""
        log.error("a step failed", exc_info=error)
        self.error = f"{type(error).__name__}: {error}"
        engine = self.lanes[name].engine
        ids = list(engine.requests)
        for request_id in ids:
            engine.abort_request(request_id)
        if name == BLOCKS:
            self._sink.failed(ids, f"the engine failed: {self.error}")

    # Frames

    def _hook(self) -> None:
        for name, llm in self.lanes.items():
            watched = bool(self._cameras) or (name == BLOCKS and self._recorder is not None)
            llm.engine.on_step = self._look(name) if watched else None

    def _look(self, name: str) -> Callable[[Any], None]:
        def on_step(plan: Any) -> None:
            if self._recorder is not None and name == BLOCKS:
                self._recorder.write_step()
            if self._cameras:
                due = time.monotonic() - self._shown.get(name, 0.0) >= self._interval
                if due or self.paused or self.delay >= self._interval:
                    self._show(name)

        return on_step

    def _show(self, name: str) -> None:
        self._shown[name] = time.monotonic()
        state = {"paused": self.paused, "delay": self.delay}
        self._sink.frame(_line(self._cameras[name].frame() | state))

    def _show_all(self) -> None:
        for name in self._cameras:
            self._show(name)


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
