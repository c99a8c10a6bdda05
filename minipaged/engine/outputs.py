"""What a caller gets back, and the times of a request. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minipaged.engine.logprobs import Logprob
from minipaged.engine.sharing import Sharing


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to one request (seconds of the engine's clock) and what they cost it."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    """Tokens of all its sequences."""
    sharing: Sharing = field(default_factory=Sharing)
    """Blocks that its sequences shared, over the steps in which several of them ran."""

    def finish(self, now: float, num_generation_tokens: int) -> None:
        """Note the end, which came with the last token."""
        self.finished_time = self.last_token_time = now
        self.num_generation_tokens = num_generation_tokens

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until its first tokens were computed."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival."""
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return _difference(self.finished_time, self.arrival_time)

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds, for a request with one sequence."""
        decode_time = _difference(self.last_token_time, self.first_token_time)
        if decode_time is None or self.num_generation_tokens < 2:
            return None
        return decode_time / (self.num_generation_tokens - 1)

    @property
    def blocks_saved(self) -> float:
        """Share of block-table entries that cost no block because its sequences shared it, 0 … 1."""
        return self.sharing.saved


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` sequences of a request.

    finish_reason: None while it runs; "stop" (end-of-sequence, stop token or stop string), "length"
    (max_tokens, max_model_len, or a pool that is full although nothing else runs) or "abort".
    stop_reason: the stop token id or stop string that ended it; None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as it stands: so far while it runs, whole once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache when the request first ran."""
