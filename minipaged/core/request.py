"""A request, its sequences, and the plan of one step: what the scheduler works with.

    WAITING --admitted--> RUNNING --last sequence ends--> FINISHED        (abort: from any state)
                          RUNNING --preempted--> PREEMPTED or SWAPPED --returns--> RUNNING

A request with n > 1 samples computes its prompt once, in its first sequence, and then forks that sequence's
block table to the others. It is preempted and returns as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from minipaged.cache import BlockCopy, BlockTable, hash_blocks
from minipaged.cache.accounting import Sharing
from minipaged.core.sampler import Logprob, SamplingState
from minipaged.memory import blocks_for
from minipaged.sampling_params import RequestOutputKind, SamplingParams


class Status(Enum):
    WAITING = auto()  # never ran
    RUNNING = auto()  # its tables hold blocks of the device pool
    PREEMPTED = auto()  # gave its blocks up; its tokens will be computed again
    SWAPPED = auto()  # its tables hold blocks of the host pool
    FINISHED = auto()


class SequenceOutput(Protocol):
    """What is asked here of a sequence's output. Its text is the engine's affair (`engine/text.py`)."""

    token_ids: list[int]
    """The output so far."""
    finish_reason: str | None
    """None until it has ended."""

    def check_end(self) -> bool:
        """Whether the newest token ends the sequence. It may be asked twice about the same token."""

    def finish(self, reason: str) -> None:
        """End the sequence, unless it has ended."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens.

    The key and value of the last sampled token are not stored until the step that feeds it, so a decoding
    sequence has `num_computed == len(tokens) - 1`.
    """

    request: Request
    index: int
    tokens: list[int]
    """Prompt and output."""
    output: SequenceOutput
    sampling: SamplingState
    table: BlockTable
    num_computed: int = 0
    """Tokens whose keys and values are stored; between steps the same as `table.num_tokens`."""
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
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

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
            self.hashes = hash_blocks(
                self.tokens[:num_tokens], block_size, salt=self.request.cache_salt, known=self.hashes
            )
        return self.hashes[:num_full]

    def restart(self, table: BlockTable) -> None:
        """Keep the tokens of the output and nothing else: they will be computed again, in `table`, which is
        empty. All that is known of the output then agrees with its tokens, wherever a step was cut short."""
        output = self.output
        is_open = output.finish_reason in (None, "length")  # a stop string takes precedence over "length"
        if output.token_ids and is_open:
            output.check_end()
        self.tokens[self.request.num_prompt_tokens :] = output.token_ids
        self.table, self.num_computed, self.row, self.row_blocks, self.hashes = table, 0, -1, 0, []
        if self.logprobs is not None:  # a token's entry is noted before the token
            del self.logprobs[len(output.token_ids) :]
            chosen = [next(iter(entry.values())).logprob for entry in self.logprobs]
            self.cumulative_logprob = sum(chosen) if chosen else None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to one request (seconds of the engine's clock) and what they cost it.

    Names and meanings are vLLM's.
    """

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
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds, for a request with one sequence."""
        if self.last_token_time is None or self.first_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)

    @property
    def blocks_saved(self) -> float:
        """Share of block-table entries that cost no block because its sequences shared it, 0 … 1."""
        return self.sharing.saved


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its settings, its `n` sequences and where it stands."""

    request_id: str
    prompt: str | None
    """The text it came as, handed back to the caller; nothing here reads it."""
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    cache_salt: str | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    """How it is reported after each step that gives it a token; FINAL_ONLY: once, when it has ended."""
    status: Status = Status.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    live: list[Sequence] = field(default_factory=list)
    """The sequences that have not ended."""
    active: list[Sequence] = field(default_factory=list)
    """Those that have a block table: the first live one until the prompt is computed, then `live` itself."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""

    def add_sequence(self, output: SequenceOutput, sampling: SamplingState, table: BlockTable) -> None:
        """One more sample of the prompt, before the request is queued."""
        tokens = self.prompt_token_ids.copy()
        self.sequences.append(Sequence(self, len(self.sequences), tokens, output, sampling, table))
        self.live.append(self.sequences[-1])
        self.unfork()

    @property
    def streams(self) -> bool:
        """Whether it is reported while it runs."""
        return self.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_forked(self) -> bool:
        """Whether every live sequence has its own table; always so with a single one."""
        return self.active is self.live

    @property
    def prefill_target(self) -> int:
        """Tokens to compute before the next sample, or before the other sequences fork off."""
        return len(self.live[0].tokens) if self.is_forked else self.num_prompt_tokens

    def unfork(self) -> None:
        """Nothing is computed: the first live sequence will compute the prompt, then the others fork."""
        self.active = self.live if len(self.live) <= 1 else self.live[:1]

    def num_blocks_needed(self, block_size: int) -> int:
        """Blocks that hold all its tokens when its sequences share the prompt's full blocks and no others."""
        shared = self.num_prompt_tokens // block_size
        return shared + sum(blocks_for(len(s.tokens), block_size) - shared for s in self.live)

    def num_blocks_held(self, block_size: int) -> int:
        """Blocks its tables list, those of the prompt's full blocks once."""
        shared = self.num_prompt_tokens // block_size
        return sum(len(s.table.blocks) for s in self.active) - (len(self.active) - 1) * shared


@dataclass(slots=True)
class StepPlan:
    """The sequences of one step and how many tokens each computes: first the decodes, then the chunks.

    Only sequences whose last token is computed in this step get a new one. A request that has just computed
    the prompt of n samples is sampled n times from the same row.
    """

    sequences: list[Sequence] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    num_decodes: int = 0
    """The leading sequences, which compute the one token sampled last and are all sampled again."""
    num_prefill_tokens: int = 0
    sampled: list[Sequence] = field(default_factory=list)
    sampled_from: list[int] = field(default_factory=list)
    """For each sampled sequence the index in `sequences` of the one whose last row gives its logits."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Copy-on-write copies to do before the model runs."""
    forks: list[Request] = field(default_factory=list)
    """Requests whose other sequences fork off once this step has been computed."""
    ended: list[Request] = field(default_factory=list)
    """A request that ended while planning, alone in a pool too small for it; nothing else is planned then."""
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    idle: list[Sequence] = field(default_factory=list)
    """Running sequences with more than their last token to compute that got none computed in this step."""

    def add_decode(self, sequence: Sequence) -> None:
        self.sampled_from.append(self.num_decodes)
        self.num_decodes += 1
        self.sequences.append(sequence)
        self.query_lens.append(1)
        self.sampled.append(sequence)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens of a prompt, or of a sequence that was preempted and came back."""
        request = sequence.request
        if sequence.num_to_compute == num_tokens:
            drawn = [sequence] if request.is_forked else request.live
            self.sampled_from.extend([len(self.sequences)] * len(drawn))
            self.sampled.extend(drawn)
        if not request.is_forked and sequence.num_computed + num_tokens == request.num_prompt_tokens:
            self.forks.append(request)
        self.sequences.append(sequence)
        self.query_lens.append(num_tokens)
        if num_tokens > 1 or not sequence.output.token_ids:
            self.num_prefill_tokens += num_tokens

    def num_empty_slots(self, block_size: int) -> int:
        """Slots after the last token of the running sequences, in the blocks they have begun."""
        # Idle sequences may share their last block; it is counted once.
        idle = {s.table.blocks[-1]: s.table.num_tokens for s in self.idle if s.table.blocks}
        stored = [*[s.table.num_tokens for s in self.sequences], *idle.values()]
        return sum([-num_tokens % block_size for num_tokens in stored])
