"""The live page's side of the server: its files, the feed of frames, the controls, and users to look at."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.resources import files
from itertools import count, cycle, islice
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from minipaged.config import CacheConfig
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams
from minipaged.serve import ServeSettings
from minipaged.serve.engine_thread import SERVED, EngineThread
from minipaged.serve.guards import read
from minipaged.serve.protocol import ApiError, Body
from minipaged.serve.snapshot import Camera, line

STRIPS = "strips"  # the lane of contiguous memory
MAX_PAGES, MAX_BEHIND = 8, 100  # open at once; frames that a page may be behind
PAGE = files("minipaged.serve") / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
# "words" to fill prompts with, and mixes: prompt and generated tokens of each request, in order of arrival
MIXES: dict[str, Any] = json.loads((PAGE / "mixes.json").read_text())
WORDS = MIXES.pop("words")
SHARED, NUM_SHARED = "shared prefix", 64  # a mix in which all prompts begin alike, and how many tokens do
MIXES[SHARED] = [(NUM_SHARED + prompt, output) for prompt, output in MIXES["instruct64"]]


class Control(Body):
    """What the page's buttons ask: pause, steps although paused, seconds a step, contiguous memory beside."""

    paused: bool | None = None
    step: int = Field(0, ge=0, le=1000)
    delay: float | None = Field(None, ge=0, le=10)
    strips: bool | None = None


class Users(Body):
    """Users who come at random moments, `rate` a second, each with a request of the mix."""

    count: int = Field(30, ge=1, le=200)
    rate: float = Field(8.0, gt=0, le=1000)
    mix: str = "chat48"


class LivePage:
    def __init__(self, llm: LLM, thread: EngineThread, settings: ServeSettings) -> None:
        self._llm, self._thread, self._settings = llm, thread, settings
        self._pages: set[asyncio.Queue[str | None]] = set()  # used in the event loop
        self._cameras: list[Camera] = []  # used in the engine's thread
        self._due = 0.0
        self._numbers, self._random = count(1), random.Random(0)
        self._arriving: set[asyncio.Task[None]] = set()

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
        thread, now, interval = self._thread, time.monotonic(), 1 / self._settings.frame_rate
        if now >= self._due or thread.delay >= interval or thread.rests():
            self._due = now + interval
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
        engine, length = self._llm.engine, min(self._settings.strip_length, self._llm.max_model_len)
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
        if ask.mix not in MIXES:
            raise ApiError(400, f"mix is {ask.mix!r}, there are {sorted(MIXES)}", "mix")
        task = asyncio.create_task(self._arrive(ask))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return JSONResponse({"count": ask.count})

    async def _arrive(self, ask: Users) -> None:
        """Queue requests of the mix at random moments, in every lane where they fit."""
        tokenizer, numbers = self._llm.tokenizer, range(min(97, self._llm.model_config.vocab_size))
        words = list(numbers) if tokenizer is None else tokenizer.encode(WORDS)
        with suppress(ApiError):  # the queue is full: the others stay away
            for num_prompt, num_output in islice(cycle(MIXES[ask.mix]), ask.count):
                number = next(self._numbers)
                shared = NUM_SHARED if ask.mix == SHARED else 0
                own = islice(cycle(words), number * 7 % len(words), None)  # users begin in different places
                prompt = [*islice(cycle(words), shared), *islice(own, num_prompt - shared)]
                params = SamplingParams(seed=number, max_tokens=num_output, ignore_eos=True)
                for lane, engine in list(self._thread.lanes.items()):
                    ids = prompt[: max(1, engine.config.max_model_len - num_output)]
                    request = engine.make_request(f"user-{number}", {"prompt_token_ids": ids}, params)
                    if lane == SERVED:
                        self._thread.submit([request])
                    elif len(engine.requests) < self._settings.max_requests:
                        self._thread.run_soon(partial(engine.add, [request]))
                await asyncio.sleep(self._random.expovariate(ask.rate))
