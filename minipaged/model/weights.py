"""Where each weight of a checkpoint lives in `LlamaModel`, and how all of them are filled.

Checkpoints name their tensors as Hugging Face does. The GGUF reader translates to these names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.config import ModelConfig
from minipaged.model.llama import DecoderLayer, Device, LlamaModel

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape is known at once, its numbers are read only when asked for."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape, (out, in) for a matrix, of every weight that a checkpoint of this model must hold."""
    hidden, query_rows = config.hidden_size, config.num_query_heads * config.head_size
    kv_rows, intermediate = config.num_kv_heads * config.head_size, config.intermediate_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, query_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.attention_bias:
        layer |= {"self_attn.q_proj.bias": (query_rows,)}
        layer |= {"self_attn.k_proj.bias": (kv_rows,), "self_attn.v_proj.bias": (kv_rows,)}
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_size,) for name in "qk"}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def weight_slots(model: LlamaModel) -> dict[str, Tensor]:
    """The part of our (fused) parameters that holds each weight of `weight_shapes`, to be written to."""
    slots: dict[str, Tensor] = {EMBEDDING: model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    if not model.config.tie_word_embeddings:
        slots[HEAD] = model.lm_head.weight
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        for name, tensor in _layer_slots(layer).items():
            slots[f"model.layers.{index}.{name}"] = tensor
    return {name: tensor.detach() for name, tensor in slots.items()}


def _layer_slots(layer: DecoderLayer) -> dict[str, Tensor]:
    attention = layer.attention
    query_rows = attention.num_query_heads * attention.head_size
    kv_rows = attention.num_kv_heads * attention.head_size
    query, key, value = attention.qkv_proj.weight.split((query_rows, kv_rows, kv_rows))
    gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
    slots = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": attention.o_proj.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.mlp.down_proj.weight,
    }
    if attention.qkv_proj.bias is not None:
        biases = attention.qkv_proj.bias.split((query_rows, kv_rows, kv_rows))
        slots |= {f"self_attn.{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
    for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
        if norm is not None:
            slots[f"self_attn.{name}_norm.weight"] = norm.weight
    return slots


def build_model(
    config: ModelConfig, stored: Mapping[str, StoredTensor], *, dtype: torch.dtype, device: Device = "cpu"
) -> LlamaModel:
    """Make the model and fill every weight from `stored`, rounding to `dtype`.

    Raises ValueError, before any memory is taken, that names each missing, unexpected or mis-shaped tensor.
    """
    stored = _with_embedding(config, stored)
    check_tensors(config, stored)
    try:
        model = LlamaModel(config, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # torch's words for it are those of an allocator
        numbers = sum(math.prod(shape) for shape in weight_shapes(config).values())
        size = numbers * dtype.itemsize >> 20
        raise ValueError(f"the weights take {size} MiB in {dtype}, and the system refused them") from error
    for name, slot in weight_slots(model).items():
        slot.copy_(stored[name].read())
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied(stored)
    return model


def _with_embedding(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Tied, the embedding and the head are one matrix; some files keep it under the head's name only."""
    if config.tie_word_embeddings and EMBEDDING not in stored and HEAD in stored:
        return {EMBEDDING: stored[HEAD]} | {name: tensor for name, tensor in stored.items() if name != HEAD}
    return stored


def check_tensors(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError unless `stored` holds exactly the tensors of the model, each in its shape."""
    if config.num_layers > len(stored):  # also keeps a hostile config from making us list a billion names
        raise ValueError(
            f"the config has {config.num_layers} layers, the weights are only {len(stored)} tensors"
        )
    shapes = weight_shapes(config)
    allowed = set(shapes) | ({HEAD} if config.tie_word_embeddings else set())
    refuse_names("missing", [name for name in shapes if name not in stored])
    refuse_names("unexpected", [name for name in stored if name not in allowed])
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ValueError(f"tensor {name} has shape {stored[name].shape}, the config needs {shape}")


def refuse_names(fault: str, names: Collection[str]) -> None:
    """Raise ValueError that lists the tensors at fault (the first few of many), if there are any."""
    if names:
        listed = ", ".join(list(names)[:5])
        rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(f"{fault} tensor{'s' if len(names) > 1 else ''}: {listed}{rest}")


def _check_tied(stored: Mapping[str, StoredTensor]) -> None:
    """Some files hold the tied head a second time. Take them only if it is the embedding."""
    if not torch.equal(stored[HEAD].read(), stored[EMBEDDING].read()):
        raise ValueError(f"tensor {HEAD} differs from {EMBEDDING}, but the config ties the two")
