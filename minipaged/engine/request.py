"""A request and its sequences: what the scheduler moves about.

    WAITING --admitted--> RUNNING --last sequence ends--> FINISHED        (abort: from any state)
                          RUNNING --preempted--> PREEMPTED or SWAPPED --returns--> RUNNING

A request with n > 1 samples computes its prompt once, in its first sequence, and then forks that sequence's
block table to the others. It is preempted and returns as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from minipaged.cache import BlockTable, hash_block
from minipaged.engine.detokenizer import Detokenizer
from minipaged.engine.logprobs import Logprob
from minipaged.engine.outputs import RequestMetrics
from minipaged.engine.sampler import SamplingState
from minipaged.engine.sampling_params import RequestOutputKind, SamplingParams
from minipaged.engine.stop import OutputState
from minipaged.memory import blocks_for


class Status(Enum):
    WAITING = auto()  # never ran
    RUNNING = auto()  # its tables hold blocks of the device pool
    PREEMPTED = auto()  # gave its blocks up; its tokens will be computed again
    SWAPPED = auto()  # its tables hold blocks of the host pool
    FINISHED = auto()


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
    output: OutputState
    sampling: SamplingState
    table: BlockTable
    num_computed: int = 0
    """Tokens whose keys and values are stored; between steps the same as `table.num_tokens`."""
    row: int = -1
    """Its row of the batch builder's block-table matrix while it runs."""
    row_blocks: int = 0
    """Leading blocks of its table that the row already holds."""
    hashes: list[bytes] = field(default_factory=list)
    """Prefix hashes of its leading full blocks, as far as they were needed."""
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    num_reported: int = 0
    """Output tokens that a DELTA stream has seen."""
    namer: Detokenizer | None = None
    """Finds the texts of the tokens in `logprobs`; it has been fed those that have one."""

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
        """Prefix hashes of the full blocks among its first `num_tokens` tokens; each is computed once."""
        known = self.hashes
        for start in range(len(known) * block_size, num_tokens - block_size + 1, block_size):
            salt = self.request.cache_salt
            extra = (("salt", salt),) if salt is not None and start == 0 else ()
            parent = known[-1] if known else None
            known.append(hash_block(parent, self.tokens[start : start + block_size], extra))
        return known[: num_tokens // block_size]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its settings, its `n` sequences and where it stands."""

    request_id: str
    prompt: str | None
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

    def start_over(self) -> None:
        """Nothing is computed, nothing forked: the first live sequence will compute the prompt."""
        self.active = self.live if len(self.live) == 1 else self.live[:1]

    def num_blocks_needed(self, block_size: int) -> int:
        """Blocks that hold all its tokens when its sequences share the prompt's full blocks and no others."""
        shared = self.num_prompt_tokens // block_size
        return shared + sum(blocks_for(len(s.tokens), block_size) - shared for s in self.live)

    def num_blocks_held(self, block_size: int) -> int:
        """Blocks its tables list, those of the prompt's full blocks once."""
        shared = self.num_prompt_tokens // block_size
        return sum(len(s.table.blocks) for s in self.active) - (len(self.active) - 1) * shared
