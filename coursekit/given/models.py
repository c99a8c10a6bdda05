"""The shapes of three models, for the exercise that counts the bytes of their keys and values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What a model's configuration says of its attention."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int


SMOLLM2_135M = ModelShape(num_layers=30, num_query_heads=9, num_kv_heads=3, head_size=64, hidden_size=576)
OPT_13B = ModelShape(num_layers=40, num_query_heads=40, num_kv_heads=40, head_size=128, hidden_size=5120)
LLAMA_70B = ModelShape(num_layers=80, num_query_heads=64, num_kv_heads=8, head_size=128, hidden_size=8192)
