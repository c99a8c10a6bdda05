"""The HTTP side of the engine's thread: who waits for which outputs. Used from the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any, TypeVar

from minipaged.core.request import ParentRequest
from minipaged.engine.input_processor import Prompt
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput
from minipaged.sampling_params import RequestOutputKind, SamplingParams
from minipaged.serve import ServeSettings
from minipaged.serve.engine_thread import EngineThread
from minipaged.serve.protocol import ApiError

T = TypeVar("T")
LONG_TEXT = 4_000  # characters; longer prompts are encoded in a thread of their own, the loop goes on


class Call:
    """The requests of one HTTP request, in the order of its prompts."""

    def __init__(self, requests: Sequence[ParentRequest]) -> None:
        self.numbers = {request.request_id: number for number, request in enumerate(requests)}
        self.unfinished = set(self.numbers)
        self.inbox: asyncio.Queue[RequestOutput | ApiError] = asyncio.Queue()

    async def outputs(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """Pairs of a prompt's number and an output, as many as came, until all have finished."""
        while self.unfinished:
            items = [await self.inbox.get()]
            while not self.inbox.empty():
                items.append(self.inbox.get_nowait())
            found = []
            for item in items:
                if isinstance(item, ApiError):
                    raise item
                if item.finished:
                    self.unfinished.discard(item.request_id)
                found.append((self.numbers[item.request_id], item))
            yield found


class Calls:
    """Every call under way, and the pages that watch. The sink of the engine's thread."""

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.llm, self.settings = llm, settings
        self.thread = EngineThread(llm, self, frame_rate=settings.frame_rate)
        self.pages: set[asyncio.Queue[str | None]] = set()
        self.closing = False
        self.on_finished: Callable[[RequestOutput], None] = lambda output: None
        self.num_told = 0  # requests that were ended because the server stopped
        self._calls: dict[str, Call] = {}
        self._ids = count()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    # Opening and closing

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def make_request(
        self, prefix: str, token_ids: list[int], params: SamplingParams, cache_salt: str | None = None
    ) -> ParentRequest:
        """Raises ValueError as `Engine.make_request` does."""
        prompt: Prompt = {"prompt_token_ids": token_ids, "cache_salt": cache_salt}
        request = self.llm.engine.make_request(f"{prefix}-{next(self._ids)}", prompt, params)
        request.output_kind = params.output_kind
        return request

    def open(self, requests: list[ParentRequest]) -> Call:
        """Hand requests to the engine. ApiError with 429 or 503, and nothing queued, if there is no room."""
        self.require_room(len(requests))
        call = Call(requests)
        self._calls.update((request.request_id, call) for request in requests)
        self.thread.add(requests)
        return call

    def require_room(self, num_requests: int) -> None:
        if self.closing:
            raise ApiError(503, "the server is shutting down and takes no new requests", "server_error")
        if not self.thread.is_alive:
            raise ApiError(503, "the engine has stopped", "server_error")
        under_way, limit = len(self._calls), self.settings.max_requests
        if under_way + num_requests > limit:
            raise ApiError(
                429,
                f"{under_way} requests are under way and {num_requests} more were sent, "
                f"the limit is {limit}: try again later",
                "rate_limit_error",
                code="queue_full",
            )

    def close(self, call: Call) -> None:
        """Nobody listens any more: what is unfinished is aborted before the next step."""
        if call.unfinished:
            self.thread.abort(sorted(call.unfinished))
        for request_id in call.numbers:
            self._calls.pop(request_id, None)

    def hang_up(self, request_id: str) -> None:
        """End one request from outside; who waits for it is told."""
        self.thread.abort([request_id])
        self._fail([request_id], ApiError(409, "the request was ended from the live page", "server_error"))

    @property
    def num_under_way(self) -> int:
        return len(self._calls)

    # The sink: called in the engine's thread

    def outputs(self, outputs: list[RequestOutput]) -> None:
        self._post(self._deliver, outputs)

    def failed(self, request_ids: Sequence[str], reason: str) -> None:
        self._post(self._fail, request_ids, ApiError(500, reason, "server_error", code="engine_error"))

    def frame(self, line: str) -> None:
        self._post(self._show, line)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    # In the event loop

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self.on_finished(output)
            call = self._calls.get(output.request_id)
            if call is not None:
                call.inbox.put_nowait(output)
                if output.finished:
                    del self._calls[output.request_id]

    def _fail(self, request_ids: Sequence[str], error: ApiError) -> None:
        for request_id in request_ids:
            call = self._calls.pop(request_id, None)
            if call is not None:
                call.inbox.put_nowait(error)

    def _show(self, line: str) -> None:
        for inbox in list(self.pages):
            if inbox.qsize() > 100:  # a page that does not keep up; it will ask again and start afresh
                self.pages.discard(inbox)
                inbox.put_nowait(None)
            else:
                inbox.put_nowait(line)

    # Stopping

    def shut_down_soon(self) -> None:
        """`shut_down`, from a signal handler or another thread."""
        self._post(self.shut_down)

    def shut_down(self) -> None:
        """Take nothing new, end the pages, and after `drain_seconds` tell those who still wait."""
        if not self.closing:
            self.closing = True
            for inbox in self.pages:
                inbox.put_nowait(None)
            self.thread.control(paused=False, delay=0.0)
            asyncio.get_running_loop().call_later(self.settings.drain_seconds, self._tell)

    def _tell(self) -> None:
        ids = list(self._calls)
        self.num_told += len(ids)
        self.thread.abort(ids)
        seconds = self.settings.drain_seconds
        reason = f"the server is shutting down; the request was unfinished after {seconds:g} s"
        self._fail(ids, ApiError(503, reason, "server_error", code="shutting_down"))


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Awaitable[T], seconds: float) -> T:
    """`work`, given up when the client hangs up (ConnectionError) or `seconds` have passed (ApiError)."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((done, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        if gone.done():
            raise ConnectionError("the client hung up")
        raise ApiError(504, f"the request took more than the {seconds:g} s it may take", "timeout_error")
    finally:
        done.cancel()
        gone.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)


def final_only(params: dict[str, Any], *, stream: bool) -> SamplingParams:
    """SamplingParams that report each step to a stream, and only the end to anybody else."""
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**params, output_kind=kind)
