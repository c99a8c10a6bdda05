"""A model small enough to be run in an exercise: two layers, random weights, attention left to the caller."""

import torch
from torch import Tensor


class TinyModel:
    """A decoder with 6 query heads on 2 KV heads of size 8, and 32 words. The same weights every time."""

    num_layers, num_query_heads, num_kv_heads, head_size, vocab_size = 2, 6, 2, 8, 32

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        hidden, rows = self.num_query_heads * self.head_size, self.num_query_heads + 2 * self.num_kv_heads

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        self._words = weights(self.vocab_size, hidden) * hidden**0.5
        self._in = weights(self.num_layers, rows * self.head_size, hidden)
        self._out = weights(self.num_layers, hidden, hidden)
        self.steps: list[int] = []  # how many tokens each call of `embed` brought

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [n] -> hidden states [n, hidden_size]."""
        self.steps.append(len(tokens))
        return self._words[torch.as_tensor(tokens)]

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [n, 6, 8], key [n, 2, 8], value [n, 2, 8] of tokens at `positions` [n] of their text."""
        rows = (_normal(hidden) @ self._in[layer].T).unflatten(-1, (-1, self.head_size))
        counts = [self.num_query_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = rows.split(counts, dim=1)
        return _rotated(query, positions), _rotated(key, positions), value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention [n, 6, 8] over keys and values [m, 2, 8]; `mask` [n, m] is true for what a query sees."""
        mask = torch.as_tensor(mask).bool()
        if mask.shape != (len(query), len(keys)) or len(keys) != len(values):
            raise ValueError(
                f"{len(query)} queries, {len(keys)} keys, {len(values)} values and a mask {list(mask.shape)}"
            )
        group = self.num_query_heads // self.num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.head_size**-0.5
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The hidden states after the layer, [n, hidden_size]."""
        return hidden + torch.tanh(attended.flatten(1) @ self._out[layer].T)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next word: [n, 32] of hidden states [n, hidden_size], [32] of [hidden_size]."""
        return _normal(hidden) @ self._words.T * hidden.shape[-1] ** -0.5


def _normal(hidden: Tensor) -> Tensor:
    return hidden * (hidden.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()


def _rotated(rows: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: each pair of numbers is turned by an angle that grows with the position."""
    half = rows.shape[-1] // 2
    angles = torch.as_tensor(positions)[:, None, None] * 100.0 ** (-torch.arange(half) / half)
    first, second = rows.split(half, dim=-1)
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat(turned, dim=-1)
