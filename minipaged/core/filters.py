"""min-p, top-k and top-p as one question: how many of the most likely tokens may be drawn?

Sort a row. Each of the three filters keeps a prefix of it: min-p the tokens not far below the first, top-k
the first k, top-p the first ones whose probabilities reach p. So each filter is a count, several
filters are the smallest count, and one mask applies it: everything above the m-th largest logit, and of those
equal to it the lowest ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.sampling_params import SamplingParams

FIRST_LOOK = 128  # candidates sorted at first: enough for most top-p sets, far cheaper than the vocabulary


def apply_filters(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Put -inf for what a row's min-p, top-k and top-p, in this order (vLLM's), drop. At least one stays.

    Args:
        x: [R, V] float32, logits divided by the temperature. Not changed.
        params: settings of the R rows.
    """
    asked = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p > 0]
    if not asked:
        return x
    rows = torch.tensor(asked, device=x.device)
    asked_x = x[rows]
    kept = keep_top_k(asked_x, *_largest_and_num_kept(asked_x, [params[row] for row in asked]))
    return x.index_copy(0, rows, kept)


def keep_top_k(x: Tensor, largest: Tensor, counts: Tensor) -> Tensor:
    """Keep exactly `counts[r]` of row r's largest values, -inf for the rest; of equal ones the first stay.

    Args:
        x: [R, V]. largest: [R, K], its largest values, falling, K ≥ max(counts). counts: [R] int64, each ≥ 1.
    """
    smallest_kept = largest.gather(1, counts[:, None] - 1)  # [R, 1]
    keep = x >= smallest_kept
    if (keep.sum(dim=-1) > counts).any():  # a tie at the border
        above = x > smallest_kept
        room = counts[:, None] - above.sum(dim=-1, keepdim=True)
        tied = x == smallest_kept
        keep = above | (tied & (tied.cumsum(dim=-1) <= room))
    return x.masked_fill(~keep, -torch.inf)


def _largest_and_num_kept(x: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Sort as little as decides every row: a first look, and all only if some set reaches beyond it."""
    vocab_size = x.shape[1]
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    size = min(vocab_size, max([FIRST_LOOK, *(k for k in top_k if k < vocab_size)]))
    largest = x.topk(size, dim=-1).values
    counts = _num_kept(x, largest, params, top_k)
    if size < vocab_size and (counts > size).any():
        largest = x.sort(dim=-1, descending=True).values
        counts = _num_kept(x, largest, params, top_k)
    return largest, counts


def _num_kept(x: Tensor, largest: Tensor, params: Sequence[SamplingParams], top_k: list[int]) -> Tensor:
    """[R] int64: tokens each row keeps. More than `largest` holds means: not decided within it.

    Weights are relative to the best token's. Their sums run along the row in a fixed order, so a row's count
    depends neither on its neighbours nor on how much is sorted.
    """
    size, vocab_size = largest.shape[1], x.shape[1]
    best = largest[:, :1]  # [R, 1]
    floor = best + column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], x)
    counts = (largest >= floor).sum(dim=-1).clamp(min=1)  # a row of NaN is refused by the sampler, not here
    counts = torch.where(counts == size, vocab_size, counts)  # the floor may lie further down
    limit = torch.tensor(top_k, device=x.device)
    counts = torch.minimum(counts, limit)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=x.device)
    if (top_p == 1).all():
        return counts
    cumulated = (largest - best).double().exp().cumsum(dim=-1)  # [R, K]
    total = cumulated.gather(1, counts.clamp(max=size)[:, None] - 1)
    no_limit = limit == vocab_size  # top-p then shares out everything above the floor, sorted or not
    if no_limit.any():
        rest = x[no_limit]
        if any(p.min_p > 0 for p in params):
            rest = rest.masked_fill(rest < floor[no_limit], -torch.inf)
        total[no_limit] = 1 / rest.softmax(dim=-1).amax(dim=-1, keepdim=True).double()
    reach = (cumulated < top_p[:, None] * total).sum(dim=-1) + 1
    reach = torch.where(reach > size, vocab_size, reach)
    return torch.where(top_p < 1, torch.minimum(counts, reach), counts)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    return like.new_tensor(values)[:, None]  # [R, 1]
