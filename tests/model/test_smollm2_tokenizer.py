"""SmolLM2's tokenizer, built from the GGUF vocabulary, equals transformers on every kind of text."""

import random
import unicodedata

import pytest

from tests.model.hf_reference import hf_tokenizer, model_is_installed, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not model_is_installed(), reason="needs the SmolLM2 file: make setup"),
]

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


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers_on_every_kind_of_text(text: str) -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert ids == reference_ids(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(id) or b"" for id in ids) == text.encode()


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


def test_smollm2_facts() -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2, 0, 4)
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.special_tokens["<|im_end|>"] == 2
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a")  # it has no BOS habit


def test_bytes_of_every_token_are_the_text_of_every_token() -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    for id in range(tokenizer.vocab_size):
        expected = tokenizer.decode([id], skip_special_tokens=False)
        assert (tokenizer.token_bytes(id) or b"").decode(errors="replace") == expected
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
