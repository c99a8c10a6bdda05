"""GGUF files: read as llama.cpp writes them, refused by name for what we do not compute."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minipaged.checkpoints.loading import load_model
from minipaged.config import ModelConfig, RopeScaling
from minipaged.model.errors import ModelLoadError
from minipaged.model.llama import rotary_frequencies, stretch_frequencies
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import Q8_0, logits_of, named_weights, save_folder, save_gguf

CONFIG = dataclasses.replace(TINY, eos_token_ids=(), bos_token_id=None)
WIDE_HEADS = dataclasses.replace(CONFIG, hidden_size=64, head_size=32, intermediate_size=96)
IDS = list(range(40, 100))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return named_weights(random_llama(CONFIG))


@pytest.mark.parametrize("config", [CONFIG, WIDE_HEADS], ids=["plain", "wide heads"])
def test_float32_gguf_equals_the_same_model_in_safetensors(config: ModelConfig, tmp_path: Path) -> None:
    weights = named_weights(random_llama(config))
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf", config, weights))
    rows = named_weights(loaded.model)
    for name, expected in weights.items():
        assert torch.equal(rows[name], expected), name
    assert dataclasses.replace(loaded.config, rms_norm_eps=config.rms_norm_eps) == config
    twin = load_model(save_folder(tmp_path / "folder", config, weights))
    assert (logits_of(loaded.model, IDS) - logits_of(twin.model, IDS)).abs().max() <= 1e-5


def blockwise_q8_0(values: torch.Tensor) -> torch.Tensor:
    """What Q8_0 keeps of the numbers: per 32, a float16 step and signed bytes of it."""
    blocks = values.reshape(-1, 32)
    step = blocks.abs().amax(1, keepdim=True) / 127
    return (torch.round(blocks / step) * step.half().float()).reshape(values.shape)


def test_q8_0_gguf_is_within_its_step(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, Q8_0))
    # Permuting moves whole rows and so whole blocks: it does not matter which is done first.
    kept = {name: blockwise_q8_0(row) if row.ndim == 2 else row for name, row in weights.items()}
    for name, row in named_weights(loaded.model).items():
        torch.testing.assert_close(row, kept[name], rtol=1e-3, atol=1e-6)
    twin = load_model(save_folder(tmp_path / "folder", CONFIG, kept))
    logits = logits_of(loaded.model, IDS)
    assert (logits - logits_of(twin.model, IDS)).abs().max() <= 1e-3
    assert (logits - logits_of(random_llama(CONFIG), IDS)).abs().max() > 1e-3  # it is not the float32 model


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_other_quantisations_are_read_by_the_library(
    kind: str, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, stored))
    expected = weights[
        "model.layers.1.mlp.down_proj.weight"
    ]  # (32, 64): not square, so a swapped shape shows
    kept = torch.from_numpy(gguf.dequantize(gguf.quantize(expected.numpy(), stored), stored))
    assert torch.equal(loaded.model.layers[1].mlp.down_proj.weight, kept)


def test_head_is_tied_exactly_when_the_file_has_no_output_tensor(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    loaded = load_model(save_gguf(tmp_path / "tied.gguf", config, named_weights(random_llama(config))))
    assert loaded.config.tie_word_embeddings
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_every_end_token_of_the_file_ends_an_answer(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    ids = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
    }
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, metadata=ids))
    assert loaded.config.eos_token_ids == (2, 7)
    assert loaded.tokenizer is None


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_divisors_are_recognised(
    factor: float, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    config = dataclasses.replace(WIDE_HEADS, rope_theta=500000.0)
    scaling = RopeScaling(factor, 1.0, 4.0, 8192)
    plain = rotary_frequencies(config.head_size, config.rope_theta, None)
    divisors = (plain / stretch_frequencies(plain, scaling)).numpy()
    assert len(set(divisors.tolist())) > 2  # some kept, some stretched, some between
    path = save_gguf(
        tmp_path / "llama3.gguf",
        config,
        named_weights(random_llama(config)),
        extra_tensors={"rope_freqs.weight": divisors},
    )
    assert load_model(path).config.rope_scaling == scaling


def test_other_rope_divisors_are_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    extra = {"rope_freqs.weight": np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)}
    path = save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, extra_tensors=extra)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: tensor rope_freqs\.weight"):
        load_model(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attention.sliding_window": 128}, "llama.attention.sliding_window = 128"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ({"split.count": 2}, "split over 2 files"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(
    metadata: dict[str, Any], message: str, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, metadata=metadata)
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: .*{message}"):
        load_model(path)


def test_neutral_metadata_is_accepted(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    metadata = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "general.name": "tiny"}
    load_model(save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, metadata=metadata))


def test_other_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture is 'gemma', supported are 'llama'"):
        load_model(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"), "missing tensor: .*1.self_attn.k_proj"),
        (lambda w: w.pop("model.norm.weight"), "missing tensor: model.norm.weight"),
        (
            lambda w: w.update({"lm_head.weight": torch.ones(320, 64)}),
            r"lm_head.weight has shape \(320, 64\)",
        ),
        (lambda w: w.update({"model.norm.weight": torch.ones(33)}), r"model.norm.weight has shape \(33,\)"),
    ],
)
def test_missing_or_misshaped_tensor_is_named(
    change: Any, message: str, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    changed = dict(weights)
    change(changed)
    with pytest.raises(ModelLoadError, match=message):
        load_model(save_gguf(tmp_path / "tiny.gguf", CONFIG, changed))


def test_unexpected_tensor_is_named(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(32, dtype=np.float32)}
    with pytest.raises(ModelLoadError, match=r"unexpected tensor: blk\.0\.attn_sinks\.weight"):
        load_model(save_gguf(tmp_path / "tiny.gguf", CONFIG, weights, extra_tensors=extra))
