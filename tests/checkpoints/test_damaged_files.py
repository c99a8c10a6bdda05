"""Damaged and hostile files: the only error is ours, it names the file, and nothing of the file is run."""

import json
import os
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import named_weights, save_folder, save_gguf

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return named_weights(random_llama())


def with_type_id(path: Path, tensor: str, type_id: int) -> Path:
    """Change the quantisation type that the file states for one tensor."""
    content = bytearray(path.read_bytes())
    name = content.index(tensor.encode())
    dims = int.from_bytes(content[name + len(tensor) :][:4], "little")
    place = name + len(tensor) + 4 + 8 * dims
    content[place : place + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(content)
    return path


def test_quantisation_type_without_a_reader_is_refused_by_name(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", TINY, weights)
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up\.weight has quantisation type I32"):
        load_model(with_type_id(path, "blk.1.ffn_up.weight", gguf.GGMLQuantizationType.I32))


def test_unknown_quantisation_type_is_refused_by_name(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", TINY, weights)
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up\.weight has unknown quantisation type 999"):
        load_model(with_type_id(path, "blk.1.ffn_up.weight", 999))


def test_file_cut_anywhere_is_refused_with_its_name(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    content = save_gguf(tmp_path / "whole.gguf", TINY, weights).read_bytes()
    path = tmp_path / "cut.gguf"
    # Everywhere in the header, then here and there in the data, then one byte short.
    for length in [*range(0, 2600, 37), *range(3000, len(content), 20011), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: " + ("truncated" if length >= 4 else "")):
            load_model(path)


def test_big_endian_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="big-endian"):
        load_model(tmp_path / "big.gguf")


def test_not_a_gguf_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<html>404</html>" * 10)
    with pytest.raises(ModelLoadError, match=r"page\.gguf: GGUF magic invalid"):
        load_model(path)


@pytest.mark.fuzz
def test_file_with_flipped_bytes_loads_or_is_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Whatever a damaged header says, the only error is ours, and it comes without a huge allocation."""
    metadata = {"tokenizer.ggml.eos_token_id": 2, "numbers": [1, 2, 3, 4]}
    content = save_gguf(tmp_path / "whole.gguf", TINY, weights, metadata=metadata).read_bytes()
    path = tmp_path / "damaged.gguf"
    outcomes = set()
    for seed in range(100 * int(os.environ.get("MINIPAGED_FUZZ", "1"))):
        damaged = bytearray(content)
        chance = random.Random(seed)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(2600)] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        path.write_bytes(damaged)
        try:
            load_model(path)
            outcomes.add("loaded")
        except ModelLoadError as error:
            outcomes.add("refused" if "damaged.gguf: " in str(error) else str(error))
    assert outcomes == {"loaded", "refused"}


def test_pickled_weights_are_never_opened(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    folder = save_folder(tmp_path, TINY, weights)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ModelLoadError, match=r"only as pickle \(pytorch_model.bin\).*safetensors"):
        load_model(folder)
    assert not (folder / "opened").exists()
    assert not Path("opened").exists()


RUBBISH = {
    "empty": b"",
    "not JSON": b"{layers: 2",
    "a list": b"[1, 2]",
    "a number": b"NaN",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "nested beyond reason": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("content", RUBBISH.values(), ids=RUBBISH.keys())
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"]
)
def test_rubbish_in_a_json_file_is_refused_with_its_name(
    file: str, content: bytes, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    from tokenizers import Tokenizer, models

    folder = save_folder(tmp_path, TINY, weights, shards=2)
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    (folder / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=file):
        load_model(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "1000000000 layers"),
        ("vocab_size", 10**15, "model.embed_tokens.weight has shape"),
        ("num_attention_heads", 0, "num_query_heads is 0"),
        ("hidden_size", None, "hidden_size is missing"),
        ("eos_token_id", [999], "id is 999"),
        ("model_type", "gemma3", "model_type is 'gemma3'"),
        ("model_type", ["llama"], "model_type"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config"),
    ],
)
def test_impossible_config_is_refused_before_memory_is_taken(
    field: str, value: Any, message: str, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    folder = save_folder(tmp_path, TINY, weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelLoadError, match=message) as error:
        load_model(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/part.safetensors",
        "..\\outside.safetensors",
        "model.bin",
        7,
    ],
)
def test_index_that_leads_out_of_the_folder_is_refused(
    shard: Any, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    folder = save_folder(tmp_path / "model", TINY, weights, shards=2)
    save_file(weights, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, shard)}))
    with pytest.raises(ModelLoadError, match="not a safetensors file of this folder") as error:
        load_model(folder)
    assert INDEX in str(error.value)


def test_damaged_safetensors_is_refused_with_its_name(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    folder = save_folder(tmp_path, TINY, weights)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    huge_header = (2**62).to_bytes(8, "little") + content[8:]
    for damaged in (b"", content[:5], content[:500], content[:-1], content + b"x", huge_header, content[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: "):
            load_model(folder)
