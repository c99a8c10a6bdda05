"""How many bytes the keys and values of a model take, and what fits beside its weights on a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minipaged.config import ModelConfig

SCALE_BYTES = 4  # one float32 scale per token and head, for keys and again for values
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *QUANTIZED_DTYPES)


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
        for name in ("num_layers", "num_kv_heads", "head_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if self.dtype not in KV_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_DTYPES)
            raise ValueError(f"KV dtype is {str(self.dtype).removeprefix('torch.')}, must be one of {names}")

    @classmethod
    def from_model(cls, config: ModelConfig, dtype: torch.dtype) -> KVSpec:
        return cls(config.num_layers, config.num_kv_heads, config.head_size, dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether stored keys and values need a scale to be read."""
        return self.dtype in QUANTIZED_DTYPES

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
