"""InputProcessor: from what a caller asks to a checked `Request`, before anything is queued.

What may be given as a prompt, and how it becomes token ids, is at the end of the file.
"""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from minipaged.config import EngineConfig, ModelConfig
from minipaged.core.kv_cache_manager import KVCacheManager
from minipaged.core.request import ParentRequest, RequestMetrics
from minipaged.core.sampler import SamplingState
from minipaged.engine.text import OutputState, TextTokenizer
from minipaged.memory import blocks_for
from minipaged.sampling_params import BeamSearchParams, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. A mapping may carry a "cache_salt": a
request shares cached blocks only with requests of the same salt."""

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "…"}."""

KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class EngineTokenizer(TextTokenizer, Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, /, add_special_tokens: bool = False) -> list[int]: ...


class InputProcessor:
    """Builds requests with empty block tables; takes no block."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        tokenizer: EngineTokenizer | None,
        manager: KVCacheManager,
        *,
        seed: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.model_config = model_config
        self.config = config
        self.tokenizer = tokenizer
        self._manager = manager
        self._seed, self._clock = seed, clock
        self._num_made = 0

    def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True
    ) -> ParentRequest:
        """Check a prompt and its settings and build the request.

        Raises ValueError, with the value and the limit, for an empty prompt, a token id outside the
        vocabulary or a prompt that leaves no room for one output token; TypeError for what is no prompt or no
        SamplingParams.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is SamplingParams, got {params!r}")
        text, token_ids, salt = self._parse(prompt, add_special_tokens=add_special_tokens)
        limit = self.config.max_model_len
        max_tokens = min(params.max_tokens or limit, limit - len(token_ids))
        request = ParentRequest(request_id, text, token_ids, params, RequestMetrics(self._clock()), salt)
        entropy = self._next_entropy()
        for index in range(params.n):
            output = OutputState(
                self.tokenizer, params, self.model_config.eos_token_ids, max_tokens, token_ids
            )
            sampling = SamplingState.make(
                request_id,
                params,
                index=index,
                prompt_token_ids=token_ids,
                output_token_ids=output.token_ids,
                eos_token_ids=self.model_config.eos_token_ids,
                entropy=entropy,
            )
            request.add_sample(output, sampling, self._manager.new_table())
        return request

    def beam_prompts(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[list[int]]:
        """Token ids of prompts for beam search; ValueError also if the pool might not hold all hypotheses."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"beam search takes BeamSearchParams, got {params!r}")
        found = []
        for prompt in prompts:
            _, token_ids, _ = self._parse(prompt, add_special_tokens=True)
            longest = min(len(token_ids) + params.max_tokens, self.config.max_model_len) - 1
            block_size, num_blocks = self._manager.block_size, self._manager.pool.num_blocks
            shared = len(token_ids) // block_size
            most = shared + params.beam_width * (blocks_for(longest, block_size) - shared)
            if most > num_blocks:
                raise ValueError(
                    f"prompt has {len(token_ids)} tokens, beam_width is {params.beam_width}, max_tokens is "
                    f"{params.max_tokens}: that may need {most} blocks, the pool has {num_blocks}"
                )
            found.append(token_ids)
        return found

    def _parse(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[str | None, list[int], str | None]:
        text, token_ids, salt = parse_prompt(
            prompt, self.tokenizer, self.model_config.vocab_size, add_special_tokens=add_special_tokens
        )
        limit = self.config.max_model_len
        if len(token_ids) >= limit:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens, max_model_len is {limit} with at least one output token"
            )
        return text, token_ids, salt

    def _next_entropy(self) -> bytes | None:
        """Stands in for a missing seed: the same in every run that makes the same requests."""
        self._num_made += 1
        if self._seed is None:
            return None
        return hashlib.blake2b(f"{self._seed} {self._num_made}".encode(), digest_size=16).digest()


def parse_prompt(
    prompt: Prompt, tokenizer: EngineTokenizer | None, vocab_size: int, *, add_special_tokens: bool = True
) -> tuple[str | None, list[int], str | None]:
    """The prompt's text (None if it came as ids), its token ids and its cache salt.

    Raises ValueError for an empty prompt, an id outside the vocabulary, unknown keys, or text without a
    tokenizer; TypeError for anything that is no prompt.
    """
    text, token_ids, salt = _take_apart(prompt)
    if token_ids is None:
        if not isinstance(text, str):
            raise TypeError(f"a prompt is text or token ids, got {type(text).__name__}")
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give token ids instead of text")
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and len(token_ids) > 1 and token_ids[0] == token_ids[1]:
            _warn_of_doubled(token_ids[0], tokenizer)
    ids = [_token_id(token, vocab_size) for token in token_ids]
    if not ids:
        raise ValueError("prompt has 0 tokens, at least 1 is needed")
    return text, ids, salt


def _warn_of_doubled(token_id: int, tokenizer: EngineTokenizer) -> None:
    if token_id in tokenizer.special_token_ids:
        warnings.warn(
            f"the prompt begins with the special token {token_id} twice. A text that a chat template wrote "
            "has it already: give the messages to `chat`, or `tokenizer.encode(text)` as prompt_token_ids",
            stacklevel=2,
        )


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts, of one prompt or of several; a list of numbers is the token ids of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = _as_list(prompts)
    is_one = bool(listed) and not isinstance(listed[0], (str, Mapping, Iterable))
    return [listed] if is_one else listed


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """A list of conversations, of one or of several."""
    listed: list[Any] = list(messages)
    is_one = bool(listed) and isinstance(listed[0], Mapping)
    return [listed] if is_one else [list(conversation) for conversation in listed]


def one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """The settings of each prompt, where one may be given for all, or none."""
    if num_prompts > 1 and isinstance(sampling_params, SamplingParams):
        _warn_of_one_seed(sampling_params, num_prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if not isinstance(sampling_params, (list, tuple)):
        raise TypeError(f"sampling_params is SamplingParams or a list of them, got {sampling_params!r}")
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"{num_prompts} prompts, {len(sampling_params)} sampling_params: give one or as many"
        )
    return list(sampling_params)


def _warn_of_one_seed(params: SamplingParams, num_prompts: int) -> None:
    if params.seed is not None and params.temperature > 0:
        warnings.warn(
            f"seed {params.seed} is given once for {num_prompts} prompts: all draw the same random "
            "numbers, so equal prompts get equal answers. Give a list of SamplingParams, or no seed",
            stacklevel=4,
        )


def _take_apart(prompt: Prompt) -> tuple[Any, Sequence[Any] | None, str | None]:
    if not isinstance(prompt, Mapping):
        return (prompt, None, None) if isinstance(prompt, str) else (None, _as_list(prompt), None)
    unknown = sorted(set(prompt) - KEYS)
    if unknown:
        raise ValueError(f"prompt has the unknown keys {unknown}, known are {sorted(KEYS)}")
    ids = prompt.get("prompt_token_ids")
    if ids is None and "prompt" not in prompt:
        raise ValueError("prompt has neither 'prompt' nor 'prompt_token_ids'")
    return prompt.get("prompt"), None if ids is None else _as_list(ids), _checked_salt(prompt)


def _checked_salt(prompt: Mapping[str, Any]) -> str | None:
    salt = prompt.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise TypeError(f"a cache_salt is text, got {salt!r}")
    salt.encode()  # raises UnicodeEncodeError, a ValueError, now and not when the blocks are hashed
    return salt


def _as_list(prompt: Any) -> list[Any]:
    """The items in order. What has none, or is bytes and not text, is refused."""
    if hasattr(prompt, "tolist"):  # a numpy array or a torch tensor
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, bytearray, Set)) or not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt is text or token ids, got {type(prompt).__name__}")
    return list(prompt)


def _token_id(token: Any, vocab_size: int) -> int:
    if isinstance(token, bool):
        raise TypeError(f"a token id is a whole number, got {token!r}")
    try:
        value = operator.index(token)  # also takes the integers of numpy and torch
    except TypeError:
        raise TypeError(f"a token id is a whole number, got {token!r}") from None
    if not 0 <= value < vocab_size:
        raise ValueError(f"token id {value} is outside the vocabulary, 0 to {vocab_size - 1}")
    return value
