"""What clients ask and are answered: OpenAI's bodies, with vLLM's extra fields.

Values are checked in two places: their kind here, their range by `SamplingParams`. A field that would change
the answer and is not supported is refused by its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from minipaged.core.sampler import Logprob
from minipaged.engine.output_processor import CompletionOutput, RequestOutput

MAX_LOGPROBS = 20  # vLLM's default
LEAST_LOGPROB = -9999.0  # JSON has no infinity
# Fields that change nothing in an answer, and values of unsupported ones that ask for nothing.
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "add_generation_prompt": (True,),
    "detokenize": (True,),
}


class ApiError(Exception):
    """An answer that is a refusal or a failure: HTTP status and OpenAI's error body."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", *, param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(BaseModel):
    """Fields of both requests. None, or a field that is left out, means the default."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # vLLM's
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False

    def params(self, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        """Arguments of `SamplingParams`."""
        names = (
            *("n", "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "top_k"),
            *("min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
            *("skip_special_tokens", "include_stop_str_in_output"),
        )
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"logprobs must be in [0, {MAX_LOGPROBS}], got {logprobs}", param="logprobs")
        return {name: getattr(self, name) for name in names} | {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }


class CompletionRequest(Sampling):
    prompt: StrictStr | list[int] | list[StrictStr] | list[list[int]] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        prompt = self.prompt if self.prompt_token_ids is None else self.prompt_token_ids
        if prompt is None or (self.prompt is not None and self.prompt_token_ids is not None):
            raise ApiError(400, "give one of prompt and prompt_token_ids", param="prompt")
        if not prompt:
            raise ApiError(400, "prompt has 0 tokens, at least 1 is needed", param="prompt")
        listed: list[Any] = (
            [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
        )
        return listed


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[dict[str, Any]]

    def plain(self, place: int, special_tokens: Iterable[str]) -> dict[str, str]:
        """Role and text; the parts of a text are joined. What is no text is refused."""
        where = f"messages[{place}].content"
        refuse_unsupported(self, ignored={"name"}, where=f"messages[{place}].")
        parts = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content
        for part in parts:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type")
                raise ApiError(400, f"{where} has a part of type {kind!r}: only text is supported")
        text = "".join(part["text"] for part in parts)
        for token in special_tokens:
            if token in text:  # it would end the message and let its writer speak in another role
                raise ApiError(400, f"{where} has the special token {token!r}: it is for the template to set")
        return {"role": self.role, "content": text}


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: object) -> Body:
    """The body as `kind`; ApiError names the field that is wrong or not supported."""
    if not isinstance(body, Mapping):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, an object is needed")
    try:
        parsed = kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(p) for p in first["loc"] if not isinstance(p, str) or p.isidentifier())
        raise ApiError(400, f"{path}: {first['msg']}, got {str(first['input'])[:100]}", param=path) from None
    refuse_unsupported(parsed)
    return parsed


def refuse_unsupported(body: BaseModel, ignored: Iterable[str] = IGNORED, where: str = "") -> None:
    """ApiError for the first unknown field that asks for something."""
    for name, value in (body.model_extra or {}).items():
        asks = value not in (None, False, [], {}) and value not in NEUTRAL.get(name, ())
        if asks and name not in ignored:
            shown = str(value)[:100]
            raise ApiError(400, f"{where}{name} is not supported by this server, got {shown}", param=name)


# Answers


def usage(outputs: Iterable[RequestOutput], num_generated: int) -> dict[str, Any]:
    """Token counts of a call; `outputs` are one of each of its requests."""
    found = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_generated,
        "total_tokens": prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in found)},
    }


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def completion_logprobs(entries: list[dict[int, Logprob]], offset: int) -> dict[str, Any]:
    """The older form, of /v1/completions; `offset` is the number of characters before these tokens."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        chosen = next(iter(entry.values()))
        token = chosen.decoded_token or ""
        found["tokens"].append(token)
        found["token_logprobs"].append(_number(chosen.logprob))
        top: dict[str, float] = {}
        for item in entry.values():  # several tokens may have one text; the likeliest comes first
            name = item.decoded_token or ""
            top[name] = max(_number(item.logprob), top.get(name, LEAST_LOGPROB))
        found["top_logprobs"].append(top)
        found["text_offset"].append(offset)
        offset += len(token)
    return found


def chat_logprobs(entries: list[dict[int, Logprob]], num_top: int) -> dict[str, Any]:
    """The newer form, of chats: each token with `num_top` likely ones beside it."""

    def one(item: Logprob) -> dict[str, Any]:
        token = item.decoded_token or ""
        return {"token": token, "logprob": _number(item.logprob), "bytes": list(token.encode())}

    content = []
    for entry in entries:
        chosen = next(iter(entry.values()))
        top = sorted((item for item in entry.values() if item.rank <= num_top), key=lambda item: item.rank)
        content.append({**one(chosen), "top_logprobs": [one(item) for item in top[:num_top]]})
    return {"content": content}


class Form:
    """How the answers to one call are written; one object lives as long as the call.

    `chat` chooses between the two forms of OpenAI's API.
    """

    def __init__(self, call_id: str, model: str, ask: CompletionRequest | ChatRequest) -> None:
        self.ask, self.chat = ask, isinstance(ask, ChatRequest)
        kind = "chat.completion" if self.chat else "text_completion"
        self.head = {"id": call_id, "object": kind, "created": int(time.time()), "model": model}
        self._offsets: dict[int, int] = {}
        self._seen: set[int] = set()
        self._ended: set[int] = set()

    def _logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        if not part.logprobs:
            return None
        if isinstance(self.ask, ChatRequest):
            return chat_logprobs(part.logprobs, self.ask.top_logprobs)
        found = completion_logprobs(part.logprobs, self._offsets.get(index, 0))
        self._offsets[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found

    def _choice(self, number: int, part: CompletionOutput, *, stream: bool) -> dict[str, Any]:
        index = number * self.ask.n + part.index
        choice: dict[str, Any] = {"index": index}
        if not self.chat:
            choice["text"] = part.text
        elif not stream:
            choice["message"] = {"role": "assistant", "content": part.text}
        else:
            choice["delta"] = {"content": part.text}
            if index not in self._seen:
                self._seen.add(index)
                choice["delta"] = {"role": "assistant", "content": part.text}
        choice["logprobs"] = self._logprobs(index, part)
        choice["finish_reason"], choice["stop_reason"] = part.finish_reason, part.stop_reason
        if self.ask.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        return choice

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer to a call that does not stream; `outputs` in the order of its prompts."""
        choices = []
        for number, output in enumerate(outputs):
            for part in output.outputs:
                choices.append(self._choice(number, part, stream=False))
                if self.ask.return_token_ids:
                    choices[-1]["prompt_token_ids"] = output.prompt_token_ids
        generated = sum(len(part.token_ids) for output in outputs for part in output.outputs)
        return self.head | {"choices": choices, "usage": usage(outputs, generated)}

    def chunk(self, number: int, part: CompletionOutput) -> dict[str, Any] | None:
        """One event of a stream; None when there is nothing to tell, as while no text is certain yet."""
        index = number * self.ask.n + part.index
        if index in self._ended:
            return None
        if part.finish_reason is not None:
            self._ended.add(index)
        elif not part.text and not part.logprobs and not (self.ask.return_token_ids and part.token_ids):
            return None
        head = self.head | {"object": "chat.completion.chunk"} if self.chat else self.head
        return head | {"choices": [self._choice(number, part, stream=True)]}
