"""Configs refuse impossible values and say which; a Hugging Face config is understood or refused by name."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from minipaged.checkpoints.hf_config import config_from_hf
from minipaged.config import CacheConfig, EngineConfig, ModelConfig, RopeScaling
from minipaged.model.tiny import TINY
from tests.model.model_files import hf_config

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_smollm2_config_is_read_field_by_field() -> None:
    assert config_from_hf(SMOLLM2) == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_query_heads=9,
        num_kv_heads=3,
        head_size=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000,
        rope_scaling=None,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    assert config_from_hf(SMOLLM2).queries_per_kv == 3


def test_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    assert config_from_hf(SMOLLM2 | {"head_dim": 96}).head_size == 96


def test_fields_left_out_take_the_defaults_of_transformers() -> None:
    from transformers import LlamaConfig

    optional = (
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    )  # fmt: skip
    config = config_from_hf({key: value for key, value in SMOLLM2.items() if key not in optional})
    theirs = LlamaConfig(hidden_size=576, num_attention_heads=9)
    assert config.num_kv_heads == theirs.num_key_value_heads == 9
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings


def test_config_written_by_transformers_is_read() -> None:
    from transformers import LlamaConfig

    written = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters={"rope_theta": 5e5, **LLAMA3},
        eos_token_id=[3, 4], architectures=["LlamaForCausalLM"],
    ).to_dict()  # fmt: skip
    config = config_from_hf(written)
    assert config.head_size == 32
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (3, 4)


def test_written_and_read_back_configs_are_equal() -> None:
    config = dataclasses.replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), head_size=16)
    assert config_from_hf(hf_config(config)) == config


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (0, (0,)), ([0, 2], (0, 2)), ([], ())])
def test_eos_token_id_may_be_one_several_or_none(eos: Any, ids: tuple[int, ...]) -> None:
    assert config_from_hf(SMOLLM2 | {"eos_token_id": eos}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma3"),
        ("model_type", None),
        ("architectures", ["MistralForCausalLM"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("sliding_window", 4096),
        ("quantization_config", {"quant_method": "awq"}),
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", "llama3"),
    ],
)
def test_unsupported_field_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as error:
        config_from_hf(SMOLLM2 | {field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "mrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unsupported_rope_scaling_is_refused_by_name(kind: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"rope scaling type is '{kind}'"):
        config_from_hf(SMOLLM2 | {"rope_scaling": {key: kind, "factor": 2.0}})


@pytest.mark.parametrize("rope_type", [None, "default"])
def test_default_rope_type_is_no_scaling(rope_type: str | None) -> None:
    config = config_from_hf(SMOLLM2 | {"rope_scaling": {"rope_type": rope_type}})
    assert config.rope_scaling is None
    assert config.rope_theta == 100000


def test_incomplete_llama3_scaling_names_what_it_lacks() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "high_freq_factor"}
    with pytest.raises(ValueError, match="high_freq_factor"):
        config_from_hf(SMOLLM2 | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is missing"):
        config_from_hf({key: value for key, value in SMOLLM2.items() if key != field})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_kv_heads": 3}, r"num_query_heads is 4.*num_kv_heads \(3\)"),
        ({"num_kv_heads": 8}, "num_query_heads is 4"),
        ({"head_size": 7}, "head_size is 7"),
        ({"head_size": 8.0}, "head_size is 8.0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"eos_token_ids": (320,)}, "id is 320, the vocabulary has 320"),
        ({"eos_token_ids": (-1,)}, "id is -1"),
        ({"bos_token_id": "<s>"}, "id is '<s>'"),
    ],
)
def test_impossible_model_value_is_refused_with_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_head_dim_zero_is_refused_not_derived() -> None:
    with pytest.raises(ValueError, match="head_size is 0"):
        config_from_hf(SMOLLM2 | {"head_dim": 0})


def test_hidden_size_that_heads_do_not_divide_needs_a_head_dim() -> None:
    with pytest.raises(ValueError, match="head_dim is missing"):
        config_from_hf(SMOLLM2 | {"num_attention_heads": 7, "num_key_value_heads": 7})


@pytest.mark.parametrize(
    "changes", [{"factor": 0.0}, {"low_freq_factor": 4.0}, {"original_max_position_embeddings": 0}]
)
def test_impossible_rope_scaling_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(RopeScaling(8.0, 1.0, 4.0, 8192), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"dtype": torch.int32}, "cache dtype is torch.int32"),
    ],
)
def test_impossible_cache_value_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**{"num_blocks": 4, "dtype": torch.float32} | changes)


@pytest.mark.parametrize(
    "changes", [{"max_model_len": 0}, {"max_num_seqs": 0}, {"preemption": "drop"}, {"watermark": 1.0}]
)
def test_impossible_engine_value_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        EngineConfig(**{"max_model_len": 16} | changes)
