"""The forward pass equals transformers' LlamaForCausalLM, whatever the model's shape and the steps."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.checkpoints.loading import load_model
from minipaged.config import ModelConfig, RopeScaling
from minipaged.model.llama import RMSNorm
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.weights import weight_shapes, weight_slots
from tests.model.model_files import logits_of, named_weights, save_folder

LONG = dataclasses.replace(TINY, max_position_embeddings=1024, rope_theta=100000.0)
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
# With these original positions, factor 8 and 32-wide heads, all three branches of the scaling are taken.
MODELS = {
    "grouped queries": TINY,
    "one key/value head": dataclasses.replace(TINY, num_kv_heads=1),
    "tied head": dataclasses.replace(TINY, tie_word_embeddings=True),
    "three queries per kv head": dataclasses.replace(TINY, hidden_size=24, num_query_heads=6),
    "head size no power of two": dataclasses.replace(TINY, head_size=12),
    "head size not hidden / heads, theta 100000": dataclasses.replace(LONG, hidden_size=64, head_size=32),
    "llama3 rope scaling": dataclasses.replace(LONG, hidden_size=64, head_size=32, rope_scaling=SCALING),
}


def transformers_model(folder: Path, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, **options).eval()


def random_ids(config: ModelConfig, length: int) -> list[int]:
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_transformers(config: ModelConfig, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, config, named_weights(random_llama(config)))
    model = load_model(folder).model
    ids = random_ids(config, min(520, config.max_position_embeddings))
    with torch.inference_mode():
        expected = transformers_model(folder)(torch.tensor([ids])).logits[0]
    logits = logits_of(model, ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= 1e-4
    assert (logits[500:] - expected[500:]).abs().max() <= 1e-4  # where a wrong theta shows


def test_rope_scaling_changes_the_logits() -> None:
    config = MODELS["llama3 rope scaling"]
    plain = random_llama(dataclasses.replace(config, rope_scaling=None))
    ids = random_ids(config, 100)
    assert (logits_of(random_llama(config), ids) - logits_of(plain, ids)).abs().max() > 1e-2


@pytest.mark.parametrize("steps", [[1] * 40, [16, 16, 8], [5, 30, 1, 1, 3]])
def test_steps_of_any_length_give_the_same_logits(steps: list[int]) -> None:
    model = random_llama()
    ids = random_ids(TINY, 40)
    torch.testing.assert_close(logits_of(model, ids, steps, block_size=4), logits_of(model, ids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_stays_near_float32(dtype: torch.dtype, tolerance: float) -> None:
    ids = random_ids(TINY, 64)
    logits = logits_of(random_llama(dtype=dtype), ids)
    assert logits.dtype == torch.float32
    assert (logits - logits_of(random_llama(), ids)).abs().max() < tolerance


def test_bfloat16_logits_are_as_near_as_those_of_transformers(tmp_path: Path) -> None:
    """Rounding differs by the order of sums; a norm or an angle computed in bfloat16 would show."""
    folder = save_folder(tmp_path, LONG, named_weights(random_llama(LONG)))
    ids = random_ids(LONG, 400)
    exact = logits_of(random_llama(LONG), ids)
    with torch.inference_mode():
        theirs = transformers_model(folder, dtype=torch.bfloat16)(torch.tensor([ids])).logits[0].float()
    ours = logits_of(load_model(folder, dtype=torch.bfloat16).model, ids)
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_computed_in_float32_as_in_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(64, 1e-5, dtype, "cpu"), LlamaRMSNorm(64, 1e-5).to(dtype)
    theirs.weight.data = torch.randn(64).to(dtype)
    ours.weight.copy_(theirs.weight.detach())
    x = (300 * torch.randn(32, 64)).to(dtype)  # squares overflow float16
    assert torch.equal(ours(x), theirs(x).detach())


def test_logits_are_computed_for_the_rows_passed_only() -> None:
    model = random_llama()
    hidden = torch.randn(5, TINY.hidden_size)
    logits = model.compute_logits(hidden[[1, 4]])
    assert logits.shape == (2, TINY.vocab_size)
    torch.testing.assert_close(logits, model.compute_logits(hidden)[[1, 4]])


def test_tied_head_is_the_embedding_itself() -> None:
    model = random_llama(MODELS["tied head"])
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert "lm_head.weight" not in weight_slots(model)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_weight_shapes_are_those_of_the_model(config: ModelConfig) -> None:
    slots = weight_slots(random_llama(config))
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == weight_shapes(config)
    total = sum(parameter.numel() for parameter in random_llama(config).parameters())
    assert sum(slot.numel() for slot in slots.values()) == total


def test_equal_seeds_give_equal_models_in_any_dtype() -> None:
    first, second, other = (
        random_llama(seed=1),
        random_llama(seed=1, dtype=torch.bfloat16),
        random_llama(seed=2),
    )
    weight = first.layers[0].mlp.down_proj.weight
    assert torch.equal(weight.bfloat16(), second.layers[0].mlp.down_proj.weight)
    assert not torch.equal(weight, other.layers[0].mlp.down_proj.weight)
