"""The live page's side of the server: its files, the feed of frames, and the controls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.resources import files

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from minipaged.config import CacheConfig
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM
from minipaged.live.users import Arrivals, Users
from minipaged.recording import Camera, line
from minipaged.serve import ServeSettings
from minipaged.serve.engine_thread import EngineThread
from minipaged.serve.guards import read
from minipaged.serve.protocol import ApiError, Body

STRIPS, STRIP_LENGTH = "strips", 512  # the lane of contiguous memory, and the tokens of a strip
FRAME_SECONDS = 0.1  # between two frames
MAX_PAGES, MAX_BEHIND = 8, 100  # open at once; frames that a page may be behind
PAGE = files("minipaged.live") / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Control(Body):
    """What the page's buttons ask: pause, steps although paused, seconds a step, contiguous memory beside."""

    paused: bool | None = None
    step: int = Field(0, ge=0, le=1000)
    delay: float | None = Field(None, ge=0, le=10)
    strips: bool | None = None


class LivePage:
    def __init__(self, llm: LLM, thread: EngineThread, settings: ServeSettings) -> None:
        self._llm, self._thread, self._settings = llm, thread, settings
        self._pages: set[asyncio.Queue[str | None]] = set()  # used in the event loop
        self._cameras: list[Camera] = []  # used in the engine's thread
        self._due = 0.0
        self._arrivals = Arrivals(llm, thread, settings.max_requests)
        thread.on_closing = self.close

    def routes(self) -> list[Route]:
        return [
            Route("/", self.file),
            Route("/page/frames", self.frames),
            Route("/page/control", self.control, methods=["POST"]),
            Route("/page/users", self.users, methods=["POST"]),
            Route("/page/{name}", self.file),
        ]

    def file(self, request: Request) -> Response:
        """One of the page's files, read anew each time, so that a change shows on reload."""
        name = request.path_params.get("name", "index.html")
        kind = KINDS.get(name[name.rfind(".") :])
        if kind is None or not (PAGE / name).is_file():
            raise ApiError(404, f"the page has no file {name!r}")
        return Response((PAGE / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    # Frames

    async def frames(self, request: Request) -> Response:
        """The feed: a recording that never ends, one JSON object a line."""
        if len(self._pages) >= MAX_PAGES:
            raise ApiError(429, f"{MAX_PAGES} pages are open already, that is the limit")
        return StreamingResponse(self._lines(), media_type="application/x-ndjson", headers=HEADERS)

    async def _lines(self) -> AsyncIterator[str]:
        page: asyncio.Queue[str | None] = asyncio.Queue()
        self._pages.add(page)
        self._thread.run_soon(self._begin)
        try:
            while (text := await page.get()) is not None:
                yield text
        finally:
            self._pages.discard(page)
            if not self._pages:
                self._thread.run_soon(self._end)

    def close(self) -> None:
        """End the feeds."""
        for page in self._pages:
            page.put_nowait(None)

    def _show(self, text: str) -> None:
        for page in self._pages:
            page.put_nowait(text if page.qsize() < MAX_BEHIND else None)  # it will ask again, and begin anew

    # In the engine's thread

    def _begin(self) -> None:
        """Show everything from the start to all pages, from now on."""
        lanes = self._thread.lanes.items()
        self._cameras = [Camera(engine, lane, self._llm.name) for lane, engine in lanes]
        for camera in self._cameras:
            self._thread.post(self._show, line(camera.header()))
        self._due, self._thread.on_turn = 0.0, self._look

    def _end(self) -> None:
        """No page is open: nothing is made for one, and the engine runs as if there had been none."""
        self._cameras, self._thread.on_turn = [], None
        self._thread.paused, self._thread.delay = False, 0.0
        self._thread.lanes.pop(STRIPS, None)

    def _look(self) -> None:
        thread, now = self._thread, time.monotonic()
        if now >= self._due or thread.delay >= FRAME_SECONDS or thread.rests():
            self._due = now + FRAME_SECONDS
            state = {"paused": thread.paused, "delay": thread.delay}
            for camera in self._cameras:
                thread.post(self._show, line(camera.frame() | state))

    def _set_strips(self, engine: Engine | None) -> None:
        """What runs in the strips that were there is forgotten with them."""
        self._thread.lanes.pop(STRIPS, None)
        if engine is not None and self._cameras:
            self._thread.lanes[STRIPS] = engine
        if self._cameras:
            self._begin()

    # What the page asks

    async def control(self, request: Request) -> Response:
        ask = await read(request, Control, self._settings)
        if ask.strips is not None:
            strips = await asyncio.to_thread(self._make_strips) if ask.strips else None
            self._thread.run_soon(lambda: self._set_strips(strips))
        asked = {"paused": ask.paused, "steps": ask.step, "delay": ask.delay}
        self._thread.control(**{name: value for name, value in asked.items() if value is not None})
        return JSONResponse({})

    def _make_strips(self) -> Engine:
        """The same model and as many bytes; each request reserves a strip for the longest length."""
        engine, length = self._llm.engine, min(STRIP_LENGTH, self._llm.max_model_len)
        num_tokens = engine.pool.num_blocks * engine.cache_config.block_size
        if num_tokens < length:
            raise ApiError(400, f"the cache holds {num_tokens} tokens, a strip would take {length}")
        strips = CacheConfig(
            num_blocks=num_tokens // length,
            block_size=length,
            dtype=engine.cache_config.dtype,
            enable_prefix_caching=False,
        )
        return Engine(
            engine.runner.model,
            strips,
            replace(engine.config, max_model_len=length, preemption="recompute", watermark=0.0),
            tokenizer=self._llm.tokenizer,
            backend=engine.runner.backend,
            device=self._llm.device,
        )

    async def users(self, request: Request) -> Response:
        ask = await read(request, Users, self._settings)
        self._arrivals.begin(ask)
        return JSONResponse({"count": ask.count})
