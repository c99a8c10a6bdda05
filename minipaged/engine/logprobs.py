"""Log-probabilities for the user: of the chosen token and of the most likely ones, with their ranks.

They describe the model's distribution itself, before penalties, temperature and filters (vLLM's default,
`raw_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Logprob:
    """One token's natural log-probability, its rank in the vocabulary (1 is the most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def gather_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_logprobs: int | Sequence[int]
) -> list[dict[int, Logprob]]:
    """Per row: the chosen token first, then the most likely ones in falling order (the chosen one not twice).

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
    values, ids = most_likely(logprobs, max(wanted, default=0))
    found = []
    for token, logprob, rank, num, row_values, row_ids in zip(
        token_ids, chosen[:, 0].tolist(), ranks.tolist(), wanted, values.tolist(), ids.tolist(), strict=True
    ):
        entry = {token: Logprob(logprob, rank)}
        for place, (other, value) in enumerate(zip(row_ids[:num], row_values[:num], strict=True), start=1):
            entry.setdefault(other, Logprob(value, place))
        found.append(entry)
    return found


def most_likely(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
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
