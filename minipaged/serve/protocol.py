"""What clients ask and are answered: OpenAI's bodies, with vLLM's extra fields.

Pydantic checks the kinds of a body's own fields; those that say how tokens are chosen are `SamplingParams`'
own, and checked there. A field that would change the answer and is not supported is refused by its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from minipaged.core.sampler import Logprob
from minipaged.engine.output_processor import CompletionOutput, RequestOutput
from minipaged.sampling_params import RequestOutputKind, SamplingParams

MAX_LOGPROBS = 20  # vLLM's default
LEAST_LOGPROB = -9999.0  # JSON has no infinity
SAMPLING = {field.name for field in fields(SamplingParams)}
SAMPLING -= {"max_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind"}
# Fields that change nothing in an answer, and what asks for nothing in one that is not supported.
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "name"}
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
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An answer that is a refusal or a failure: a status, and OpenAI's error body."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Body(BaseModel):
    """A JSON object that a client sends. Null is as good as a field that is left out."""

    model_config = ConfigDict(strict=True, extra="allow")
    passed_on: ClassVar[set[str]] = set()
    """Fields that are kept as they are in `model_extra`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_supported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known = cls.model_fields.keys() | cls.passed_on
        for name, value in body.items():
            empty = value in (None, False, [], {}) or value in NEUTRAL.get(name, ()) or name in IGNORED
            if name not in known and not empty:
                shown = str(value)[:100]
                raise ApiError(400, f"{name} is not supported by this server, got {shown}", name)
        return {name: value for name, value in body.items() if value is not None and name in known}


class StreamOptions(Body):
    include_usage: bool = False


class AnswerRequest(Body):
    """What requests for completions and for chats have in common."""

    passed_on = SAMPLING
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False

    def params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Reported at each step to a stream, and once at the end to anybody else. Raises ValueError."""
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"logprobs must be in [0, {MAX_LOGPROBS}], got {logprobs}", "logprobs")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream", "stream_options")
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        asked = self.model_extra or {}
        return SamplingParams(**asked, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)


class CompletionRequest(AnswerRequest):
    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int | None = 16  # OpenAI's default
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ApiError(400, "give one of prompt and prompt_token_ids", "prompt")
        prompt: Any = self.prompt if self.prompt_token_ids is None else self.prompt_token_ids
        if not prompt:
            raise ApiError(400, "prompt has 0 tokens, at least 1 is needed", "prompt")
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str
    content: str | list[TextPart]

    def plain(self, special_tokens: Iterable[str]) -> dict[str, str]:
        """Role and text for a chat template; the parts of a text are joined."""
        said = self.content
        text = said if isinstance(said, str) else "".join(part.text for part in said)
        for token in special_tokens:
            if token in text:  # it would end the message and let its writer speak in another role
                raise ApiError(400, f"a message has the special token {token!r}: only the template sets it")
        return {"role": self.role, "content": text}


class ChatRequest(AnswerRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """The body as `kind`; ApiError names the field that is wrong or not supported, and its value."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
    path = ".".join(str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int))
    shown = "" if first["type"] == "json_invalid" else f", got {str(first['input'])[:100]}"
    raise ApiError(400, f"{path or 'the body'}: {first['msg']}{shown}", path or None)


# Answers


def completion_logprobs(entries: list[dict[int, Logprob]], offset: int) -> dict[str, Any]:
    """The older form, of /v1/completions; `offset` is the number of characters before these tokens."""
    tokens, chosen, tops, offsets = [], [], [], []
    for entry in entries:
        pairs = [(item.decoded_token or "", max(item.logprob, LEAST_LOGPROB)) for item in entry.values()]
        tokens.append(pairs[0][0])  # the chosen one comes first
        chosen.append(pairs[0][1])
        tops.append(dict(sorted(pairs, key=lambda pair: pair[1])))  # of two with one text the likelier stays
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(entries: list[dict[int, Logprob]], num_top: int) -> dict[str, Any]:
    """The newer form, of chats: each token with the `num_top` likeliest beside it."""

    def one(item: Logprob) -> dict[str, Any]:
        token = item.decoded_token or ""
        return {"token": token, "logprob": max(item.logprob, LEAST_LOGPROB), "bytes": list(token.encode())}

    content = []
    for entry in entries:
        top = sorted((item for item in entry.values() if item.rank <= num_top), key=lambda item: item.rank)
        content.append({**one(next(iter(entry.values()))), "top_logprobs": [one(item) for item in top]})
    return {"content": content}


class Form:
    """How the answers to one call are written; it lives as long as the call.

    `head` begins the body, or each event of a stream.
    """

    def __init__(self, call_id: str, model: str, ask: CompletionRequest | ChatRequest, n: int) -> None:
        self.ask, self._n = ask, n
        kind = "chat.completion" if isinstance(ask, ChatRequest) else "text_completion"
        if ask.stream and isinstance(ask, ChatRequest):
            kind += ".chunk"
        self.head = {"id": call_id, "object": kind, "created": int(time.time()), "model": model}
        self._latest: dict[int, RequestOutput] = {}  # of each prompt
        self._num_generated = 0
        self._lengths: dict[int, int] = {}  # characters that a choice has had
        self._ended: set[int] = set()

    def choices(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new in an output of prompt `number`. Nothing, while no text is certain."""
        self._latest[number], found = output, []
        for part in output.outputs:
            self._num_generated += len(part.token_ids)
            index, ids = number * self._n + part.index, part.token_ids if self.ask.return_token_ids else []
            if index not in self._ended and (part.text or part.logprobs or ids or part.finish_reason):
                begins = index not in self._lengths
                choice = {"index": index} | self._said(index, part)
                choice |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
                if self.ask.return_token_ids:
                    choice["token_ids"] = ids
                    choice |= {"prompt_token_ids": output.prompt_token_ids} if begins else {}
                found.append(choice)
                if part.finish_reason is not None:
                    self._ended.add(index)
        return found

    def _said(self, index: int, part: CompletionOutput) -> dict[str, Any]:
        before = self._lengths.get(index)
        self._lengths[index] = (before or 0) + len(part.text)
        if not isinstance(self.ask, ChatRequest):
            logprobs = completion_logprobs(part.logprobs, before or 0) if part.logprobs else None
            return {"text": part.text, "logprobs": logprobs}
        role = {"role": "assistant"} if before is None else {}
        logprobs = chat_logprobs(part.logprobs, self.ask.top_logprobs) if part.logprobs else None
        message = "delta" if self.ask.stream else "message"
        return {message: role | {"content": part.text}, "logprobs": logprobs}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the whole call so far."""
        prompt = sum(len(output.prompt_token_ids) for output in self._latest.values())
        cached = sum(output.num_cached_tokens for output in self._latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
