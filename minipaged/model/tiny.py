"""A tiny Llama with random weights, made on the fly: for tests, and for lessons about shapes, not words."""

from __future__ import annotations

import torch

from minipaged.config import ModelConfig
from minipaged.model.llama import LlamaModel
from minipaged.model.weights import weight_slots

TINY = ModelConfig(
    vocab_size=320,  # all 256 bytes and some special tokens
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    eos_token_ids=(2,),
    bos_token_id=1,
)


def random_llama(
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LlamaModel:
    """Build a Llama of shape `config` (default: `TINY`) with random weights; equal seeds give equal weights.

    The weights are drawn in float32 and then rounded, so that models of different dtypes are the same model.
    They are scaled so that attention moves the logits as much as the token itself does: a model that merely
    echoes its last token would hide a fault in the cache.
    """
    model = LlamaModel(config or TINY, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, slot in weight_slots(model).items():
        values = torch.randn(slot.shape, generator=generator)
        if name.endswith(".bias"):
            values = 0.5 * values
        elif slot.ndim == 1:
            values = 1 + 0.1 * values  # norms
        elif name != "model.embed_tokens.weight":
            values = values * slot.shape[1] ** -0.5
        slot.copy_(values)
    return model
