"""What serving needs around a tokenizer: special tokens, bytes, templates, and errors that name the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import BYTES_OF_SYMBOLS, Tokenizer
from tests.model.model_files import named_weights, save_folder

SYMBOLS = sorted(BYTES_OF_SYMBOLS, key=BYTES_OF_SYMBOLS.__getitem__)  # the symbol of byte 0, 1, ...


def byte_level() -> tokenizers.Tokenizer:
    """One token per byte, in byte order, then <s>, </s> and a token that is added but not special."""
    backend = tokenizers.Tokenizer(models.BPE({symbol: id for id, symbol in enumerate(SYMBOLS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("two words", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


def test_special_tokens_in_text_are_read_as_special_tokens() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.encode("a</s>b") == [97, 257, 98]
    assert tokenizer.special_tokens == {"<s>": 256, "</s>": 257}


def test_tokens_around_the_text_come_only_when_asked_for() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("a", add_special_tokens=True) == [256, 97]
    assert tokenizer.encode("") == []


def test_decoding_skips_special_tokens_unless_told_not_to() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"
    assert tokenizer.decode([256, 104, 105, 257], skip_special_tokens=False) == "<s>hi</s>"
    assert tokenizer.decode([104, 999, 105]) == "hi"
    assert tokenizer.decode([]) == ""


def test_bytes_that_form_no_character_decode_to_the_replacement_character() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode([0xF0, 0x9F, 104]) == "\ufffdh"
    assert tokenizer.token_bytes(0xF0) == b"\xf0"


def test_token_bytes_cover_bytes_added_tokens_and_unknown_ids() -> None:
    tokenizer = Tokenizer(byte_level())
    assert [tokenizer.token_bytes(id) for id in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(258) == b"two words"
    assert tokenizer.token_bytes(10_000) == b""


def test_vocabulary_that_is_not_byte_level_has_no_token_bytes() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend).token_bytes(0) is None


def test_truncation_and_padding_of_a_file_are_not_taken_over() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("abcd") == [97, 98, 99, 100]


@pytest.mark.parametrize("text", [None, 7, b"bytes", ["list"]])
def test_only_text_is_encoded(text: Any) -> None:
    with pytest.raises(TypeError, match="a string is needed"):
        Tokenizer(byte_level()).encode(text)


def test_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match="position 1: surrogates not allowed"):
        Tokenizer(byte_level()).encode("a\udcffb")


def test_chat_without_a_template_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="no chat template: pass plain text or token ids"):
        Tokenizer(byte_level()).apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path, TINY, named_weights(random_llama()))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_folder_tokenizer_brings_template_and_end_token(folder: Path) -> None:
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert tokenizer.eos_token_ids == (257,)
    # A file of its own comes first; of several named templates the default one counts.
    (folder / "chat_template.jinja").write_text("from the file")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "from the file"


def test_default_one_of_several_named_templates_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "plain"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder is \[1\], an object is needed"),
        ({"added_tokens_decoder": {"x": "<new>"}}, "'x'"),
        ({"eos_token": "<none such>"}, "eos_token '<none such>' is not in the vocabulary"),
    ],
)
def test_fault_in_tokenizer_config_names_the_file(folder: Path, settings: Any, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=rf"tokenizer_config\.json: .*{message}"):
        load_model(folder)
