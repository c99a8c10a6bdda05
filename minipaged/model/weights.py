"""Where each weight of a checkpoint lives in `LlamaModel`, and how all of them are filled."""

from __future__ import annotations

from torch import Tensor

from minipaged.model.llama import DecoderLayer, LlamaModel


def weight_slots(model: LlamaModel) -> dict[str, Tensor]:
    """Hugging Face's name of every weight, with the part of our (fused) parameter that holds it.

    Writing into a slot writes into the model. A tied head has no slot of its own.
    """
    slots: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
    }
    if not model.config.tie_word_embeddings:
        slots["lm_head.weight"] = model.lm_head.weight
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        for name, tensor in _layer_slots(layer).items():
            slots[f"model.layers.{index}.{name}.weight"] = tensor
    return {name: tensor.detach() for name, tensor in slots.items()}


def _layer_slots(layer: DecoderLayer) -> dict[str, Tensor]:
    attention = layer.attention
    query_rows = attention.num_query_heads * attention.head_size
    kv_rows = attention.num_kv_heads * attention.head_size
    query, key, value = attention.qkv_proj.weight.split((query_rows, kv_rows, kv_rows))
    gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
    return {
        "input_layernorm": layer.attention_norm.weight,
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": attention.o_proj.weight,
        "post_attention_layernorm": layer.mlp_norm.weight,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.mlp.down_proj.weight,
    }
