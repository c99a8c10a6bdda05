"""Starting and stopping: uvicorn around the application, with limits on its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from minipaged.engine.llm import LLM
from minipaged.serve import ServeSettings
from minipaged.serve.app import make_app
from minipaged.serve.snapshot import Recorder

Protocol: Any = AutoHTTPProtocol  # the parser in C where it is installed


class ImpatientProtocol(Protocol):
    """Closes a connection whose request line and headers do not come, and those beyond the limit."""

    seconds, max_connections = 10.0, 2048  # set by `serve`
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections + 64:  # not even worth a refusal
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """A timer runs until a request's headers are there; bytes that trickle in change nothing."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """The first signal lets what is under way finish, a second one ends at once."""

    on_exit: Callable[[], None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.on_exit()


def make_server(llm: LLM, settings: ServeSettings, record: Path | None = None) -> tuple[Server, Any]:
    """A server that is ready to `run`, and its `Calls`. Raises OSError when `record` cannot be written."""
    app = make_app(llm, settings)
    calls = app.state.calls
    if record is not None:
        calls.thread.record(Recorder(llm.engine, llm.name, record.open("w", encoding="utf-8")))
    limits = {"seconds": settings.body_seconds, "max_connections": settings.max_connections}
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=type("LimitedProtocol", (ImpatientProtocol,), limits),
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=int(settings.drain_seconds) + 5,
    )
    server = Server(config)

    server.on_exit = calls.shut_down_soon
    return server, calls
