"""What a user asks of the sampler, checked when it is asked. Names, defaults and meanings are vLLM's.

A wrong value is refused here, before any request exists, by an error that names the value and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, cast

from minipaged.checks import check_flag, check_real, check_seed, check_whole

T = TypeVar("T")
MAX_N = 16384  # vLLM's default bound on parallel samples of one request
MIN_TEMPERATURE = 0.01  # below this a division overflows float32; vLLM raises such values to it as well
# Beyond, float32 logits overflow to inf or NaN. vLLM takes any positive number.
REPETITION_MIN, REPETITION_MAX = 2.0**-64, 2.0**64
PENALTY_MOST = 32.0  # the longest context, 2**31 tokens, to a larger power is infinite as a float64


def _several(name: str, value: Iterable[T] | None) -> tuple[T, ...]:
    """The items, each once. None is none."""
    try:
        return tuple(dict.fromkeys(() if value is None else value))
    except TypeError:  # no list, or a list of lists
        raise ValueError(f"{name} must be a list of single values, got {value!r}") from None


def _stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _several("stop", stop)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must hold non-empty strings, got {text!r}")
    return strings


class RequestOutputKind(Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # nothing before the end


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Attributes:
        n: sequences returned for the prompt, 1 … 16384. They share the prompt's blocks.
        presence_penalty: subtracted from the logit of each token already in the output, in [-2, 2].
        frequency_penalty: the same, times how often the token is in the output, in [-2, 2].
        repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens of the prompt and
            the output, in [2^-64, 2^64]; 1 is off.
        temperature: divides the logits, in [0, 2]. 0 is greedy; values in (0, 0.01) are raised to 0.01.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1]; at least one.
        top_k: keep this many of the most likely tokens; 0, -1 and None are off.
        min_p: drop tokens less likely than this times the most likely one, in [0, 1].
        seed: fixes the random numbers of this request, whatever runs beside it. None draws fresh ones. Given
            once for a list of prompts, each of them draws the same numbers, as in vLLM.
        stop: strings that end the output; cut from the text unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output; kept in `token_ids`, left out of the text.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: most tokens to generate, at least 1. None: up to the context limit.
        min_tokens: no end-of-sequence, stop token or stop string may end the output before this many tokens.
        logprobs: most likely tokens to report per output token, beside the chosen one; -1 is all of them.
        prompt_logprobs: the same for the tokens of the prompt.
        detokenize: produce text. Stop strings need it.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string (or stop token) in the text.
        output_kind: what a stream yields at each step: all so far, what is new, or only the end.

    Raises:
        ValueError: a value outside its range; a stop string without detokenize; n > 1 with temperature 0.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_flags()
        put = object.__setattr__  # the usual way to tidy fields of a frozen dataclass
        strings, token_ids = _stop_strings(self.stop), _several("stop_token_ids", self.stop_token_ids)
        for token_id in token_ids:
            check_whole("a stop_token_id", token_id, 0)
        if strings and not self.detokenize:
            raise ValueError(f"stop strings need detokenize=True, got stop={strings}")
        put(self, "stop", strings)
        put(self, "stop_token_ids", token_ids)
        if self.top_k in (None, -1):
            put(self, "top_k", 0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            put(self, "temperature", MIN_TEMPERATURE)
        if self.is_greedy and self.n > 1:
            raise ValueError(f"n must be 1 with temperature 0 (all samples would be equal), got {self.n}")

    def _check_numbers(self) -> None:
        check_whole("n", self.n, 1, MAX_N)
        check_real("presence_penalty", self.presence_penalty, -2, 2)
        check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        check_real("repetition_penalty", self.repetition_penalty, REPETITION_MIN, REPETITION_MAX)
        check_real("temperature", self.temperature, 0, 2)
        check_real("top_p", self.top_p, 0, 1, open_low=True)
        check_real("min_p", self.min_p, 0, 1)
        if self.top_k is not None:
            check_whole("top_k", self.top_k, -1)
        if self.seed is not None:
            check_seed("seed", self.seed)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), -1)

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is kept after the check."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken and no random number is drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Earlier tokens change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class BeamSearchParams:
    """How beam search runs, with vLLM's names and defaults.

    Attributes:
        beam_width: hypotheses kept after every step, and sequences returned at most.
        max_tokens: most tokens to generate.
        ignore_eos: an end-of-sequence token is a token like any other.
        temperature: divides the logits before log-probabilities are taken, in [0, 2]; 0 leaves them alone.
        length_penalty: exponent, in [-32, 32], of the output length that divides a hypothesis' summed
            log-probability. 0 ranks by the sum; larger values favour longer output.

    Raises:
        ValueError: a value outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1)
        check_whole("max_tokens", self.max_tokens, 1)
        check_real("temperature", self.temperature, 0, 2)
        check_real("length_penalty", self.length_penalty, -PENALTY_MOST, PENALTY_MOST)
        check_flag("ignore_eos", self.ignore_eos)
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
