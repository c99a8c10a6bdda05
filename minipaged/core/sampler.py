"""From logits to token ids: one call for the whole batch, every row under its own request's settings.

The steps and their order are vLLM's: minimum length, penalties (repetition, frequency, presence),
temperature, min-p, top-k and top-p (`filters.py`), one draw. A row skips what it does not ask for, and a
batch of plain greedy rows is a single argmax. A request that asks is told log-probabilities: of the chosen
token and of the most likely ones, with their ranks.

A random number is a hash of (seed, index of the sequence, position in the output), not the next value of some
generator. So a seeded request draws the same numbers whatever else runs, and a request that was preempted
and computed again draws what it drew before: there is no state to save.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minipaged.core.filters import apply_filters, column
from minipaged.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What the sampler knows of one sequence. Made once; `output_token_ids` is the live list of the sequence.

    Attributes:
        request_id: names the request in errors.
        params: its settings.
        key: 16 bytes that, with a position, give the random number of that position.
        prompt_token_ids, output_token_ids: what penalties look at. The length of the latter is the position.
        stop_token_ids: tokens that `min_tokens` keeps out, end-of-sequence ones included.
        is_plain: greedy and nothing else: an argmax of the logits as they are.
    """

    request_id: str
    params: SamplingParams
    key: bytes
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: tuple[int, ...]
    is_plain: bool

    @classmethod
    def make(
        cls,
        request_id: str,
        params: SamplingParams,
        *,
        index: int = 0,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        entropy: bytes | None = None,
    ) -> SamplingState:
        """State of sequence `index` (0 … n - 1) of a request.

        Args:
            entropy: stands in for the seed of a request without one; None draws it from the system.
        """
        seed = entropy or secrets.token_bytes(16) if params.seed is None else str(params.seed).encode()
        key = hashlib.blake2b(seed, digest_size=16, person=index.to_bytes(16, "little")).digest()
        stop = tuple(dict.fromkeys((*eos_token_ids, *(params.stop_token_ids or ()))))
        changed = params.has_penalties or params.min_tokens > 0
        plain = params.is_greedy and not changed and params.logprobs is None
        return cls(request_id, params, key, prompt_token_ids, output_token_ids, stop, plain)

    def uniform(self) -> float:
        """The random number in [0, 1) of the next output position; 53 bits, as many as a float64 holds."""
        position = len(self.output_token_ids).to_bytes(8, "little")
        digest = hashlib.blake2b(position, digest_size=8, key=self.key).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(slots=True)
class Logprob:
    """One token's natural log-probability, its rank in the vocabulary (1 is the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class SamplerOutput:
    """One token per row; `logprobs` is None when no row asked, else one entry (or None) per row."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None] | None = None


class BadLogitsError(ValueError):
    """A row of logits allows no choice: it holds NaN or +inf, or every token is at -inf.

    Attributes:
        request_id: whose row it is.
        row: its index in the batch.
    """

    def __init__(self, request_id: str, row: int, value: float):
        super().__init__(f"request {request_id!r}: the largest logit of row {row} is {value}, not finite")
        self.request_id = request_id
        self.row = row


def sample(logits: Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
    """Choose the next token of every row. `logits` is not changed.

    Args:
        logits: [R, V], read as float32.
        states: the R sequences the rows belong to.

    Returns:
        R token ids, and where a row asked for them log-probabilities, of the unchanged logits.

    Raises:
        BadLogitsError: a row with NaN or +inf, or with no allowed token.
    """
    raw = logits = logits.float()
    is_plain = all(state.is_plain for state in states)
    if not is_plain:
        logits = _apply_penalties(_mask_short(logits, states), states)
    token_ids = argmax(logits)
    drawn = [] if is_plain else [row for row, state in enumerate(states) if not state.params.is_greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        is_finite = token_ids[rows] >= 0
        token_ids[rows] = _draw(logits[rows], [states[row] for row in drawn]).where(is_finite, -1)
    chosen = token_ids.tolist()  # here the host waits for the device
    if chosen and min(chosen) < 0:
        checked_argmax(logits, lambda row: states[row].request_id)  # raises, and says which row it was
    return SamplerOutput(chosen, None if is_plain else _logprobs(raw, chosen, states))


def checked_argmax(logits: Tensor, request_of: Callable[[int], str]) -> Tensor:
    """`argmax` of logits [R, V]; BadLogitsError for the first row whose largest logit is not finite.

    `request_of` gives the id of a row's request, for the error.
    """
    token_ids = argmax(logits)
    bad_rows = (token_ids < 0).nonzero()[:, 0]
    if len(bad_rows):
        row = int(bad_rows[0])
        raise BadLogitsError(request_of(row), row, float(logits[row].max()))
    return token_ids


def argmax(x: Tensor) -> Tensor:
    """int64 [R]: where each row of x, [R, V], is largest; of equals the first.

    -1 in a row whose largest number is not finite; NaN counts as the largest. On a CPU numpy searches with
    vector instructions, torch compares one number at a time.
    """
    if x.device.type == "cpu":
        rows = x.detach().numpy()
        found = rows.argmax(axis=1)
        found[~np.isfinite(rows[np.arange(len(rows)), found])] = -1
        return torch.from_numpy(found)
    largest, places = x.max(dim=-1)  # torch promises the first of equals
    return places.where(largest.isfinite(), -1)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution each row is drawn from after temperature and filters: [R, V] float64, rows sum to 1.

    Args:
        logits: [R, V], no row of it greedy, none with NaN or +inf.
    """
    weights = _weights(logits.float(), params).double()
    return weights / weights.sum(dim=-1, keepdim=True)


def _mask_short(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Outputs shorter than `min_tokens` may not end: their stop tokens go to -inf, in a copy."""
    pairs = [
        (row, token_id)
        for row, state in enumerate(states)
        if len(state.output_token_ids) < state.params.min_tokens
        for token_id in state.stop_token_ids
        if token_id < logits.shape[1]
    ]
    if not pairs:
        return logits
    rows, ids = torch.tensor(pairs, device=logits.device).T
    return logits.index_put((rows, ids), logits.new_tensor(-torch.inf))


def _apply_penalties(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Repetition (prompt and output), frequency and presence (output) penalties, in a copy."""
    asked = [row for row, state in enumerate(states) if state.params.has_penalties]
    if not asked:
        return logits
    rows = torch.tensor(asked, device=logits.device)
    params = [states[row].params for row in asked]
    x = logits[rows]
    output = _token_counts([states[row].output_token_ids for row in asked], x)
    seen = (_token_counts([states[row].prompt_token_ids for row in asked], x) + output) > 0
    repetition = column([p.repetition_penalty for p in params], x)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - column([p.frequency_penalty for p in params], x) * output
    x = x - column([p.presence_penalty for p in params], x) * (output > 0)
    return logits.index_copy(0, rows, x)


def _token_counts(token_ids: list[Sequence[int]], like: Tensor) -> Tensor:
    """How often row r's tokens hold each token id: [r, V] float32."""
    num_rows, vocab_size = like.shape
    flat = [row * vocab_size + token for row, tokens in enumerate(token_ids) for token in tokens]
    index = torch.tensor(flat, dtype=torch.int64, device=like.device)
    counts = like.new_zeros(num_rows * vocab_size)  # torch.bincount would make the host wait on a GPU
    return counts.index_add_(0, index, like.new_ones(len(flat))).view(num_rows, vocab_size)


def _weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities after temperature and filters: [r, V] float32, the largest is 1."""
    x = logits - logits.amax(dim=-1, keepdim=True)  # before the division, which could overflow
    x = x / column([p.temperature for p in params], logits)
    return apply_filters(x, params).exp()


def _draw(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """[r] int64: one token per row by inverse transform: the first whose cumulated weight exceeds u × total.

    Sums run in float64 over the vocabulary in order, row by row, so that neighbours change no bit of them.
    """
    cumulated = _weights(logits, [state.params for state in states]).cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.tensor([state.uniform() for state in states], dtype=torch.float64, device=logits.device)
    return torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)[:, 0]


def _logprobs(
    logits: Tensor, token_ids: list[int], states: Sequence[SamplingState]
) -> list[dict[int, Logprob] | None] | None:
    asked = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    if not asked:
        return None
    found: list[dict[int, Logprob] | None] = [None] * len(states)
    counts = [states[row].params.logprobs or 0 for row in asked]
    rows = logits[torch.tensor(asked, device=logits.device)]
    entries = gather_logprobs(rows, [token_ids[row] for row in asked], counts)
    for row, entry in zip(asked, entries, strict=True):
        found[row] = entry
    return found


def gather_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_logprobs: int | Sequence[int]
) -> list[dict[int, Logprob]]:
    """Per row: the chosen token first, then the most likely ones in falling order (the chosen one not twice).

    They describe the model's distribution itself, before penalties, temperature and filters (vLLM's default,
    `raw_logprobs`).

    Prompt log-probabilities are the same question: rows of the prompt, and for each the prompt's next token.

    Args:
        logits: [R, V] float32, as the model gave them.
        token_ids: R chosen tokens.
        num_logprobs: most likely tokens per row, one number or R of them; 0 only the chosen one, -1 all.
    """
    num_rows, vocab_size = logits.shape
    asked = [num_logprobs] * num_rows if isinstance(num_logprobs, int) else num_logprobs
    wanted = [vocab_size if num == -1 else min(num, vocab_size) for num in asked]
    logprobs = logits.log_softmax(dim=-1)
    chosen_ids = logits.new_tensor(token_ids).long()[:, None]  # [R, 1]
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = top_k(logprobs, max(wanted, default=0))
    found = []
    for token, logprob, rank, num, row_values, row_ids in zip(
        token_ids, chosen[:, 0].tolist(), ranks.tolist(), wanted, values.tolist(), ids.tolist(), strict=True
    ):
        entry = {token: Logprob(logprob, rank)}
        for place, (other, value) in enumerate(zip(row_ids[:num], row_values[:num], strict=True), start=1):
            entry.setdefault(other, Logprob(value, place))
        found.append(entry)
    return found


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their places, falling; of equal values the lowest place first.

    `torch.topk` leaves the order of equal values open, and with it the answer on ties.

    Args:
        x: [R, V] without NaN.

    Returns:
        values [R, k] and places [R, k] int64.
    """
    values, ids = x.topk(k, dim=-1)
    if 0 < k < x.shape[1] and ((x >= values[:, -1:]).sum(dim=-1) > k).any():  # a tie across the border
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    ids = ids.sort(dim=-1).values
    values, order = x.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
