# ruff: noqa: E501, PT017, SIM105
"""Hugging Face folders changed in their structure: each is refused by name, or computes what transformers does.

A newcomer's run takes a slice, `make check` all.
"""

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from tests.checkpoints.test_hf_meaning import EXTRA, byte_tokenizer
from tests.model.model_files import logits_of
from tests.model.test_families import SHAPE

Chance = random.Random
CASES, SLICE = 300, 20
IDS = [1, *range(40, 60)]
VALUES = (None, 0, 1, 2, 3, -1, 16, 64, 4096, 10**9, 10**20, 0.5, 1e-5, True, False, "", "2", "silu", [], [1], {}, {"a": 1})  # fmt: skip
FIELDS = (
    "sliding_window", "head_dim", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "quantization_config", "layer_types", "num_key_value_heads", "unheard_of",
    "tie_word_embeddings", "pretraining_tp", "use_cache", "torch_dtype", "dtype",
)  # fmt: skip
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers writes it, in two shards, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder, max_shard_size="150KB")
    assert (folder / INDEX).exists()
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def drop_config_field(folder: Path, c: Chance) -> None:
    edit_json(folder / "config.json", lambda config: config.pop(c.choice(list(config))))


def change_config_field(folder: Path, c: Chance) -> None:
    edit_json(
        folder / "config.json", lambda config: config.update({c.choice(list(config)): c.choice(VALUES)})
    )


def add_config_field(folder: Path, c: Chance) -> None:
    edit_json(folder / "config.json", lambda config: config.update({c.choice(FIELDS): c.choice(VALUES)}))


def change_rope(folder: Path, c: Chance) -> None:
    rope = {
        "rope_type": c.choice(("default", "llama3", "linear", "yarn", None)),
        "rope_theta": c.choice((1e4, 5e5, 100, 0)),
        "factor": c.choice((1.0, 8.0, 0)),
        "low_freq_factor": c.choice((1.0, 4.0)),
        "high_freq_factor": c.choice((4.0, 1.0)),
        "original_max_position_embeddings": c.choice((64, 8192)),
    }
    for name in c.sample(list(rope), c.randrange(3)):
        del rope[name]
    place = c.choice(("rope_parameters", "rope_parameters", "rope_scaling"))
    edit_json(folder / "config.json", lambda config: config.update({place: rope}))


def change_family(folder: Path, c: Chance) -> None:
    kind, name = c.choice(
        (("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("gemma", "Gemma"))
    )
    edit_json(
        folder / "config.json",
        lambda config: config.update({"model_type": kind, "architectures": [f"{name}ForCausalLM"]}),
    )


def change_generation_config(folder: Path, c: Chance) -> None:
    value = c.choice((*VALUES, [2, 5], [999]))
    edit_json(folder / "generation_config.json", lambda config: config.update({"eos_token_id": value}))


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + size :])


def change_header(folder: Path, c: Chance) -> None:
    def change(header: dict[str, Any]) -> None:
        names = [name for name in header if name != "__metadata__"]
        one, other = c.sample(names, 2)
        match c.randrange(8):
            case 0:
                header[one]["data_offsets"] = list(header[other]["data_offsets"])
            case 1:
                header[one], header[other] = header[other], header[one]  # another model, if the shapes agree
            case 2:
                header[one]["shape"].reverse()
            case 3:
                header[one]["dtype"] = c.choice(("F16", "BF16", "I32", "F64", "F8_E4M3", "X"))
            case 4:
                header[f"{one}.more"] = header.pop(one)
            case 5:
                header[one]["shape"] = [c.choice((0, 1, -1, 2**40, 2**63, 64))] * len(header[one]["shape"])
            case 6:
                header["model.layers.0.self_attn.rotary_emb.inv_freq"] = header.pop(one)
            case 7:
                header[one] = c.choice(VALUES)

    edit_header(c.choice(shards_of(folder)), change)


def change_shard(folder: Path, c: Chance) -> None:
    path = c.choice(shards_of(folder))
    content = path.read_bytes()
    match c.randrange(5):
        case 0:
            path.write_bytes(content[: c.randrange(len(content))])
        case 1:
            path.write_bytes(content + b"more")
        case 2:
            path.write_bytes(struct.pack("<Q", c.choice((0, 2**20, 2**62))) + content[8:])
        case 3:
            path.unlink()
        case 4:
            shutil.copy(c.choice(shards_of(folder)), path.with_name("copy"))
            (path.with_name("copy")).rename(path)


def change_index(folder: Path, c: Chance) -> None:
    def change(index: dict[str, Any]) -> None:
        names = index["weight_map"]
        name = c.choice(list(names))
        match c.randrange(6):
            case 0:
                del names[name]
            case 1:
                names[name] = c.choice(shards_of(folder)).name
            case 2:
                names[f"{name}.more"] = names[name]
            case 3:
                names[name] = c.choice(("../x.safetensors", "/dev/zero", 7, None, "absent.safetensors", ""))
            case 4:
                index["weight_map"] = c.choice(VALUES)
            case 5:
                index["metadata"] = c.choice(VALUES)

    edit_json(folder / INDEX, change)


def one_file_beside_shards(folder: Path, c: Chance) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for path in shards_of(folder) for name, tensor in load_file(path).items()}
    for name in c.sample(list(tensors), c.randrange(2)):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tie(folder: Path, c: Chance) -> None:
    """Tied in the config; and one of the two matrices, or both, in the files."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for path in shards_of(folder) for name, tensor in load_file(path).items()}
    for path in (*shards_of(folder), folder / INDEX):
        path.unlink()
    match c.randrange(3):
        case 0:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        case 1:
            tensors.pop("lm_head.weight")
        case 2:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", lambda config: config.update({"tie_word_embeddings": True}))


def change_tokenizer_config(folder: Path, c: Chance) -> None:
    name = c.choice(("eos_token", "bos_token", "pad_token", "added_tokens_decoder", "extra_special_tokens",
                     "additional_special_tokens", "chat_template", "model_max_length"))  # fmt: skip
    value = c.choice(
        (*VALUES, "<|im_end|>", {"content": "<|im_end|>"}, ["<|extra|>"], {"259": EXTRA}, {"300": EXTRA})
    )
    edit_json(folder / "tokenizer_config.json", lambda config: config.update({name: value}))


def change_file_beside(folder: Path, c: Chance) -> None:
    name = c.choice(("special_tokens_map.json", "added_tokens.json"))
    content = c.choice(
        ({}, {"eos_token": "<|im_end|>"}, {"<|extra|>": 259}, {"<|extra|>": 7}, [], 3, {"a": None})
    )
    (folder / name).write_text(json.dumps(content))


def change_tokenizer(folder: Path, c: Chance) -> None:
    def change(content: dict[str, Any]) -> None:
        match c.randrange(4):
            case 0:
                content.pop(c.choice(list(content)))
            case 1:
                content[c.choice(list(content))] = c.choice(VALUES)
            case 2:
                content["added_tokens"].pop()
            case 3:
                content["model"].pop(c.choice(list(content["model"])))

    edit_json(folder / "tokenizer.json", change)


MUTATIONS: tuple[Callable[[Path, Chance], None], ...] = (
    drop_config_field, change_config_field, add_config_field, change_rope, change_family, change_generation_config,
    change_header, change_shard, change_index, one_file_beside_shards, tie, change_tokenizer_config,
    change_file_beside, change_tokenizer,
)  # fmt: skip


def require_right(folder: Path) -> bool:
    """Whether it is loaded, and then computes what transformers does; else it is refused by name."""
    try:
        loaded = load_model(folder)
    except ModelLoadError as error:
        assert str(folder) in str(error), error
        return False
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception:
        return True  # it is choosier than we are
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(loaded.model, IDS), expected, rtol=1e-4, atol=1e-4)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected_ids = tokenizer.encode("hi<|extra|><|im_end|>", add_special_tokens=False)
    except Exception:
        return True
    if loaded.tokenizer is not None:
        assert loaded.tokenizer.encode("hi<|extra|><|im_end|>") == expected_ids
        if tokenizer.eos_token_id is not None:
            assert tokenizer.eos_token_id in loaded.config.eos_token_ids
    return True


def test_the_folder_that_is_changed_is_right_itself(whole: Path) -> None:
    assert require_right(whole)


@pytest.mark.parametrize(
    "seeds", [range(SLICE), pytest.param(range(SLICE, CASES), marks=pytest.mark.slow)], ids=["slice", "rest"]
)
def test_changed_folder_is_refused_by_name_or_computes_what_it_should(
    seeds: range, whole: Path, tmp_path: Path
) -> None:
    """None costs more than 5 seconds of the processor to refuse or load, or 200 MB beside the files."""
    outcomes = set()
    for seed in seeds:
        folder, chance = tmp_path / str(seed), Chance(seed)
        shutil.copytree(whole, folder)
        MUTATIONS[seed % len(MUTATIONS)](folder, chance)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            load_model(folder)
        except ModelLoadError:
            pass
        assert time.process_time() - start < 5, seed
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, seed
        try:
            outcomes.add(require_right(folder))
        except Exception as error:
            raise AssertionError(f"case {seed}, {MUTATIONS[seed % len(MUTATIONS)].__name__}") from error
        shutil.rmtree(folder)
    assert outcomes == {True, False}
