"""A request, what the samples of one call have in common, and the plan of one step.

    WAITING --admitted--> RUNNING --its output ends--> FINISHED           (abort: from any state)
                          RUNNING --preempted--> PREEMPTED or SWAPPED --returns--> RUNNING

A request is one sequence of tokens. A call that asks for n samples becomes n requests with one parent, queued
one after the other. The first computes the prompt; the others then fork its block table, and from there on
each goes its own way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from minipaged.cache import BlockCopy, BlockTable, PrefixStats, hash_blocks
from minipaged.cache.accounting import Sharing
from minipaged.core.sampler import Logprob, SamplingState
from minipaged.sampling_params import RequestOutputKind, SamplingParams


class Status(Enum):
    WAITING = auto()  # never ran
    RUNNING = auto()  # its table holds blocks of the device pool
    PREEMPTED = auto()  # gave its blocks up; its tokens will be computed again
    SWAPPED = auto()  # its table holds blocks of the host pool
    FINISHED = auto()


class RequestText(Protocol):
    """What is asked here of a request's output. Its text is the engine's affair (`engine/text.py`)."""

    token_ids: list[int]
    """The output so far."""
    finish_reason: str | None
    """None until it has ended."""

    def check_end(self) -> bool:
        """Whether the newest token ends the output. It may be asked twice about the same token."""

    def finish(self, reason: str) -> None:
        """End the output, unless it has ended."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens and how far it is computed.

    The key and value of the last sampled token are not stored until the step that feeds it, so a decoding
    request misses one token: `num_computed == len(tokens) - 1`.
    """

    parent: ParentRequest
    index: int
    """Which of the parent's samples it is."""
    tokens: list[int]
    """Prompt and output."""
    output: RequestText
    sampling: SamplingState
    table: BlockTable
    status: Status = Status.WAITING
    num_computed: int = 0
    """Tokens whose keys and values are stored, or are stored by the step under way before it reads them;
    between steps the same as `table.num_tokens`."""
    row: int = -1
    """Its row of the batch builder's block-table matrix while it runs."""
    row_blocks: int = 0
    """Leading blocks of its table that the row already holds."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its leading full blocks, as far as they were needed."""
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    num_reported: int = 0
    """Output tokens that a DELTA stream has seen."""

    @property
    def request_id(self) -> str:
        """The caller's name for it, which all samples of a call have."""
        return self.parent.request_id

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    def waiting_siblings(self) -> list[Request]:
        """The samples that fork from this one when it has computed the prompt: later ones without a token.

        None if it has one itself: then they have forked, or will compute the prompt themselves.
        """
        if self.output.token_ids:
            return []
        later = [s for s in self.parent.samples[self.index + 1 :] if not s.output.token_ids]
        return [s for s in later if s.status in (Status.WAITING, Status.PREEMPTED)]

    def add_logprobs(self, entry: dict[int, Logprob] | None) -> None:
        """Note the log-probabilities of the newest token; its own entry comes first."""
        if entry is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.append(entry)
            chosen = next(iter(entry.values()))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + chosen.logprob

    def hashes_of(self, num_tokens: int, block_size: int) -> list[bytes]:
        """Hashes of the full blocks among its first `num_tokens` tokens; each is computed once."""
        num_full = num_tokens // block_size
        if num_full > len(self.hashes):
            salt = self.parent.cache_salt
            self.hashes = hash_blocks(self.tokens[:num_tokens], block_size, salt=salt, known=self.hashes)
        return self.hashes[:num_full]

    def restart(self, table: BlockTable) -> None:
        """Keep the tokens of the output and nothing else: they will be computed again, in `table`, which is
        empty. All that is known of the output then agrees with its tokens, wherever a step was cut short."""
        said = self.output.token_ids
        self.tokens[self.parent.num_prompt_tokens :] = said
        self.table, self.num_computed, self.row, self.row_blocks, self.hashes = table, 0, -1, 0, []
        if self.logprobs is not None:  # a token's entry is noted before the token
            del self.logprobs[len(said) :]
            chosen = [next(iter(entry.values())).logprob for entry in self.logprobs]
            self.cumulative_logprob = sum(chosen) if chosen else None


@dataclass(slots=True, eq=False)
class ParentRequest:
    """What a caller asked for: what its `n` samples have in common, and the samples in order."""

    request_id: str
    prompt: str | None
    """The text it came as, handed back to the caller; nothing here reads it."""
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    cache_salt: str | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    """How it is reported after each step that gives it a token; FINAL_ONLY: once, when it has ended."""
    samples: list[Request] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when the first sample was admitted."""

    def add_sample(self, output: RequestText, sampling: SamplingState, table: BlockTable) -> None:
        """One more sample of the prompt, before the request is queued."""
        tokens = self.prompt_token_ids.copy()
        self.samples.append(Request(self, len(self.samples), tokens, output, sampling, table))

    @property
    def streams(self) -> bool:
        """Whether it is reported while it runs."""
        return self.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def unfinished(self) -> list[Request]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.status is not Status.FINISHED]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to what a caller asked for (seconds of the engine's clock) and what they cost.

    Names and meanings are vLLM's.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    """Tokens of all its samples."""
    sharing: Sharing = field(default_factory=Sharing)
    """Blocks that its samples shared, over the steps in which several of them ran."""

    def finish(self, now: float, num_generation_tokens: int) -> None:
        """Note the end, which came with the last token."""
        self.finished_time = self.last_token_time = now
        self.num_generation_tokens = num_generation_tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds, for a request with one sample."""
        if self.last_token_time is None or self.first_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)

    @property
    def blocks_saved(self) -> float:
        """Share of block-table entries that cost no block because its samples shared it, 0 … 1."""
        return self.sharing.saved


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made or `Engine.reset_stats` was called."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    """Tokens computed in chunks, those of a recomputation included."""
    num_generation_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_recomputes: int = 0
    """Preemptions that gave the blocks up."""
    num_swaps: int = 0
    """Preemptions that moved the blocks to the host."""
    prefix: PrefixStats = field(default_factory=PrefixStats)
    """Prompt tokens of admitted requests, and those of them found in the prefix cache."""

    @property
    def num_preemptions(self) -> int:
        return self.num_recomputes + self.num_swaps


@dataclass(slots=True)
class StepPlan:
    """The requests of one step and how many tokens each computes, in any mixture.

    A request whose last token is computed in this step gets a new one. Siblings that fork in it get theirs
    from the row of the request that computed the prompt: they are sampled, and not among `requests`.
    """

    requests: list[Request] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    num_prefill_tokens: int = 0
    sampled: list[Request] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    """For each sampled request the index in `requests` of the one whose last row gives its logits."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Copy-on-write copies to do before the model runs."""
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    """A request that ended while planning, alone in a pool too small for it."""

    def add(self, request: Request, num_tokens: int, *, is_sampled: bool) -> None:
        """The next `num_tokens` tokens of a request. It is sampled if they are all it misses."""
        if is_sampled:
            self.sampled.append(request)
            self.sampled_from.append(len(self.requests))
        self.requests.append(request)
        self.query_lens.append(num_tokens)
        if num_tokens > 1 or not request.output.token_ids:
            self.num_prefill_tokens += num_tokens

    def add_fork(self, sibling: Request) -> None:
        """A request that is sampled from the last row of the request added last."""
        self.sampled.append(sibling)
        self.sampled_from.append(len(self.requests) - 1)

    def num_empty_slots(self, block_size: int) -> int:
        """Slots after the last token of each request, in the block it has begun."""
        return sum([-request.table.num_tokens % block_size for request in self.requests])
