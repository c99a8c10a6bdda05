"""Hugging Face folders: safetensors in one or many files, strict to the last tensor."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import logits_of, named_weights, save_folder

IDS = list(range(40, 80))
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return named_weights(random_llama())


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_single_and_sharded_weights_are_read_whole(
    shards: int, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    loaded = load_model(save_folder(tmp_path, TINY, weights, shards=shards))
    rows = named_weights(loaded.model)
    assert rows.keys() == weights.keys()
    assert all(torch.equal(rows[name], weights[name]) for name in weights)
    assert loaded.config == TINY
    assert loaded.tokenizer is None
    assert loaded.name == str(tmp_path)


def test_folder_written_by_transformers_is_read(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    from transformers import LlamaForCausalLM

    source = save_folder(tmp_path / "source", TINY, weights)
    theirs = LlamaForCausalLM.from_pretrained(source)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([IDS])).logits[0]
    logits = logits_of(load_model(tmp_path / "sharded").model, IDS)
    assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_stored_in_another_dtype_are_rounded_to_ours(
    stored: torch.dtype, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    kept = {name: tensor.to(stored) for name, tensor in weights.items()}
    folder = save_folder(tmp_path, TINY, kept)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(folder, dtype=dtype).model
        assert model.dtype == dtype
        assert all(torch.equal(row, kept[name].to(dtype)) for name, row in named_weights(model).items())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensor_is_refused_by_name(
    dtype: torch.dtype, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = save_folder(tmp_path, TINY, weights | {name: weights[name].to(dtype)})
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: tensor {name} is (I8|F8_E4M3)"):
        load_model(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_missing_tensor_is_named(
    name: str, shards: int, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    rest = {other: tensor for other, tensor in weights.items() if other != name}
    with pytest.raises(ModelLoadError, match=f"missing tensor: {name}"):
        load_model(save_folder(tmp_path, TINY, rest, shards=shards))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score.weight"]
)
def test_unexpected_tensor_is_named(name: str, tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    folder = save_folder(tmp_path, TINY, weights | {name: torch.ones(32)})
    with pytest.raises(ModelLoadError, match=f"unexpected tensor: {name}"):
        load_model(folder)


def test_many_missing_tensors_are_counted(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    deeper = dataclasses.replace(TINY, num_layers=3)
    with pytest.raises(ModelLoadError, match=r"missing tensors: model\.layers\.2.* and 4 more"):
        load_model(save_folder(tmp_path, deeper, weights))


@pytest.mark.parametrize("shape", [(32, 320), (320,), (321, 32), (320, 32, 1)])
def test_misshaped_tensor_is_named_with_both_shapes(
    shape: tuple[int, ...], tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    folder = save_folder(tmp_path, TINY, weights | {"model.embed_tokens.weight": torch.ones(shape)})
    with pytest.raises(ModelLoadError, match=r"model\.embed_tokens\.weight") as error:
        load_model(folder)
    assert str(shape) in str(error.value)
    assert "(320, 32)" in str(error.value)


def test_tied_head_needs_no_tensor_of_its_own(tmp_path: Path) -> None:
    loaded = load_model(save_folder(tmp_path, TIED, named_weights(random_llama(TIED))))
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_tied_head_stored_twice_must_be_the_embedding(tmp_path: Path) -> None:
    weights = named_weights(random_llama(TIED))
    copy = weights["model.embed_tokens.weight"].clone()
    load_model(save_folder(tmp_path, TIED, weights | {"lm_head.weight": copy}))
    copy[5, 5] += 1
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs"):
        load_model(save_folder(tmp_path, TIED, weights | {"lm_head.weight": copy}))


def test_end_tokens_are_those_of_config_generation_config_and_tokenizer(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    from tokenizers import Tokenizer, models

    folder = save_folder(tmp_path, dataclasses.replace(TINY, eos_token_ids=(2,)), weights)
    assert load_model(folder).config.eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load_model(folder).config.eos_token_ids == (2, 0)
    Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 2, "<turn>": 3}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<turn>"}}))
    loaded = load_model(folder)
    assert loaded.config.eos_token_ids == loaded.model.config.eos_token_ids == (2, 0, 3)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.eos_token_ids == (3,)


def test_folder_without_weights_or_config_says_so(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    (save_folder(tmp_path, TINY, weights) / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no model.safetensors and no model.safetensors.index.json"):
        load_model(tmp_path)


def move_to_other_shard(weight_map: dict[str, str]) -> None:
    weight_map["model.norm.weight"] = next(
        file for file in weight_map.values() if file != weight_map["model.norm.weight"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (move_to_other_shard, "missing tensor: model.norm.weight|unexpected tensor: model.norm.weight"),
        (lambda names: names.pop("model.norm.weight"), "unexpected tensor: model.norm.weight"),
        (lambda names: names.update({"ghost": names["model.norm.weight"]}), "missing tensor: ghost"),
        (lambda names: names.update({"ghost": "absent.safetensors"}), r"absent\.safetensors"),
    ],
)
def test_index_must_agree_with_its_shards(
    change: Callable[[dict[str, str]], Any],
    message: str,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
) -> None:
    folder = save_folder(tmp_path, TINY, weights, shards=2)
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


def test_index_without_a_map_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    folder = save_folder(tmp_path, TINY, weights, shards=2)
    (folder / INDEX).write_text('{"weight_map": ["model.norm.weight"]}')
    with pytest.raises(ModelLoadError, match="weight_map"):
        load_model(folder)
