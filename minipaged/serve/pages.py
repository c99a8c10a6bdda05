"""The live page's side of the server: its files, the feed of frames, the controls, and users to look at."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from importlib.resources import files
from itertools import count
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from minipaged.engine.llm import LLM
from minipaged.model.loading import LoadedModel
from minipaged.sampling_params import SamplingParams
from minipaged.serve import ServeSettings
from minipaged.serve.calls import Calls
from minipaged.serve.engine_thread import STRIPS
from minipaged.serve.protocol import ApiError, parse
from minipaged.serve.users import MIXES, user_prompt

MAX_PAGES = 8
FILES = {"style.css": "text/css", "words.js": "text/javascript", "player.js": "text/javascript",
         "live.js": "text/javascript"}  # fmt: skip
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
ReadJson = Callable[[Request, ServeSettings], Awaitable[Any]]


class Control(BaseModel):
    """What the page's buttons ask: pause, one step, seconds of delay a step, a request to end, strips."""

    model_config = ConfigDict(strict=True, extra="allow")
    paused: bool | None = None
    step: int = Field(0, ge=0, le=1000)
    delay: float | None = Field(None, ge=0, le=10)
    hang_up: str | None = None
    strips: bool | None = None


class Users(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    count: int = Field(30, ge=1, le=200)
    rate: float = Field(8.0, gt=0, le=1000)
    """Arrivals a second, on average."""
    mix: str = "chat48"


class LivePage:
    def __init__(self, calls: Calls, settings: ServeSettings, read_json: ReadJson) -> None:
        self.calls, self.settings, self._read_json = calls, settings, read_json
        self._users: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._random = random.Random(0)

    def routes(self) -> list[Route]:
        return [
            Route("/", lambda request: self._file("index.html", "text/html")),
            *[Route(f"/page/{name}", lambda request, n=name, k=kind: self._file(n, k))
              for name, kind in FILES.items()],
            Route("/page/frames", self.frames),
            Route("/page/control", self.control, methods=["POST"]),
            Route("/page/users", self.users, methods=["POST"]),
        ]  # fmt: skip

    def _file(self, name: str, kind: str) -> Response:
        return Response(page_file(name), media_type=f"{kind}; charset=utf-8", headers=PAGE_HEADERS)

    async def frames(self, request: Request) -> Response:
        """The feed: a recording that never ends, one JSON object a line."""
        if len(self.calls.pages) >= MAX_PAGES:
            raise ApiError(429, f"{MAX_PAGES} pages watch already, that is the limit", "rate_limit_error")
        inbox: asyncio.Queue[str | None] = asyncio.Queue()

        async def lines() -> Any:
            self.calls.pages.add(inbox)
            self.calls.thread.watch(True)
            try:
                while (line := await inbox.get()) is not None:
                    yield line
            finally:
                self.calls.pages.discard(inbox)
                if not self.calls.pages:
                    self.calls.thread.remove_lane(STRIPS)
                    self.calls.thread.watch(False)

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers=PAGE_HEADERS)

    async def control(self, request: Request) -> Response:
        ask = parse(Control, await self._read_json(request, self.settings))
        thread = self.calls.thread
        if ask.hang_up is not None:
            self.calls.hang_up(ask.hang_up)
        if ask.strips is True and STRIPS not in thread.lanes:
            thread.add_lane(STRIPS, await asyncio.to_thread(self._make_strips))
            thread.watch(bool(self.calls.pages))
        elif ask.strips is False and STRIPS in thread.lanes:
            thread.remove_lane(STRIPS)
            thread.watch(bool(self.calls.pages))
        thread.control(paused=ask.paused, step=ask.step, delay=ask.delay)
        return JSONResponse({})

    def _make_strips(self) -> LLM:
        """The same model and as many bytes; each request reserves a strip for the longest length."""
        llm = self.calls.llm
        length = min(self.settings.strip_length, llm.max_model_len)
        storage, config = llm.engine.storage, llm.engine.config
        budget = storage.spec.bytes_per_block(storage.block_size) * llm.engine.pool.num_blocks
        if budget < storage.spec.bytes_per_block(length):
            raise ApiError(400, f"the cache has {budget} bytes, less than one strip of {length} tokens")
        model: Any = llm.engine.runner.model
        loaded = LoadedModel(model, llm.tokenizer, llm.model_config, llm.name)
        return LLM(
            loaded,
            device=llm.device,
            block_size=length,
            max_model_len=length,
            kv_memory=budget,
            kv_cache_dtype=storage.spec.dtype,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=False,
            watermark=0.0,
        )

    async def users(self, request: Request) -> Response:
        """Users who come at random moments, each with a request of the mix; the page shows what they do."""
        ask = parse(Users, await self._read_json(request, self.settings))
        if ask.mix not in MIXES:
            raise ApiError(400, f"mix is {ask.mix!r}, there are {sorted(MIXES)}", param="mix")
        self.calls.require_room(ask.count)
        task = asyncio.create_task(self._arrive(ask))
        self._users.add(task)
        task.add_done_callback(self._users.discard)
        return JSONResponse({"count": ask.count})

    async def _arrive(self, ask: Users) -> None:
        lengths = MIXES[ask.mix]
        for place in range(ask.count):
            number = next(self._numbers)
            num_prompt, num_output = lengths[place % len(lengths)]
            self._arrive_one(number, ask.mix, num_prompt, num_output)
            await asyncio.sleep(self._random.expovariate(ask.rate))

    def _arrive_one(self, number: int, mix: str, num_prompt: int, num_output: int) -> None:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=num_output, ignore_eos=True)
        for lane, llm in list(self.calls.thread.lanes.items()):
            room = llm.max_model_len - num_output
            if room < 1 or self.calls.closing:
                continue
            ids = user_prompt(llm, mix, number, min(num_prompt, room))
            request = llm.engine.make_request(f"user-{number}", {"prompt_token_ids": ids}, params)
            self.calls.thread.add([request], lane)


def page_file(name: str) -> str:
    """One of the page's files; they are read anew each time, so that a change shows on reload."""
    return (files("minipaged.serve") / "page" / name).read_text(encoding="utf-8")
