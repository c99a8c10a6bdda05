# ruff: noqa: E501
"""A Hugging Face folder means what transformers takes it to mean, whatever stands beside the usual files."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import BYTES_OF_SYMBOLS, Tokenizer
from tests.model.model_files import named_weights, save_folder

TIED = replace(TINY, tie_word_embeddings=True)
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.rotary_emb.sin_cached",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_rotary_tables_in_a_checkpoint_are_ignored(
    dtype: torch.dtype, name: str, shards: int, tmp_path: Path
) -> None:
    weights = named_weights(random_llama())
    folder = save_folder(tmp_path, TINY, weights | {name: torch.ones(4, dtype=dtype)}, shards=shards)
    found = named_weights(load_model(folder).model)
    assert all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.parametrize("shards", [1, 2])
def test_tied_model_may_keep_its_matrix_under_the_name_of_the_head(shards: int, tmp_path: Path) -> None:
    weights = named_weights(random_llama(TIED))
    stored = {"lm_head.weight" if "embed" in name else name: tensor for name, tensor in weights.items()}
    model = load_model(save_folder(tmp_path, TIED, stored, shards=shards)).model
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


def test_untied_model_needs_both_matrices(tmp_path: Path) -> None:
    weights = named_weights(random_llama())
    del weights["model.embed_tokens.weight"]
    with pytest.raises(ModelLoadError, match=r"missing tensor: model\.embed_tokens\.weight"):
        load_model(save_folder(tmp_path, TINY, weights))


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Token id = byte, then three special tokens."""
    backend = tokenizers.Tokenizer(models.BPE(BYTES_OF_SYMBOLS, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # 256, 257, 258
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return backend


def save(folder: Path, files: dict[str, Any], backend: tokenizers.Tokenizer | None = None) -> Path:
    """A model folder whose tokenizer has these files beside it."""
    save_folder(folder, TINY, named_weights(random_llama()))
    (backend or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    given = files.get("tokenizer_config.json", {})
    files = files | {"tokenizer_config.json": {k: v for k, v in (config | given).items() if v is not None}}
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def tokenizer_of(folder: Path) -> Tokenizer:
    found = load_model(folder).tokenizer
    assert found is not None
    return found


EXTRA = {"content": "<|extra|>", "special": True, "normalized": False}
STRIPPING = EXTRA | {"lstrip": True, "rstrip": True}
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"259": EXTRA}}},
    "added_tokens_decoder, not special": {
        "tokenizer_config.json": {"added_tokens_decoder": {"259": EXTRA | {"special": False}}}
    },
    "added_tokens_decoder, stripping": {
        "tokenizer_config.json": {"added_tokens_decoder": {"259": STRIPPING}}
    },
    "two of them, not in order": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"260": EXTRA | {"content": "<|more|>"}, "259": EXTRA}
        }
    },
    "added_tokens.json": {"added_tokens.json": {"<|extra|>": 259}},
    "added_tokens.json, named in the config": {
        "added_tokens.json": {"<|extra|>": 259},
        "tokenizer_config.json": {"pad_token": "<|extra|>"},
    },
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<|extra|>"]}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<|extra|>"]}},
    "special_tokens_map.json": {
        "special_tokens_map.json": {
            "eos_token": "<|im_end|>",
            "bos_token": {"content": "<|im_start|>", "lstrip": False},
            "additional_special_tokens": ["<|extra|>"],
        },
        "tokenizer_config.json": {"eos_token": None, "chat_template": TEMPLATE},
    },
    "special_tokens_map.json over tokenizer_config.json": {
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    },
    "special_tokens_map.json where added_tokens_decoder is": {
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        "tokenizer_config.json": {"chat_template": TEMPLATE, "added_tokens_decoder": {"259": EXTRA}},
    },
    "a pad_token that the vocabulary lacks": {"tokenizer_config.json": {"pad_token": "<|extra|>"}},
    "add_bos_token": {"tokenizer_config.json": {"bos_token": "<|im_start|>", "add_bos_token": True}},
    "add_bos_token and add_eos_token": {
        "tokenizer_config.json": {"bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True}
    },
    "add_bos_token without a bos_token": {"tokenizer_config.json": {"add_bos_token": True}},
    "generation tags": {
        "tokenizer_config.json": {
            "chat_template": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        }
    },
    "a template of its own": {
        "chat_template.jinja": "NEW{{ messages[0].content }}",
        "tokenizer_config.json": {"chat_template": "old"},
    },
}


def what_it_does(tokenizer: Any, *, is_ours: bool) -> dict[str, Any]:
    """Everything of a tokenizer that a prompt or an answer depends on."""
    text = "<|im_start|>hi <|extra|> ho<|more|>!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    if is_ours:
        rendered = tokenizer.apply_chat_template(HI) if tokenizer.has_chat_template else None
        eos = tokenizer.eos_token_ids[0]
    else:
        rendered = None
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
        eos = tokenizer.eos_token_id
    return {
        "ids": ids,
        "prompt": tokenizer.encode("hi", add_special_tokens=True),
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "whole text": tokenizer.decode(ids, skip_special_tokens=False),
        "chat": rendered,
        "eos": eos,
    }


@pytest.mark.parametrize("files", BESIDE.values(), ids=BESIDE.keys())
def test_what_stands_beside_tokenizer_json_counts_as_for_transformers(
    files: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = save(tmp_path, files)
    reference = what_it_does(AutoTokenizer.from_pretrained(folder), is_ours=False)
    assert what_it_does(tokenizer_of(folder), is_ours=True) == reference


def test_token_that_would_get_another_id_than_its_file_says_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": {"300": EXTRA}}})
    with pytest.raises(
        ModelLoadError, match=r"tokenizer_config\.json: token '<\|extra\|>' is said to have id 300"
    ):
        load_model(folder)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 2 ** (10 ** 9) }}", {"a": 1}, ["x"], 7])
def test_template_that_cannot_be_used_leaves_plain_text(
    template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minipaged.model.chat_template.SECONDS", 1.0)
    tokenizer = tokenizer_of(save(tmp_path, {"tokenizer_config.json": {"chat_template": template}}))
    assert tokenizer.encode("hi") == [104, 105]
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.apply_chat_template(HI)


@pytest.mark.parametrize(
    "text", ["a" * 40, ("a" * 21 + "!") * 2000], ids=["one long run", "many shorter runs"]
)
def test_expression_that_explodes_is_an_error_of_that_text(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minipaged.model.tokenizer.SECONDS", 1.0)
    backend = byte_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), behavior="isolated")
    tokenizer = tokenizer_of(save(tmp_path, {}, backend))
    with pytest.raises(ValueError, match=r"the tokenizer (gave up on|could not cut) this text"):
        tokenizer.encode(text + "!")
    assert tokenizer.encode("hi") == [104, 105]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": make_pipe,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes in folders")
@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES.keys())
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ],
)
def test_what_is_no_plain_file_is_refused(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = save(tmp_path, {})
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ModelLoadError, match=f"{name}: not a plain file"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_text_beyond_measure_is_refused(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, {})
    (folder / name).write_text(" " * 2**22 + "{}")
    with pytest.raises(ModelLoadError, match=f"{name}: longer than {2**22} bytes"):
        load_model(folder)
