"""The tokenizer: from tokenizer.json or a GGUF vocabulary, checked against transformers and known texts."""

import dataclasses
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from minipaged.model.errors import ModelLoadError
from minipaged.model.gguf_vocab import LLAMA3_PIECES
from minipaged.model.loading import load_model
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import BYTES_OF_SYMBOLS, Tokenizer
from tests.model.hf_reference import hf_tokenizer, model_is_installed, smollm2
from tests.model.model_files import named_weights, save_folder, save_gguf

needs_model = pytest.mark.skipif(not model_is_installed(), reason="needs the SmolLM2 file: make setup")
SYMBOLS = sorted(BYTES_OF_SYMBOLS, key=BYTES_OF_SYMBOLS.__getitem__)  # the symbol of byte 0, 1, ...

TEXTS = [
    "",
    "Hello, world!",
    "The year 2024 has 366 days; pi is 3.14159 and 1/3 = 0.333…",
    "   leading,   inner    and trailing spaces   ",
    "tabs\tand\r\nline\n\n\nbreaks  \n 7 \n",
    "    def f(x):\n        return x ** 2  # code\n",
    "it's we've I'll they'd don't ROCK'N'ROLL",
    "你好，世界！ 日本語のテキスト 한국어",
    "Ünïcödé naïve café e\u0301 ﬁ Straße ΑΒΓ привет",
    "😊👩‍👩‍👧 flags 🇫🇷🇩🇪 ❤️‍🔥",
    "½ ⅷ ٣٤٥ １２３ ²³",
    "\u00a0\u200b\ufeff\x00\x1f controls",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep> <|im_end|",
]


@needs_model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers_on_every_kind_of_text(text: str) -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert ids == reference_ids(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(id) or b"" for id in ids) == text.encode()


@needs_model
def test_smollm2_ids_equal_transformers_on_random_mixtures() -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    chance = random.Random(0)
    pieces = [
        *"aZ \n\t\r.'_-",
        "  ",
        " the",
        "23",
        "é",
        "好",
        "😊",
        "½",
        "٣",
        "'s",
        "<|im_end|>",
        "\u00a0",
        "\r\n",
    ]
    for _ in range(2000):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 12)))
        ids = tokenizer.encode(text)
        assert ids == reference_ids(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def reference_ids(text: str) -> list[int]:
    """transformers' ids, with the text cut at every digit first.

    SmolLM2 cuts there; llama.cpp does too ("tokenizer.ggml.pre" = "smollm"). transformers 5.24 reads the
    vocabulary of a GGUF but not this rule, which shows in white space before a digit.
    """
    pieces = [""]
    for character in text:
        if unicodedata.category(character).startswith("N"):
            pieces += [character, ""]
        else:
            pieces[-1] += character
    return [id for piece in pieces for id in hf_tokenizer().encode(piece, add_special_tokens=False)]


@needs_model
def test_smollm2_chat_template_equals_transformers() -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    assert tokenizer.has_chat_template
    turns = [
        {"role": "user", "content": "What is the capital of France? "},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?\n"},
    ]
    for messages in (turns[:1], turns, [{"role": "system", "content": "Be brief."}, *turns]):
        for generate in (True, False):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=generate)
            theirs = hf_tokenizer().apply_chat_template(
                messages, add_generation_prompt=generate, tokenize=False
            )
            assert text == theirs


@needs_model
def test_smollm2_facts() -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.special_tokens["<|im_end|>"] == 2
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a")  # it has no BOS habit


@needs_model
def test_bytes_of_every_token_are_the_text_of_every_token() -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    for id in range(tokenizer.vocab_size):
        expected = tokenizer.decode([id], skip_special_tokens=False)
        assert (tokenizer.token_bytes(id) or b"").decode(errors="replace") == expected
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def byte_level(**options: Any) -> tokenizers.Tokenizer:
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
        ({"chat_template": "{% for %}"}, "chat template is not valid Jinja"),
        ({"chat_template": 7}, "chat_template is of type int"),
        ({"eos_token": "<none such>"}, "eos_token '<none such>' is not in the vocabulary"),
    ],
)
def test_fault_in_tokenizer_config_names_the_file(folder: Path, settings: Any, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=rf"tokenizer_config\.json: .*{message}"):
        load_model(folder)


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
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["hel"]}, "tokenizer.ggml.merges holds"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "tiny.gguf: "),
        ({"tokenizer.ggml.token_type": [1, 1]}, "320 tokens but 2 token types"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "319 tokens more than once"),
        ({"tokenizer.ggml.bos_token_id": 320}, "320"),
        ({"tokenizer.ggml.unknown_token_id": 5000}, "unknown_token_id is 5000"),
        ({"tokenizer.chat_template": "{% for %}"}, "not valid Jinja"),
    ],
)
def test_faulty_gguf_vocabulary_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_gguf_vocabulary(tmp_path, **changes)


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
