"""The routes, and the guards that every request passes before them."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minipaged import __version__
from minipaged.engine.llm import LLM
from minipaged.serve import ServeSettings
from minipaged.serve.calls import Call, Calls, final_only, while_connected
from minipaged.serve.metrics import Metrics
from minipaged.serve.pages import LivePage
from minipaged.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Form,
    Message,
    TokenizeRequest,
    parse,
    usage,
)

LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
NO_KEY_NEEDED = {"/health", "/", "/page/style.css", "/page/words.js", "/page/player.js", "/page/live.js"}


def make_app(llm: LLM, settings: ServeSettings) -> Starlette:
    """The server as an ASGI application. Its engine's thread runs between startup and shutdown."""
    calls = Calls(llm, settings)
    api = Api(calls, settings)
    page = LivePage(calls, settings, read_json)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        calls.start()
        yield
        await asyncio.to_thread(calls.thread.stop)

    post = {"methods": ["POST"]}
    routes = [
        Route("/health", api.health),
        Route("/version", lambda request: JSONResponse({"version": __version__})),
        Route("/metrics", api.show_metrics),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, **post),  # type: ignore[arg-type]
        Route("/v1/chat/completions", api.chat, **post),  # type: ignore[arg-type]
        Route("/tokenize", api.tokenize, **post),  # type: ignore[arg-type]
        Route("/detokenize", api.detokenize, **post),  # type: ignore[arg-type]
        *page.routes(),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=HANDLERS)
    app.add_middleware(Guard, settings=settings)
    app.state.calls = calls
    return app


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status == 429 else {}
    return JSONResponse(error.body, error.status, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)


async def on_value_error(request: Request, error: Exception) -> Response:
    """What the engine refuses: its errors name the value and the limit."""
    return JSONResponse(ApiError(400, str(error)).body, 400)


async def on_hang_up(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    ApiError: on_api_error,
    HTTPException: on_http_error,
    ValueError: on_value_error,
    ConnectionError: on_hang_up,
    ClientDisconnect: on_hang_up,
}


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
            raise ApiError(403, f"the host {host!r} is not one of this server's: name it with --allowed-host")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if headers.get("sec-fetch-mode") != "navigate":  # a link that leads here is fine
            foreign |= headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign:
            raise ApiError(403, f"a page of {origin or 'another site'} may not use this server")
        if self._key is not None and path not in NO_KEY_NEEDED:
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._key):
                raise ApiError(
                    401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key"
                )

    def _is_ours(self, host: str) -> bool:
        """Whether the name in the Host header is this server's: a page that calls itself by a name of its own
        and lets it lead here (DNS rebinding) is not."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or (self._any_address and bool(ipaddress.ip_address(name)))
        except ValueError:  # neither an address, nor anything like a host
            return False


async def read_json(request: Request, settings: ServeSettings) -> Any:
    """The body as JSON; ApiError for one that is too long, too slow, or none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind!r}, application/json is needed")
    limit, body = settings.max_body, bytearray()
    too_long = f"the body has more than the {limit} bytes it may have"
    if int(request.headers.get("content-length", 0)) > limit:
        raise ApiError(413, too_long)
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise ApiError(413, too_long)
    except TimeoutError:
        raise ApiError(408, f"the body was not there after {settings.body_seconds:g} s") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


class Api:
    """OpenAI's routes, and vLLM's beside them."""

    def __init__(self, calls: Calls, settings: ServeSettings) -> None:
        self.calls, self.settings, self.llm = calls, settings, calls.llm
        self.name = settings.model_name or self.llm.name
        self.metrics = Metrics(self.llm, self.name)
        calls.on_finished = self.metrics.record
        self._ids = count(1)

    # What the server is

    def health(self, request: Request) -> Response:
        thread = self.calls.thread
        reason = "the engine has stopped" if not thread.is_alive else thread.error
        return Response(status_code=200 if reason is None else 503, content=reason)

    def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    def model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "minipaged"}
        return card | {"root": self.llm.name, "parent": None, "max_model_len": self.llm.max_model_len}

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"there is no model {name!r} here, this server has {self.name!r}"
            raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")

    # Tokens

    async def tokenize(self, request: Request) -> Response:
        ask = parse(TokenizeRequest, await read_json(request, self.settings))
        self._require_model(ask.model)
        if (ask.prompt is None) == (ask.messages is None):
            raise ApiError(400, "give one of prompt and messages", param="prompt")
        if ask.messages is not None:
            tokens = await self._encode_chat(ask.messages)
        else:
            tokens = await self.calls.encode(ask.prompt or "", add_special_tokens=ask.add_special_tokens)
        tokenizer = self.llm.get_tokenizer()
        strings = [tokenizer.decode([t], skip_special_tokens=False) for t in tokens]
        return JSONResponse({
            "count": len(tokens), "max_model_len": self.llm.max_model_len, "tokens": tokens,
            "token_strs": strings if ask.return_token_strs else None,
        })  # fmt: skip

    async def detokenize(self, request: Request) -> Response:
        ask = parse(DetokenizeRequest, await read_json(request, self.settings))
        self._require_model(ask.model)
        vocab = self.llm.model_config.vocab_size
        for token in ask.tokens:
            if not 0 <= token < vocab:
                raise ApiError(400, f"token id {token} is outside the vocabulary, 0 to {vocab - 1}")
        return JSONResponse({"prompt": self.llm.get_tokenizer().decode(ask.tokens)})

    async def _encode_chat(self, messages: list[Message]) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        special = tokenizer.special_tokens
        plain = [message.plain(place, special) for place, message in enumerate(messages)]
        text = tokenizer.apply_chat_template(plain)
        return await self.calls.encode(text, add_special_tokens=False)  # the template has them

    # Answers

    async def completions(self, request: Request) -> ASGIApp:
        ask = parse(CompletionRequest, await read_json(request, self.settings))
        prompts = ask.prompts()
        self._require_samples(len(prompts), ask.n)
        special = ask.add_special_tokens is not False
        encode = self.calls.encode
        ids = [await encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
        return self._answer("cmpl", ask, ids, ask.max_tokens, ask.logprobs)

    async def chat(self, request: Request) -> ASGIApp:
        ask = parse(ChatRequest, await read_json(request, self.settings))
        self._require_samples(1, ask.n)
        if ask.top_logprobs and not ask.logprobs:
            raise ApiError(400, f"top_logprobs is {ask.top_logprobs}, it needs logprobs")
        ids = [await self._encode_chat(ask.messages)]
        limit = ask.max_completion_tokens if ask.max_completion_tokens is not None else ask.max_tokens
        return self._answer("chatcmpl", ask, ids, limit, ask.top_logprobs if ask.logprobs else None)

    def _require_samples(self, num_prompts: int, n: int) -> None:
        limit = self.settings.max_samples
        if num_prompts * n > limit:
            asked = f"{num_prompts} prompts with n {n} ask for {num_prompts * n} answers"
            raise ApiError(400, f"{asked}, the limit is {limit}", param="n")

    def _answer(
        self,
        prefix: str,
        ask: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
    ) -> ASGIApp:
        """Check everything, queue it, and return what will write the answer."""
        self._require_model(ask.model)
        if ask.stream_options is not None and not ask.stream:
            raise ApiError(400, "stream_options need stream", param="stream_options")
        longest = max(map(len, prompts))
        limit = self.llm.max_model_len
        if max_tokens is not None and 0 < longest < limit < longest + max_tokens:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens and max_tokens is {max_tokens}: together more than the "
                f"{limit} of this model",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if max_tokens is None and isinstance(ask, CompletionRequest):
            max_tokens = 16  # OpenAI's default
        params = final_only(ask.params(max_tokens, logprobs), stream=ask.stream)
        self.calls.require_room(len(prompts))
        requests = [self.calls.make_request(prefix, ids, params, ask.cache_salt) for ids in prompts]
        form = Form(requests[0].request_id, self.name, ask)
        call = self.calls.open(requests)
        respond = self._stream if ask.stream else self._whole

        async def response(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await respond(call, form, scope, receive, send)
            except ConnectionError:
                pass  # nobody is there to be told
            finally:
                self.calls.close(call)

        return response

    async def _whole(self, call: Call, form: Form, scope: Scope, receive: Receive, send: Send) -> None:
        async def wait() -> dict[str, Any]:
            found: dict[int, Any] = {}
            async for items in call.outputs():
                found.update(items)
            return form.whole([found[number] for number in range(len(found))])

        body = await while_connected(receive, wait(), self.settings.request_seconds)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, call: Call, form: Form, scope: Scope, receive: Receive, send: Send) -> None:
        """Server-sent events. What came while the reader was slow goes out in one piece."""
        options = form.ask.stream_options
        latest: dict[int, Any] = {}
        generated = 0

        async def put(*events: dict[str, Any] | str, more: bool = True) -> None:
            body = "".join(f"data: {e if isinstance(e, str) else _json(e)}\n\n" for e in events)
            await send({"type": "http.response.body", "body": body.encode(), "more_body": more})

        async def write() -> None:
            nonlocal generated
            async for items in call.outputs():
                events = []
                for number, output in items:
                    latest[number] = output
                    for part in output.outputs:
                        generated += len(part.token_ids)
                        chunk = form.chunk(number, part)
                        if chunk is not None:
                            if options is not None and options.continuous_usage_stats:
                                chunk["usage"] = usage(latest.values(), generated)
                            events.append(chunk)
                if events:
                    await put(*events)

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await while_connected(receive, write(), self.settings.request_seconds)
        except ApiError as error:  # too late for a status
            await put(error.body, "[DONE]", more=False)
            return
        kind = "chat.completion.chunk" if form.chat else "text_completion"
        end = form.head | {"object": kind, "choices": [], "usage": usage(latest.values(), generated)}
        await put(*([end] if options is not None and options.include_usage else []), "[DONE]", more=False)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
