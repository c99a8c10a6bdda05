"""What a connection and a request must pass before anything is done for them: time, size, host, origin, key.

The server around the application is here too, since its connections are what is guarded.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minipaged.serve import ServeSettings
from minipaged.serve.engine_thread import EngineThread
from minipaged.serve.protocol import AnyBody, ApiError, parse

LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
NO_KEY_NEEDED = {"/health", "/"}  # and the files of the page
MAX_HEAD = 2**16  # bytes of a request line and its headers


class Guard:
    """Checks host, origin and key. Pages of other sites may neither call the server nor read from it."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self.app = app
        self._hosts = LOCAL_NAMES | {settings.host, *settings.allowed_hosts}
        self._any_address = settings.host in ("0.0.0.0", "::")
        self._key = None if settings.api_key is None else f"Bearer {settings.api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await JSONResponse(error.body, error.status)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            raise ApiError(403, f"the host {host!r} is not this server's: name it with --allowed-hosts")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if headers.get("sec-fetch-mode") != "navigate":  # a link that leads here is fine
            foreign |= headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign:
            raise ApiError(403, f"a page of {origin or 'another site'} may not use this server")
        is_file = path.startswith("/page/") and path.endswith((".css", ".js"))
        if self._key is not None and path not in NO_KEY_NEEDED and not is_file:
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._key):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _is_ours(self, host: str) -> bool:
        """Whether the name in the Host header is this server's: a page that calls itself by a name of its own
        and lets it lead here (DNS rebinding) is not."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or (self._any_address and bool(ipaddress.ip_address(name)))
        except ValueError:  # neither an address, nor anything like a host
            return False


async def read(request: Request, kind: type[AnyBody], settings: ServeSettings) -> AnyBody:
    """The body as `kind`; ApiError for one that is too long, too slow, no JSON, or not right."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != "application/json":
        raise ApiError(415, f"the content type is {media_type!r}, application/json is needed")
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body:
                    raise ApiError(413, f"the body has more than the {settings.max_body} bytes it may have")
    except TimeoutError:
        raise ApiError(408, f"the body was not there after {settings.body_seconds:g} s") from None
    return parse(kind, bytes(body))


class Connection(HttpToolsProtocol):
    """Ends a connection whose headers do not come, or that takes nothing of its answer for too long."""

    settings: ServeSettings  # set by `make_server`
    _timer: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections + 64:  # not even worth a refusal
            transport.abort()
        self._wait(self.settings.body_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the headers are there
            self._head = 0
            if not self.flow.write_paused:  # what is sent does not excuse from reading
                self._wait(None)
            return
        if self._timer is None:  # bytes that trickle in do not start the time anew
            self._wait(self.settings.body_seconds)
        if self.cycle is None or not self.cycle.more_body:  # not the rest of a body that was refused
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(self.settings.request_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait(None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        """Abort the connection after `seconds`; None: wait for nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """The first signal lets what is under way finish, a second one ends at once."""

    on_exit: Callable[[], None]
    should_exit: bool

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.on_exit()


def make_server(app: Starlette, thread: EngineThread, settings: ServeSettings) -> Server:
    """A server that is ready to `run`."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=type("LimitedConnection", (Connection,), {"settings": settings}),
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=settings.max_connections + 1,  # uvicorn refuses the one that reaches it
        timeout_graceful_shutdown=int(settings.drain_seconds) + 5,
    )
    server = Server(config)
    server.on_exit = lambda: thread.post(thread.shut_down, settings.drain_seconds)
    return server
