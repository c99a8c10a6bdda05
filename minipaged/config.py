"""What a model, a cache and an engine are: frozen dataclasses that refuse impossible values.

Every refusal names the field, the value found and what is allowed, before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from minipaged.checks import (
    is_whole,
    require_at_least,
    require_flags,
    require_one_of,
    require_positive_number,
    require_share,
)
from minipaged.dtypes import KV_DTYPES

MOST_SEQS = 2**16

Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch of the rotary frequencies to contexts beyond the trained length.

    Frequencies with a wavelength above `original_max_position_embeddings / low_freq_factor` are divided by
    `factor`; those below `.../high_freq_factor` stay; between the two they are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        require_positive_number(self, "factor", "low_freq_factor", "high_freq_factor")
        require_at_least(self, 1, "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}, it must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one Llama-family model (Touvron et al. 2023, with grouped queries: Ainslie et al. 2023).

    `head_size` is stated on its own: some models have `num_query_heads * head_size != hidden_size`.
    `attention_bias`: queries, keys and values have biases (Qwen2). `qk_norm`: each head of queries and keys
    is normalised before it is turned (Qwen3).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        require_at_least(
            self, 1, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_query_heads",
            "num_kv_heads", "head_size", "max_position_embeddings",
        )  # fmt: skip
        require_positive_number(self, "rms_norm_eps", "rope_theta")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads is {self.num_query_heads}, it must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size is {self.head_size}, rotary embedding needs an even number")
        require_flags(self, "tie_word_embeddings", "attention_bias", "qk_norm")
        for name, ids in (
            ("eos_token_id", self.eos_token_ids),
            ("bos_token_id", token_ids(self.bos_token_id)),
        ):
            for token in ids:
                if not is_whole(token) or not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} is {token!r}, the vocabulary has {self.vocab_size} tokens")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that read one key/value head: query head h reads KV head `h // queries_per_kv`."""
        return self.num_query_heads // self.num_kv_heads


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids in a config's `eos_token_id`, which holds one id, a list of ids or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged cache: `num_blocks` blocks of `block_size` tokens, and `num_host_blocks` more for swap."""

    num_blocks: int
    dtype: torch.dtype
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_blocks", "block_size")
        require_at_least(self, 0, "num_host_blocks")
        require_flags(self, "enable_prefix_caching")
        if self.dtype not in KV_DTYPES:
            supported = ", ".join(map(str, KV_DTYPES))
            raise ValueError(f"cache dtype is {self.dtype}, supported are {supported}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and policies of the scheduler; lengths in tokens."""

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    preemption: Preemption = "recompute"
    watermark: float = 0.01

    def __post_init__(self) -> None:
        require_at_least(self, 1, "max_model_len", "max_num_batched_tokens", "max_num_seqs")
        require_flags(self, "enable_chunked_prefill")
        if self.max_num_seqs > MOST_SEQS:  # each has a row of a block table, whether it runs or not
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}, the most allowed is {MOST_SEQS}")
        require_one_of(self, "preemption", get_args(Preemption))
        require_share(self, "watermark", "[0, 1)")
        budget = self.max_num_batched_tokens
        if budget < self.max_num_seqs:  # every running sequence must be able to decode in each step
            raise ValueError(
                f"max_num_batched_tokens is {budget}, it must reach max_num_seqs ({self.max_num_seqs})"
            )
        if budget < self.max_model_len and not self.enable_chunked_prefill:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, max_model_len is {self.max_model_len}: without chunked "
                "prefill the longest prompt must fit in one step"
            )
