"""Rotary embedding, for the exercise that keeps keys."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: int) -> Tensor:
    """`x` [..., head_size], turned by angles that grow with the place of its token in the text; a new tensor.

    The product of a rotated query and a rotated key depends on how far apart their tokens are, not on where.
    """
    half = x.shape[-1] // 2
    angles = position * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
