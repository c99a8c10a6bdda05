"""How many bytes the keys and values of a model take, and what fits beside its weights on a card."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minipaged.checks import require_at_least, require_positive_number
from minipaged.dtypes import KV_DTYPES, OF_TORCH

if TYPE_CHECKING:
    from minipaged.config import ModelConfig

SCALE_BYTES = 4  # one float32 scale per token and head, for keys and again for values


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens occupy: the quotient, rounded up."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class KVSpec:
    """The shape of one token's keys and values; every KV byte count in this package comes from here.

    `dtype` is float32, float16, bfloat16, int8 or float8_e4m3fn. The last two carry a float32 scale
    for each token and head, for keys and for values; the scales are part of the KV memory and are counted.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_layers", "num_kv_heads", "head_size")
        if self.dtype not in KV_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_DTYPES)
            raise ValueError(f"KV dtype is {str(self.dtype).removeprefix('torch.')}, must be one of {names}")

    @classmethod
    def from_model(cls, config: ModelConfig, dtype: torch.dtype) -> KVSpec:
        return cls(config.num_layers, config.num_kv_heads, config.head_size, dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether stored keys and values need a scale to be read."""
        return OF_TORCH[self.dtype].has_scale

    @property
    def bytes_per_token(self) -> int:
        """Two vectors (key, value) per layer and KV head, with their scales where the dtype has them."""
        per_head = self.head_size * self.dtype.itemsize + (SCALE_BYTES if self.is_quantized else 0)
        return 2 * self.num_layers * self.num_kv_heads * per_head

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    def bytes_for(self, num_tokens: int, block_size: int) -> int:
        """Bytes of the blocks that hold `num_tokens` tokens; the last block counts whole."""
        return blocks_for(num_tokens, block_size) * self.bytes_per_block(block_size)


def count_parameters(config: ModelConfig) -> int:
    """Weights of a Llama-family model. A tied output head is the embedding and counts once."""
    hidden, head_size = config.hidden_size, config.head_size
    attention = 2 * hidden * head_size * (config.num_query_heads + config.num_kv_heads)  # q and o, k and v
    mlp = 3 * hidden * config.intermediate_size  # gate, up, down
    layer = attention + mlp + 2 * hidden  # two norms
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return embeddings + config.num_layers * layer + hidden  # the last norm


@dataclass(frozen=True)
class MemoryPlan:
    """What a card has left for keys and values, and how many requests live in it.

    `card_bytes` is the memory the process may use; `reserve_bytes` is kept for activations and the framework.
    `bits_per_weight` may be fractional: a 4-bit format with a 16-bit scale for every 32 weights takes 4.5.
    """

    card_bytes: int
    num_parameters: int
    bits_per_weight: float
    reserve_bytes: int
    spec: KVSpec
    block_size: int = 16

    def __post_init__(self) -> None:
        require_positive_number(self, "card_bytes", "num_parameters", "bits_per_weight")
        require_at_least(self, 1, "block_size")
        require_at_least(self, 0, "reserve_bytes")
        if self.kv_bytes < 0:
            raise ValueError(
                f"{self.weight_bytes} bytes of weights and {self.reserve_bytes} in reserve do not fit "
                f"{self.card_bytes} bytes"
            )

    @property
    def weight_bytes(self) -> int:
        return math.ceil(self.num_parameters * self.bits_per_weight / 8)

    @property
    def kv_bytes(self) -> int:
        """Bytes left for keys and values."""
        return self.card_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def num_blocks(self) -> int:
        return self.kv_bytes // self.spec.bytes_per_block(self.block_size)

    @property
    def num_tokens(self) -> int:
        """Token slots in whole blocks."""
        return self.num_blocks * self.block_size

    def requests(self, tokens_per_request: int) -> int:
        """Requests of this length that are in memory at once, none of them sharing blocks."""
        if tokens_per_request < 1:
            raise ValueError(f"tokens_per_request is {tokens_per_request}, must be at least 1")
        return self.num_blocks // blocks_for(tokens_per_request, self.block_size)
