"""The engine's thread, and the calls that wait for what it makes.

Everything that changes the engine happens in this thread, between two steps. The event loop hands it
functions with `run_soon` and never waits for a step; what a step reports goes back to the loop and its calls.
How many requests may be under way is bounded: `submit` refuses more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from minipaged.core.request import ParentRequest
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import RequestOutput
from minipaged.serve.protocol import ApiError

SERVED = "blocks"  # the lane of the server's own engine
TRACE_KEPT = 4096  # steps; a server that runs for months must not keep all of them
log = logging.getLogger("minipaged.serve")


class Call:
    """Requests that one client waits for, in the order of its prompts. Used in the event loop."""

    def __init__(self, requests: list[ParentRequest]) -> None:
        self.numbers = {request.request_id: number for number, request in enumerate(requests)}
        self.unfinished = set(self.numbers)
        self.inbox: asyncio.Queue[RequestOutput | ApiError] = asyncio.Queue()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """The outputs as they come, with the numbers of their prompts, until all have finished."""
        while self.unfinished:
            item = await self.inbox.get()
            if isinstance(item, ApiError):
                raise item
            if item.finished:
                self.unfinished.discard(item.request_id)
            yield self.numbers[item.request_id], item


class EngineThread(threading.Thread):
    """Steps the engine while it has requests and nobody paused it.

    Attributes:
        lanes: the engines that take turns: the server's own, and what a page wants to see beside it.
        error: why the last step failed; None while steps succeed.
        paused, steps, delay: set by a page: whether to rest, how many steps to take nevertheless, and seconds
            from the start of a step to that of the next.
        on_turn: called in this thread after each turn, and when it comes to rest. It must return at once.
        on_finished: called in the event loop with each finished output.
        on_closing: called in the event loop when the server begins to shut down.
    """

    def __init__(self, engine: Engine, max_requests: int) -> None:
        super().__init__(name="engine", daemon=True)
        self.lanes = {SERVED: engine}
        self.error: str | None = None
        self.paused, self.steps, self.delay = False, 0, 0.0
        self.on_turn: Callable[[], None] | None = None
        self.on_finished: Callable[[RequestOutput], None] = lambda output: None
        self.on_closing: Callable[[], None] = lambda: None
        self.closing = False
        self.num_told = 0  # requests whose clients were told that the server stops
        self._max_requests = max_requests
        self._calls: dict[str, Call] = {}
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due, self._stopping = 0.0, False

    # In the event loop

    def start_in(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.start()

    @property
    def num_under_way(self) -> int:
        return len(self._calls)

    def submit(self, requests: list[ParentRequest]) -> Call:
        """Queue requests: all of them, or none and ApiError with status 503 or 429."""
        if self.closing or not self.is_alive():
            why = "the server is shutting down" if self.closing else "the engine has stopped"
            raise ApiError(503, f"{why} and takes no new requests")
        if len(self._calls) + len(requests) > self._max_requests:
            asked = f"{len(self._calls)} requests are under way and {len(requests)} more were sent"
            message = f"{asked}, the limit is {self._max_requests}: try again later"
            raise ApiError(429, message, code="queue_full")
        call = Call(requests)
        self._calls.update((request.request_id, call) for request in requests)
        self.run_soon(lambda: self.lanes[SERVED].add(requests))
        return call

    def close(self, call: Call) -> None:
        """Nobody listens any more: what is unfinished frees its blocks before the next step."""
        self._abort(call.unfinished & self._calls.keys())
        for request_id in call.numbers:
            self._calls.pop(request_id, None)

    def shut_down(self, drain_seconds: float) -> None:
        """Take nothing new, and after `drain_seconds` tell those who still wait."""

        def tell() -> None:
            self.num_told += len(self._calls)
            message = f"the server is shutting down; the request was unfinished after {drain_seconds:g} s"
            self._abort(self._calls)
            self._fail(list(self._calls), ApiError(503, message, code="shutting_down"))

        if not self.closing:
            self.closing = True
            self.on_closing()
            self.control(paused=False, delay=0.0)
            asyncio.get_running_loop().call_later(drain_seconds, tell)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self.on_finished(output)
            find = self._calls.pop if output.finished else self._calls.get
            if (call := find(output.request_id, None)) is not None:
                call.inbox.put_nowait(output)

    def _fail(self, request_ids: Collection[str], error: ApiError) -> None:
        for request_id in request_ids:
            if (call := self._calls.pop(request_id, None)) is not None:
                call.inbox.put_nowait(error)

    # From any thread

    def run_soon(self, command: Callable[[], object]) -> None:
        """Run `command` in the engine's thread, before its next step."""
        self._commands.put(command)

    def control(self, **settings: float) -> None:
        """Set `paused`, `steps` or `delay` before the next step."""
        self.run_soon(lambda: vars(self).update(settings))

    def _abort(self, request_ids: Collection[str]) -> None:
        ids = sorted(request_ids)
        self.run_soon(lambda: [engine.abort_request(i) for engine in self.lanes.values() for i in ids])

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run `function` in the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """End the thread after the step that is under way; what is unfinished is aborted."""

        def change() -> None:
            self._stopping = True
            for engine in self.lanes.values():
                abort_all(engine)

        self.run_soon(change)
        self.join()

    # In the engine's thread

    def run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if not self._stopping:
                    self._turn()
        finally:
            stopped = ApiError(500, "the engine has stopped", code="engine_error")
            self.post(lambda: self._fail(list(self._calls), stopped))

    def rests(self) -> bool:
        busy = any(engine.has_unfinished_requests() for engine in self.lanes.values())
        return not busy or (self.paused and not self.steps)

    def _obey(self) -> None:
        """Run the commands that came, and wait for more while there is no step to take, or none is due."""
        while not self._stopping:
            rests = self.rests()
            if rests and self.on_turn is not None and self._commands.empty():
                self.on_turn()  # no step will show what the last command did
            wait = None if rests else max(0.0, self._due - time.monotonic())
            try:
                self._commands.get(wait != 0, wait)()
            except queue.Empty:
                return

    def _turn(self) -> None:
        """One step of each engine that has something to do."""
        self._due = time.monotonic() + self.delay
        self.steps = max(0, self.steps - 1)
        for lane, engine in self.lanes.items():
            if engine.has_unfinished_requests():
                try:
                    outputs = engine.step()
                    self.error = None
                except Exception as error:
                    log.error("a step failed", exc_info=error)
                    self.error = f"{type(error).__name__}: {error}"
                    ids, outputs = abort_all(engine), []
                    failed = ApiError(500, f"the engine failed: {self.error}", code="engine_error")
                    self.post(self._fail, ids if lane == SERVED else [], failed)
                if outputs and lane == SERVED:
                    self.post(self._deliver, outputs)
                while len(engine.trace) > TRACE_KEPT:
                    engine.trace.popleft()
        if self.on_turn is not None:
            self.on_turn()


def abort_all(engine: Engine) -> list[str]:
    """End every request of an engine and free its blocks. Their ids."""
    ids = list(engine.requests)
    for request_id in ids:
        engine.abort_request(request_id)
    return ids
