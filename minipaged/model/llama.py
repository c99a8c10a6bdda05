"""A Llama in plain torch, or a model that differs from it by a line (see families.py).

It reads and writes its keys and values through paged attention.

All sequences of a step lie end to end in one row of T tokens: there is no batch dimension and no padding.
Only the attention backend knows where one sequence ends and the next begins; every other layer treats each
token alone.

Sources: LLaMA (Touvron et al. 2023, section 2.2), RMSNorm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020),
rotary embedding (Su et al. 2021, section 3.2), grouped-query attention (Ainslie et al. 2023).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipaged.attention.batch import require_blocks
from minipaged.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from minipaged.attention.backend import AttentionBackend
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import KVStorage, LayerKV


Device = torch.device | str


def empty_weight(*shape: int, dtype: torch.dtype, device: Device) -> nn.Parameter:
    """Memory for a frozen weight, its content undefined until loading fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Embedding(nn.Module):
    """Look up the row of each token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.weight = empty_weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]  # [T] -> [T, hidden]


class Linear(nn.Module):
    """Multiply rows by a weight of shape [out_features, in_features]; Llama adds no bias, Qwen2 one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # [T, in_features] -> [T, out_features]


def new_linear(in_features: int, out_features: int, dtype: torch.dtype, device: Device) -> Linear:
    return Linear(empty_weight(out_features, in_features, dtype=dtype, device=device))


class RMSNorm(nn.Module):
    """Divide each row by its root mean square, in float32, then scale each column."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians that each pair of a head turns per position: float32 [head_size / 2], fastest first."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    frequencies = 1.0 / theta**exponents
    return frequencies if scaling is None else stretch_frequencies(frequencies, scaling)


def stretch_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling: slow pairs turn `factor` times slower, fast ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies  # positions per full turn
    turns = scaling.original_max_position_embeddings / wavelengths  # full turns within the trained context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)  # 0: stretched in full, 1: untouched
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class RotaryEmbedding(nn.Module):
    """The angles of a step's positions: computed in float32, once for all layers, then rounded."""

    frequencies: Tensor  # float32 [head_size / 2], radians per position

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.dtype = dtype
        frequencies = rotary_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 positions [T]: [T, 1, head_size / 2] each, in the model's dtype."""
        angles = positions[:, None, None].float() * self.frequencies  # [T, 1, head_size / 2]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_size / 2]) of each head by its position's angle; x: [T, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention over the paged cache. One matrix makes queries, keys and values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.num_query_heads, self.num_kv_heads = config.num_query_heads, config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.head_size**-0.5
        heads = config.num_query_heads + 2 * config.num_kv_heads
        self.qkv_proj = new_linear(config.hidden_size, heads * config.head_size, dtype, device)
        if config.attention_bias:
            self.qkv_proj.bias = empty_weight(heads * config.head_size, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_size, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(config.head_size, config.rms_norm_eps, dtype, device)
        self.o_proj = new_linear(config.num_query_heads * config.head_size, config.hidden_size, dtype, device)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        num_tokens = x.shape[0]
        heads = self.qkv_proj(x).view(num_tokens, -1, self.head_size)  # [T, query + key + value heads, D]
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = heads.split(
                (self.num_query_heads, self.num_kv_heads, self.num_kv_heads), dim=1
            )
            heads = torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)
        turned, value = heads.split((self.num_query_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        query, key = rotate(turned, cos, sin).split((self.num_query_heads, self.num_kv_heads), dim=1)
        # Write before reading: a token attends to itself too.
        backend.write_kv(layer, key, value, batch.slot_mapping)
        out = backend.paged_attention(query, layer, batch, scale=self.scale)  # [T, query heads, D]
        return self.o_proj(out.reshape(num_tokens, -1))  # [T, query heads * D] -> [T, hidden]


class MLP(nn.Module):
    """SwiGLU: silu(gate) * up, then down. One matrix makes gate and up at once."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.gate_up_proj = new_linear(config.hidden_size, 2 * config.intermediate_size, dtype, device)
        self.down_proj = new_linear(config.intermediate_size, config.hidden_size, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [T, intermediate] each
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each reading a normalised copy of the residual stream and adding to it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attention = Attention(config, dtype, device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, layer, batch, backend)
        return x + self.mlp(self.mlp_norm(x))


class LlamaModel(nn.Module):
    """A Llama whose weights are undefined until `weights.build_model` or `tiny.random_llama` fills them."""

    fuses_argmax = False  # `argmax_tokens` writes all logits down

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: Device = "cpu") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, device) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.rotary = RotaryEmbedding(config, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head = Linear(self.embed_tokens.weight)  # the same memory, not a copy
        else:
            self.lm_head = new_linear(config.hidden_size, config.vocab_size, dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, storage: KVStorage, backend: AttentionBackend
    ) -> Tensor:
        """Run one step: write this step's keys and values, return the final hidden states.

        token_ids: int64 [T], the new tokens of all sequences end to end, as `batch` describes them.
        Returns [T, hidden_size] in the model's dtype.
        """
        require_blocks(batch, storage.num_blocks)  # before a layer writes
        x = self.embed_tokens(token_ids)  # [T, hidden]
        cos, sin = self.rotary(batch.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, storage.layer(index), batch, backend)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary for the rows given: [R, hidden_size] -> float32 [R, vocab_size].

        Pass only the rows that will be sampled: the head is the model's largest matrix.
        """
        return self.lm_head(hidden).float()

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """int64 [R]: the token with the largest logit of each row of `hidden`, [R, hidden_size].

        Of equal ones the lowest; -1 in a row with a logit that is not finite.
        """
        logits = self.compute_logits(hidden)
        return logits.argmax(dim=-1).masked_fill(~logits.isfinite().all(dim=-1), -1)
