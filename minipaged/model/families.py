"""The models that are a Llama but for a line: what sets each apart, in one table.

Every one is named as its `config.json` and its GGUF name it. (Mistral has no GGUF name of its own: its files
say "llama".) What a `config.json` may leave out has the value that `transformers` gives it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """How one family differs.

    Attributes:
        architecture: the class in `transformers` that computes the same.
        attention_bias: the products that make queries, keys and values add a bias.
        qk_norm: each head of queries and keys is normalised before it is turned.
        permuted: its GGUF holds query and key rows in the order of an interleaved rotary embedding.
        defaults: of `config.json`, where they differ from Llama's.
    """

    architecture: str
    attention_bias: bool = False
    qk_norm: bool = False
    permuted: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", permuted=True),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", attention_bias=True, defaults=QWEN_DEFAULTS),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, defaults=QWEN_DEFAULTS | {"head_dim": 128}),
}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
