"""Qwen2, Qwen3, Llama 3.x, Mistral: the tokens of transformers' own models, from folders and from GGUF."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minipaged.checkpoints.loading import LoadedModel, load_model
from minipaged.config import CacheConfig, EngineConfig
from minipaged.cpu.accelerate import accelerate_model
from minipaged.engine.engine import Engine
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.weights import weight_shapes
from minipaged.sampling_params import SamplingParams
from tests.model.model_files import named_weights, permute

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, wide": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window beyond the context": ("Mistral", {"sliding_window": 512}),
}
PROMPTS = [[1, *range(40, 77)], [1, 5, 6], [1, *range(40, 77), 9, 9], [7] * 20]


def transformers_model(family: str) -> Any:
    import transformers

    kind, changes = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases begin as ones and zeros, which would hide them
                parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.2))
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def save_as_gguf(path: Path, family: str, model: Any) -> Path:
    """As llama.cpp's converter does it: only Llama's query and key rows are put in another order."""
    config, architecture = (
        model.config,
        "llama" if FAMILIES[family][0] == "Mistral" else FAMILIES[family][0].lower(),
    )
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "llama3":
        from minipaged.config import RopeScaling
        from minipaged.model.llama import rotary_frequencies, stretch_frequencies

        plain = rotary_frequencies(head_size, LLAMA3["rope_theta"], None)
        divisors = plain / stretch_frequencies(plain, RopeScaling(8.0, 1.0, 4.0, 8192))
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = permute(values, heads)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def serve(loaded: LoadedModel, count: int, **changes: Any) -> tuple[list[list[int]], Engine]:
    """All prompts at once, then again: in chunks, from too few blocks, with prefix hits."""
    cache = {"num_blocks": 30, "block_size": 4, "dtype": torch.float32}
    limits = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16, "watermark": 0.0}
    engine = Engine(
        loaded.model,
        CacheConfig(**{**cache, **{name: value for name, value in changes.items() if name in cache}}),
        EngineConfig(**{**limits, **{name: value for name, value in changes.items() if name in limits}}),
    )
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    found = {}
    for turn in range(2):
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(f"{turn} {index}", prompt, params)
        while engine.has_unfinished_requests():
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
            engine.check_invariants()
    return [found[f"{turn} {index}"] for turn in range(2) for index in range(len(PROMPTS))], engine


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, source: str, tmp_path: Path) -> None:
    model = transformers_model(family)
    if source == "folder":
        model.save_pretrained(tmp_path)
        loaded = load_model(tmp_path)
    else:
        loaded = load_model(save_as_gguf(tmp_path / "model.gguf", family, model))
    expected = [greedy(model, prompt, 24) for prompt in PROMPTS] * 2
    assert any(len(set(tokens)) > 4 for tokens in expected)  # not an echo
    found, engine = serve(loaded, 24)
    assert found == expected
    assert engine.stats.num_preemptions > 0
    roomy, _ = serve(loaded, 24, num_blocks=200, max_num_batched_tokens=128)
    assert roomy == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_families_are_served_in_other_dtypes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    transformers_model(family).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert loaded.model.dtype == dtype
    assert {tensor.dtype for tensor in named_weights(loaded.model).values()} == {dtype}
    for kv_dtype in (dtype, torch.int8):
        found, _ = serve(loaded, 4, dtype=kv_dtype)
        assert found[: len(PROMPTS)] == found[len(PROMPTS) :] or kv_dtype is torch.int8
        assert all(len(tokens) == 4 for tokens in found)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_fast_path_of_a_processor_steps_aside(family: str, tmp_path: Path) -> None:
    model = transformers_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    loaded = replace(loaded, model=accelerate_model(loaded.model))
    assert serve(loaded, 24)[0] == [greedy(model, prompt, 24) for prompt in PROMPTS] * 2


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window is 64"),
        ("mistral", {"sliding_window": ...}, "sliding_window is 4096"),  # the default of transformers
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window is 64"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen2", {"architectures": ["Qwen2ForTokenClassification"]}, "architectures"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import json

    transformers_model(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "max_position_embeddings": 8192, **changes}
    config.pop("layer_types", None)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["self_attn.k_proj.bias", "self_attn.q_norm.weight"])
def test_missing_bias_or_norm_is_named(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    transformers_model("qwen2" if "bias" in name else "qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.{name}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"missing tensor: model\.layers\.1\.{name}"):
        load_model(tmp_path)


def test_random_model_of_a_family_has_all_its_weights() -> None:
    from dataclasses import replace

    config = replace(TINY, attention_bias=True, qk_norm=True)
    weights = named_weights(random_llama(config))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == weight_shapes(config)
