"""The routes: OpenAI's, and vLLM's beside them. And how an answer is written while its client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minipaged import __version__
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams
from minipaged.serve import ServeSettings
from minipaged.serve.engine_thread import Call, EngineThread
from minipaged.serve.guards import Guard, read
from minipaged.serve.metrics import Metrics
from minipaged.serve.protocol import ApiError, ChatRequest, CompletionRequest, Form, Message, TokenizeRequest


def make_app(api: Api, pages: Sequence[Route] = ()) -> Starlette:
    """The server as an ASGI application. Its engine's thread runs between startup and shutdown."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.thread.start_in(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(api.thread.stop)

    routes = [
        Route("/health", api.health),
        Route("/version", lambda request: JSONResponse({"version": __version__})),
        Route("/metrics", api.show_metrics),
        Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [api.card]})),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
    ]
    guard = Middleware(Guard, settings=api.settings)
    return Starlette(
        routes=[*routes, *pages], middleware=[guard], lifespan=lifespan, exception_handlers=HANDLERS
    )


def on_error(request: Request, error: Exception) -> Response:
    """Every error in OpenAI's form. What the engine refuses is a ValueError with the value and the limit."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    if not isinstance(error, ApiError):
        error = ApiError(400, str(error))
    return JSONResponse(error.body, error.status, {"Retry-After": "1"} if error.status == 429 else {})


HANDLERS: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, ValueError, ClientDisconnect), on_error)


class Api:
    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.llm, self.settings = llm, settings
        self.name = settings.served_model_name or llm.name
        self.thread = EngineThread(llm.engine, settings.max_requests)
        self.metrics = Metrics(llm.engine, self.name)
        self.thread.on_finished = self.metrics.record
        self.card = {"id": self.name, "object": "model", "created": 0, "owned_by": "minipaged"}
        self.card |= {"root": llm.name, "parent": None, "max_model_len": llm.max_model_len}
        self._ids = count()

    def health(self, request: Request) -> Response:
        reason = self.thread.error if self.thread.is_alive() else "the engine has stopped"
        return Response(reason, 200 if reason is None else 503)

    def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self.card)

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"there is no model {name!r} here, this server has {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    # Tokens

    async def tokenize(self, request: Request) -> Response:
        ask = await read(request, TokenizeRequest, self.settings)
        self._require_model(ask.model)
        if (ask.prompt is None) == (ask.messages is None):
            raise ApiError(400, "give one of prompt and messages", "prompt")
        if ask.messages is None:
            tokens = await self._encode(ask.prompt or "", ask.add_special_tokens)
        else:
            tokens = await self._encode_chat(ask.messages)
        decode = self.llm.get_tokenizer().decode
        texts = [decode([t], skip_special_tokens=False) for t in tokens] if ask.return_token_strs else None
        sizes = {"count": len(tokens), "max_model_len": self.llm.max_model_len}
        return JSONResponse(sizes | {"tokens": tokens, "token_strs": texts})

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """In a thread of its own: a long text takes long, and the loop goes on."""
        return await asyncio.to_thread(self.llm.get_tokenizer().encode, text, add_special_tokens)

    async def _encode_chat(self, messages: list[Message]) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        plain = [message.plain(tokenizer.special_tokens) for message in messages]
        text = tokenizer.apply_chat_template(plain)
        return await self._encode(text, add_special_tokens=False)  # the template has them

    # Answers

    async def completions(self, request: Request) -> Answer:
        ask = await read(request, CompletionRequest, self.settings)
        special = ask.add_special_tokens is not False
        ids = [await self._encode(p, special) if isinstance(p, str) else p for p in ask.prompts()]
        return self._answer("cmpl", ask, ids, ask.params(ask.max_tokens, ask.logprobs))

    async def chat(self, request: Request) -> Answer:
        ask = await read(request, ChatRequest, self.settings)
        if ask.top_logprobs and not ask.logprobs:
            raise ApiError(400, f"top_logprobs is {ask.top_logprobs}, it needs logprobs", "top_logprobs")
        max_tokens = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
        params = ask.params(max_tokens, ask.top_logprobs if ask.logprobs else None)
        return self._answer("chatcmpl", ask, [await self._encode_chat(ask.messages)], params)

    def _answer(
        self,
        prefix: str,
        ask: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> Answer:
        """Check everything, queue it, and return what will write the answer."""
        self._require_model(ask.model)
        most, num_answers = self.settings.max_samples, len(prompts) * params.n
        if num_answers > most:
            asked = f"{len(prompts)} prompts with n {params.n} ask for {num_answers} answers"
            raise ApiError(400, f"{asked}, the limit is {most}", "n")
        longest, limit = max(map(len, prompts)), self.llm.max_model_len
        if params.max_tokens is not None and longest < limit < longest + params.max_tokens:
            sizes = f"the prompt has {longest} tokens and max_tokens is {params.max_tokens}"
            code = "context_length_exceeded"
            raise ApiError(400, f"{sizes}: together more than the {limit} of this model", "max_tokens", code)
        requests = []
        for ids in prompts:
            prompt = {"prompt_token_ids": ids, "cache_salt": ask.cache_salt}
            requests.append(self.llm.engine.make_request(f"{prefix}-{next(self._ids)}", prompt, params))
            requests[-1].output_kind = params.output_kind
        form = Form(requests[0].request_id, self.name, ask, params.n)
        return Answer(self.thread, self.thread.submit(requests), form, self.settings.request_seconds)


class Answer(Response):
    """Writes the answer to a call, whole or as server-sent events, as long as the client is there.

    The call is closed in any case: what is unfinished then frees its blocks.
    """

    def __init__(self, thread: EngineThread, call: Call, form: Form, seconds: float) -> None:
        super().__init__()
        self._thread, self._call, self._form, self._seconds = thread, call, form, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        streams, told = self._form.ask.stream, None
        writing = asyncio.ensure_future(self._stream(send) if streams else self._whole(scope, receive, send))
        leaving = asyncio.ensure_future(leave())
        try:
            await asyncio.wait((writing, leaving), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()  # raises what went wrong
            elif not leaving.done():
                raise ApiError(504, f"the request took more than the {self._seconds:g} s it may take")
        except ApiError as error:
            if not streams:
                raise
            told = error.body  # too late for a status
        finally:
            writing.cancel()
            leaving.cancel()
            self._thread.close(self._call)
        if told is not None:
            await send(event(told, "[DONE]", more=False))  # a reader that takes nothing may hold this up

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = []
        async for number, output in self._call.outputs():
            choices += self._form.choices(number, output)
        choices.sort(key=lambda choice: choice["index"])
        body = self._form.head | {"choices": choices, "usage": self._form.usage}
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        form, options = self._form, self._form.ask.stream_options
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for number, output in self._call.outputs():
            if choices := form.choices(number, output):
                await send(event(*[form.head | {"choices": [choice]} for choice in choices]))
        asked = options is not None and options.include_usage
        end = [form.head | {"choices": [], "usage": form.usage}] if asked else []
        await send(event(*end, "[DONE]", more=False))


def event(*data: dict[str, Any] | str, more: bool = True) -> dict[str, Any]:
    """Server-sent events as a part of a body, for ASGI's `send`."""
    texts = [d if isinstance(d, str) else json.dumps(d, ensure_ascii=False) for d in data]
    body = "".join(f"data: {text}\n\n" for text in texts)
    return {"type": "http.response.body", "body": body.encode(), "more_body": more}
