"""Beam search on forked block tables (PagedAttention paper, section 4.4).

Hypotheses share the blocks of what they have in common: the prompt, and every token before they parted. A
parent with two children is a fork, dropping a hypothesis is a free, and a tail block that two hypotheses
write into is copied first. No key or value is moved otherwise.

Each step ranks every continuation of every live hypothesis by its summed log-probability, ties by the better
parent and then the lower token id. In that order:
  - an end-of-sequence among the first `beam_width` finishes its hypothesis, which gives its blocks up;
  - the first `beam_width` others live on.
The search ends when `beam_width` hypotheses have finished, when none lives, or after `max_tokens` tokens;
then those still alive are candidates too. The result is ordered by score: the sum, with that of the
end-of-sequence token, divided by output length ** length_penalty. The length counts neither the prompt nor
that token, and `tokens` leaves the token out, as vLLM does by default. (vLLM counts the prompt, and searches
on to `max_tokens` when enough have finished.) With one beam this is greedy decoding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minipaged.attention.backend import AttentionBackend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import BlockPool, BlockTable, KVStorage, append_all, blocks_to_append_all
from minipaged.cache.accounting import Sharing
from minipaged.core.runner import Model
from minipaged.core.sampler import checked_argmax, top_k
from minipaged.engine.text import TextTokenizer
from minipaged.sampling_params import BeamSearchParams

PROMPT_CHUNK = 2048  # prompt tokens computed at once, which bounds the activations


@dataclass
class BeamSearchSequence:
    """A hypothesis found. Names as in vLLM: `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    cum_logprob: float
    score: float
    num_prompt_tokens: int
    finish_reason: str
    text: str | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass
class BeamSearchOutput:
    """What a search found, best first: `beam_width` sequences, or all there are if there are fewer.

    blocks_saved: share of block-table entries that cost no block because hypotheses shared it, 0 … 1, over
    the steps after the prompt.
    """

    sequences: list[BeamSearchSequence]
    blocks_saved: float


@dataclass(eq=False)
class Hypothesis:
    """A live hypothesis: its tokens after the prompt, their summed log-probability, its blocks."""

    output: list[int]
    sum_logprob: float
    table: BlockTable


def beam_score(sum_logprob: float, output_length: int, length_penalty: float) -> float:
    """Summed log-probability over output_length ** length_penalty; an output of only its end has length 1."""
    return sum_logprob / max(output_length, 1) ** length_penalty


@dataclass(eq=False)
class BeamSearch:
    """One search. `start` computes the prompt, `step` adds a token; always `close` it: that frees its blocks.

    `live` is ordered, best sum first. `logits` [len(live), V] are those of the tokens that come next.
    """

    model: Model
    pool: BlockPool
    storage: KVStorage
    backend: AttentionBackend
    params: BeamSearchParams
    eos_token_ids: Collection[int]
    max_tokens: int
    live: list[Hypothesis] = field(default_factory=list)
    finished: list[tuple[list[int], float]] = field(default_factory=list)
    sharing: Sharing = field(default_factory=Sharing)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def start(self, prompt_token_ids: Sequence[int]) -> None:
        """Compute the prompt, in chunks. RuntimeError when its blocks are not free."""
        table = BlockTable(self.pool, self.storage.block_size)
        self.live = [Hypothesis([], 0.0, table)]
        for first in range(0, len(prompt_token_ids), PROMPT_CHUNK):
            self._forward([list(prompt_token_ids[first : first + PROMPT_CHUNK])])

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt that the live hypotheses have."""
        return len(self.live[0].output) if self.live else 0

    @property
    def is_done(self) -> bool:
        return (
            not self.live
            or len(self.finished) >= self.params.beam_width
            or self.num_tokens >= self.max_tokens
        )

    def step(self) -> None:
        """Continue every live hypothesis by one token. RuntimeError when the pool is short."""
        self._branch(self._choose())
        if not self.is_done:
            self._forward([[hypothesis.output[-1]] for hypothesis in self.live])
            self.sharing.count([hypothesis.table for hypothesis in self.live])

    def close(self) -> None:
        """Give up every block."""
        for hypothesis in self.live:
            hypothesis.table.free()
        self.live = []

    def _choose(self) -> list[tuple[Hypothesis, int, float]]:
        """Parent, token and sum of each hypothesis that lives on, best first; notes those that finish."""
        width, ends = self.params.beam_width, () if self.params.ignore_eos else self.eos_token_ids
        checked_argmax(self.logits, lambda row: "beam search")  # refuses logits that are not finite
        logits = self.logits.double() / (self.params.temperature or 1.0)
        sums = logits.new_tensor([hypothesis.sum_logprob for hypothesis in self.live])
        totals = (sums[:, None] + logits.log_softmax(dim=-1)).flatten()  # [len(live) * V]
        count = min(width + len(ends) * len(self.live), len(totals))
        values, places = top_k(totals[None], count)
        chosen = []
        for rank, (total, place) in enumerate(zip(values[0].tolist(), places[0].tolist(), strict=True)):
            parent, token = divmod(place, logits.shape[1])
            if total == -torch.inf:
                break
            if token not in ends:
                chosen.append((self.live[parent], token, total))
            elif rank < width:
                self.finished.append((self.live[parent].output, total))
        return chosen[:width]

    def _branch(self, chosen: list[tuple[Hypothesis, int, float]]) -> None:
        """Replace the live hypotheses by their children: the first child takes the parent's table over, the
        others fork it, and only then childless parents give theirs up."""
        heirs = {id(parent) for parent, _, _ in chosen}
        taken: set[int] = set()
        children = []
        for parent, token, total in chosen:
            table = parent.table.fork() if id(parent) in taken else parent.table
            taken.add(id(parent))
            children.append(Hypothesis([*parent.output, token], total, table))
        for parent in self.live:
            if id(parent) not in heirs:
                parent.table.free()
        self.live = children

    def _forward(self, new_tokens: list[list[int]]) -> None:
        """Make room for each live hypothesis' new tokens, copy what must not be shared, run the model."""
        tables = [hypothesis.table for hypothesis in self.live]
        counts = [len(tokens) for tokens in new_tokens]
        needed = blocks_to_append_all(tables, counts)
        copies = append_all(tables, counts)
        if copies is None:
            free = f"{self.pool.num_free} of {self.pool.num_blocks} are free"
            raise RuntimeError(f"beam search needs {needed} more blocks, {free}")
        self.backend.copy_blocks(self.storage, copies)
        device = self.storage.device
        batch = AttentionBatch.build(
            [table.blocks for table in tables],
            counts,
            [table.num_tokens for table in tables],
            self.storage.block_size,
            device,
        )
        token_ids = torch.tensor([token for tokens in new_tokens for token in tokens], device=device)
        hidden = self.model(token_ids, batch, self.storage, self.backend)
        last_rows = batch.query_start[1:].long() - 1
        self.logits = self.model.compute_logits(hidden[last_rows])


def beam_search(
    model: Model,
    pool: BlockPool,
    storage: KVStorage,
    backend: AttentionBackend,
    prompt_token_ids: Sequence[int],
    params: BeamSearchParams,
    *,
    eos_token_ids: Collection[int],
    max_model_len: int,
    tokenizer: TextTokenizer | None = None,
) -> BeamSearchOutput:
    """Search the `beam_width` best continuations of a prompt. Afterwards its blocks are free, whatever
    happened.

    Raises:
        ValueError: an empty prompt, or one that leaves no room for a token; nothing has changed.
        RuntimeError: the pool is too small for the hypotheses.
    """
    prompt = list(prompt_token_ids)
    if not 0 < len(prompt) < max_model_len:
        raise ValueError(
            f"prompt has {len(prompt)} tokens, must be 1 to {max_model_len - 1} (max_model_len - 1)"
        )
    max_tokens = min(params.max_tokens, max_model_len - len(prompt))
    search = BeamSearch(model, pool, storage, backend, params, eos_token_ids, max_tokens)
    try:
        search.start(prompt)
        while not search.is_done:
            search.step()
        found = [(output, total, "stop") for output, total in search.finished]
        if len(found) < params.beam_width:
            found += [(h.output, h.sum_logprob, "length") for h in search.live]
    finally:
        search.close()
    sequences = [
        BeamSearchSequence(
            tokens=prompt + output,
            cum_logprob=total,
            score=beam_score(total, len(output), params.length_penalty),
            num_prompt_tokens=len(prompt),
            finish_reason=reason,
            text=tokenizer.decode(prompt + output) if tokenizer else None,
        )
        for output, total, reason in found
    ]
    sequences.sort(key=lambda sequence: -sequence.score)
    return BeamSearchOutput(sequences[: params.beam_width], search.sharing.saved)
