"""Reading a Hugging Face `config.json`: the model's shape, or a refusal by name of what we do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from minipaged.config import ModelConfig, RopeScaling, token_ids
from minipaged.model.families import FAMILIES, Family


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the dictionary in a Hugging Face `config.json`; raise ValueError for what is not supported.

    Fields that a config may leave out take the defaults that `transformers` gives them.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        supported = ", ".join(map(repr, FAMILIES))
        raise ValueError(f"model_type is {kind!r}, supported are {supported}")
    config = {**family.defaults, **config}
    _refuse_unsupported(config, family)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    ):  # fmt: skip
        if config.get(name) is None:
            raise ValueError(f"{name} is missing")
    heads = config["num_attention_heads"]
    rope = _rope_fields(config)
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_query_heads=heads,
        num_kv_heads=_given(config, "num_key_value_heads", heads),
        head_size=_head_size(config),
        max_position_embeddings=_given(config, "max_position_embeddings", 2048),
        rms_norm_eps=_given(config, "rms_norm_eps", 1e-6),
        rope_theta=_given(rope, "rope_theta", 10000.0),
        rope_scaling=_llama3_scaling(rope),
        tie_word_embeddings=_given(config, "tie_word_embeddings", False),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
    )


def _given(mapping: Mapping[str, Any], name: str, default: Any) -> Any:
    value = mapping.get(name)
    return default if value is None else value


def _head_size(config: Mapping[str, Any]) -> Any:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    hidden_size, heads = config["hidden_size"], config["num_attention_heads"]
    if not (isinstance(hidden_size, int) and isinstance(heads, int) and heads > 0) or hidden_size % heads:
        raise ValueError(f"head_dim is missing, hidden_size {hidden_size!r} / heads {heads!r} is not whole")
    return hidden_size // heads


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError if a field asks for a computation that `LlamaModel` does not do."""
    architectures = _given(config, "architectures", [family.architecture])
    if architectures != [family.architecture]:
        raise ValueError(f"architectures is {architectures!r}, supported is [{family.architecture!r}]")
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (True, False) if family.attention_bias else (False,),  # Qwen2 does not ask it
        "mlp_bias": (False,),
        "quantization_config": (),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (1,),
    }
    for name, values in supported.items():
        value = config.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{name} is {value!r}, supported is {values[0] if values else None!r}")
    window, longest = config.get("sliding_window"), _given(config, "max_position_embeddings", 2048)
    if window is not None and config.get("use_sliding_window", True) and not _reaches(window, longest):
        raise ValueError(
            f"sliding_window is {window!r}, supported is None or at least max_position_embeddings "
            f"({longest!r})"
        )
    layer_types = _given(config, "layer_types", [])
    if any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"layer_types is {layer_types!r}, supported is 'full_attention' in every layer")


def _reaches(window: Any, longest: Any) -> bool:
    """Whether a window holds the longest context: then it changes nothing."""
    return isinstance(window, int) and isinstance(longest, int) and window >= longest


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary fields in one dictionary, as transformers finds them.

    Newer files keep them in `rope_parameters`, older ones in `rope_scaling`, which wins where both are; what
    they leave out stands beside them.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(_given(config, name, {}), Mapping):
            raise ValueError(f"{name} is {config[name]!r}, an object is needed")
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    longest = _given(config, "original_max_position_embeddings", config.get("max_position_embeddings"))
    beside = {"rope_theta": config.get("rope_theta"), "original_max_position_embeddings": longest}
    if stated.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor is {stated['partial_rotary_factor']!r}, supported is 1")
    return beside | {field: value for field, value in stated.items() if value is not None}


def _llama3_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling type is {kind!r}, supported are 'default' and 'llama3'")
    names = [field.name for field in fields(RopeScaling)]
    missing = [name for name in names if rope.get(name) is None]
    if missing:
        raise ValueError(f"llama3 rope scaling lacks {', '.join(missing)}")
    return RopeScaling(**{name: rope[name] for name in names})
