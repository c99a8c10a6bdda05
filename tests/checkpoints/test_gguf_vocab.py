"""A tokenizer is built from a GGUF's vocabulary and merges, or the part at fault is named."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from minipaged.checkpoints.gguf_vocab import LLAMA3_PIECES
from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import BYTES_OF_SYMBOLS, Tokenizer
from tests.model.model_files import named_weights, save_gguf

SYMBOLS = sorted(BYTES_OF_SYMBOLS, key=BYTES_OF_SYMBOLS.__getitem__)  # the symbol of byte 0, 1, ...


def gguf_vocabulary(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of TINY's size: 256 bytes, three merges, special tokens, unused ones."""
    merged = ["he", "ll", "hell"]
    special = ["<s>", "</s>", "<user>"]
    unused = [f"<unused{index}>" for index in range(TINY.vocab_size - 256 - 6)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*SYMBOLS, *merged, *special, *unused],
        "tokenizer.ggml.token_type": [1] * 259 + [3, 3, 4] + [5] * len(unused),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    } | changes


def load_gguf_vocabulary(path: Path, **changes: Any) -> Tokenizer:
    config = dataclasses.replace(TINY, eos_token_ids=(), bos_token_id=None)
    metadata = {key: value for key, value in gguf_vocabulary(**changes).items() if value is not None}
    loaded = load_model(
        save_gguf(path / "tiny.gguf", config, named_weights(random_llama()), metadata=metadata)
    )
    assert loaded.tokenizer is not None
    return loaded.tokenizer


def test_gguf_vocabulary_and_merges_make_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_gguf_vocabulary(tmp_path)
    assert tokenizer.vocab_size == TINY.vocab_size
    assert tokenizer.encode("hello</s><user>") == [258, ord("o"), 260, 261]
    assert tokenizer.encode("hi", add_special_tokens=True) == [259, ord("h"), ord("i")]
    assert tokenizer.special_token_ids == {259, 260}
    assert tokenizer.decode([259, 258, 261, 260]) == "hell<user>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert tokenizer.eos_token_ids == (260,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["hel"]}, "tokenizer.ggml.merges holds"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "tiny.gguf: "),
        ({"tokenizer.ggml.token_type": [1, 1]}, "320 tokens but 2 token types"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "319 tokens more than once"),
        ({"tokenizer.ggml.bos_token_id": 320}, "320"),
        ({"tokenizer.ggml.unknown_token_id": 5000}, "unknown_token_id is 5000"),
    ],
)
def test_faulty_gguf_vocabulary_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_gguf_vocabulary(tmp_path, **changes)


def test_a_template_that_does_not_compile_refuses_chat_and_leaves_plain_text(tmp_path: Path) -> None:
    tokenizer = load_gguf_vocabulary(tmp_path, **{"tokenizer.chat_template": "{% for %}"})
    assert tokenizer.decode(tokenizer.encode("hell")) == "hell"
    with pytest.raises(ValueError, match="not valid Jinja"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_llama3_text_is_cut_as_its_published_pattern_says() -> None:
    cut = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PIECES), behavior="isolated")
    text = "It's 12345 été!!\n\n  x"
    pieces = [piece for piece, _ in cut.pre_tokenize_str(text)]
    assert pieces == ["It", "'s", " ", "123", "45", " été", "!!\n\n", " ", " x"]


def test_llama3_piece_that_is_a_token_is_not_built_from_merges(tmp_path: Path) -> None:
    """Without its last merge "hell" is still a token; Llama 3 takes it whole, SmolLM2 does not."""
    merges = {"tokenizer.ggml.merges": ["h e", "l l"]}
    assert load_gguf_vocabulary(tmp_path, **merges).encode("hell") == [256, 257]
    llama3 = load_gguf_vocabulary(tmp_path, **merges, **{"tokenizer.ggml.pre": "llama-bpe"})
    assert llama3.encode("hell") == [258]
