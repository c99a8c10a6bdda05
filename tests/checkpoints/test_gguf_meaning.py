"""A GGUF means what llama.cpp takes it to mean, also where it says nothing."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minipaged.checkpoints.loading import load_model
from minipaged.engine.text import OutputState
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import Tokenizer
from minipaged.sampling_params import SamplingParams
from tests.checkpoints.test_gguf_vocab import SYMBOLS, load_gguf_vocabulary
from tests.model.model_files import named_weights, save_gguf

CONTROL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|eom_id|>",
    "<|user|>",
]  # 257 …
WORDS = ["café", "Bác", "naïve", "東京", "a b", "Ġx"]  # 263 …
UNUSED = [f"<unused{index}>" for index in range(TINY.vocab_size - 257 - len(CONTROL) - len(WORDS))]
VOCABULARY: dict[str, Any] = {
    "pre": "llama-bpe",
    "tokens": [*SYMBOLS, "ab", *CONTROL, *WORDS, *UNUSED],
    "token_type": [1] * 257 + [3] * len(CONTROL) + [4] * len(WORDS) + [5] * len(UNUSED),
    "merges": ["a b"],
    "bos_token_id": 257,
    "eos_token_id": 258,
    "add_bos_token": None,
}
HI = [ord("h"), ord("i")]


def load(path: Path, **changes: Any) -> Tokenizer:
    found = VOCABULARY | changes
    return load_gguf_vocabulary(path, **{f"tokenizer.ggml.{name}": value for name, value in found.items()})


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    state = OutputState(tokenizer, SamplingParams(max_tokens=99), (), 99)
    state.token_ids += token_ids
    state.finish("length")
    return state.text


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3"])
@pytest.mark.parametrize(("key", "expected"), [(None, [257, *HI]), (True, [257, *HI]), (False, HI)])
def test_llama3_prompt_begins_with_bos_unless_the_file_denies_it(
    pre: str, key: bool | None, expected: list[int], tmp_path: Path
) -> None:
    assert load(tmp_path, pre=pre, add_bos_token=key).encode("hi", add_special_tokens=True) == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2"])
@pytest.mark.parametrize(("key", "expected"), [(None, HI), (True, [257, *HI]), (False, HI)])
def test_other_prompt_begins_with_bos_only_where_the_file_says_so(
    pre: str, key: bool | None, expected: list[int], tmp_path: Path
) -> None:
    assert load(tmp_path, pre=pre, add_bos_token=key).encode("hi", add_special_tokens=True) == expected


def test_eos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, add_eos_token=True)
    assert tokenizer.encode("hi", add_special_tokens=True) == [257, *HI, 258]
    assert tokenizer.encode("hi") == HI


def test_bos_that_must_be_added_and_is_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"get the bos token, but tokenizer\.ggml\.bos_token_id is missing"
    ):
        load(tmp_path, bos_token_id=None)


@pytest.mark.parametrize("eos", [258, 259, None])
def test_tokens_that_end_an_answer_are_found_by_their_text(eos: int | None, tmp_path: Path) -> None:
    assert set(load(tmp_path, eos_token_id=eos).eos_token_ids) == {258, 259, 260, 261}


def test_end_of_one_part_of_an_answer_is_no_end(tmp_path: Path) -> None:
    """Where <|return|> and <|call|> end an answer, <|end|> ends a message within it."""
    tokens = [
        *SYMBOLS,
        "ab",
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|x|>",
        "<|y|>",
        *WORDS,
        *UNUSED,
    ]
    assert set(load(tmp_path, tokens=tokens, eos_token_id=259).eos_token_ids) == {259, 260}
    tokens[260] = "<|w|>"
    assert 258 in load(tmp_path, tokens=tokens, eos_token_id=259).eos_token_ids


@pytest.mark.parametrize("types", [None, [1] * TINY.vocab_size], ids=["no types", "all ordinary"])
def test_end_of_turn_is_a_control_token_whatever_its_type_says(
    types: list[int] | None, tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, token_type=types)
    assert tokenizer.encode("hi<|eot_id|>") == [*HI, 259]
    assert tokenizer.decode([*HI, 259]) == "hi"
    assert tokenizer.encode("<|user|>") != [262]  # nothing says that this one is


@pytest.mark.parametrize("word", WORDS)
def test_user_defined_token_stands_for_its_text_as_it_is(word: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode(f"x {word}!")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == f"x {word}!"
    assert streamed(tokenizer, ids) == f"x {word}!"


def test_control_token_with_letters_of_the_byte_alphabet_is_shown_as_it_is(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokens=[*SYMBOLS, "ab", *CONTROL[:-1], "<|é|>", *WORDS, *UNUSED])
    assert tokenizer.decode([262], skip_special_tokens=False) == "<|é|>"
    assert tokenizer.decode([262]) == ""


def test_unused_token_has_no_text(tmp_path: Path) -> None:
    assert load(tmp_path).decode([ord("a"), TINY.vocab_size - 1]) == "a"


def test_vocabulary_of_many_special_tokens_is_read_in_one_go(tmp_path: Path) -> None:
    tokens = [*SYMBOLS, "ab", *[f"<{index}>" for index in range(20_000)]]
    config = {"vocab_size": len(tokens)}
    weights = named_weights(random_llama())
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = torch.zeros(
        len(tokens), TINY.hidden_size
    )
    metadata = {f"tokenizer.ggml.{name}": value for name, value in VOCABULARY.items() if value is not None}
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "llama.vocab_size": len(tokens),
    }
    metadata["tokenizer.ggml.token_type"] = [1] * 257 + [3] * 20_000
    path = save_gguf(tmp_path / "m.gguf", dataclasses.replace(TINY, **config), weights, metadata=metadata)
    loaded = load_model(path)
    assert loaded.tokenizer is not None
    assert len(loaded.tokenizer.special_token_ids) == 20_000


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd", "blk.1.attn_rot_embd.weight"])
def test_derived_tensor_is_ignored(name: str, tmp_path: Path) -> None:
    weights = named_weights(random_llama())
    path = save_gguf(tmp_path / "m.gguf", TINY, weights, extra_tensors={name: np.ones(4, np.float32)})
    found = named_weights(load_model(path).model)
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def offset_place(content: bytes, tensor: str) -> int:
    """Where the header states the offset of a tensor of two dimensions."""
    return content.index(tensor.encode()) + len(tensor) + 4 + 2 * 8 + 4


@pytest.mark.parametrize("offset", [0, 32, 64, 2**64 - 32, 2**63])
def test_tensor_that_does_not_begin_where_the_sizes_say_is_refused(offset: int, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", TINY, named_weights(random_llama()))
    content = bytearray(path.read_bytes())
    place = offset_place(content, "blk.0.attn_q.weight")
    struct.pack_into("<Q", content, place, offset)
    path.write_bytes(content)
    with pytest.raises(
        ModelLoadError, match=rf"m\.gguf: tensor blk\.0\.attn_q\.weight begins at byte {offset} "
    ):
        load_model(path)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(num_tensors: int, *fields: bytes) -> bytes:
    architecture = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, 1 + len(fields)) + architecture + b"".join(fields)


HEADERS = {
    "3 million empty strings": (
        header(0, string(b"x") + struct.pack("<IIQ", 9, 8, 3_000_000) + bytes(8 * 3_000_000)),
        r"metadata x has 3000000 values",
    ),
    "many lists below the limit": (
        header(
            0,
            *[string(b"x%d" % i) + struct.pack("<IIQ", 9, 8, 9 * 10**5) + bytes(72 * 10**5) for i in (0, 1)],
        ),
        r"metadata x1 has 900000 values: with those before it more than",
    ),
    "more strings than bytes": (
        header(0, string(b"x") + struct.pack("<IIQ", 9, 8, 2**20)),
        "truncated",
    ),
    "a list of lists": (
        header(0, string(b"x") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1) + bytes(64)),
        "metadata x has the unknown type 9",
    ),
    "2**60 tensors": (header(2**60), f"the header has {2**60} tensors"),
    "a key twice": (header(0, *[string(b"x") + struct.pack("<IB", 0, 1)] * 2), "metadata x is there twice"),
    "an alignment of 24": (
        header(0, string(b"general.alignment") + struct.pack("<II", 4, 24)),
        "general.alignment is 24, a power of two",
    ),
}


@pytest.mark.parametrize(("content", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_header_that_costs_too_much_or_cannot_be_right_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: {message}"):
        load_model(tmp_path / "m.gguf")
