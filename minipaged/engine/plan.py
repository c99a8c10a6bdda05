"""StepPlan: what the scheduler decided for one step, and all that the model has to be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.cache import BlockCopy
from minipaged.core.request import Request, Sequence


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
    """Running sequences with more than their last token to compute that got none of it in this step."""

    def add_decode(self, sequence: Sequence) -> None:
        self.sampled_from.append(self.num_decodes)
        self.num_decodes += 1
        self.sequences.append(sequence)
        self.query_lens.append(1)
        self.sampled.append(sequence)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens of a sequence whose prompt is not computed yet, or that came back."""
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
        """Slots behind the last token of the running sequences, in the blocks they have begun."""
        # Idle sequences may share their last block; it is counted once.
        idle = {s.table.blocks[-1]: s.table.num_tokens for s in self.idle if s.table.blocks}
        stored = [*[s.table.num_tokens for s in self.sequences], *idle.values()]
        return sum([-num_tokens % block_size for num_tokens in stored])
