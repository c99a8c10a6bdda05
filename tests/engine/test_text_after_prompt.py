"""Prompt and text joined are the decoded whole, also where a token's text depends on what is before it."""

import random
from functools import cache

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from minipaged.config import CacheConfig, EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import RequestOutput
from minipaged.engine.text import OutputState, text_after
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import BYTES_OF_SYMBOLS, Tokenizer
from minipaged.sampling_params import RequestOutputKind, SamplingParams

WORDS = ["▁The", "▁sky", "▁is", "▁blue", "▁return", "▁▁▁", "▁", "ing", "s", ".", "▁你", "好"]


@cache
def sentencepiece() -> tuple[Tokenizer, dict[str, int]]:
    """As Llama 2's: words with U+2581 for a space, byte fallback, one leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁Theskyibluratng.你好\n", *WORDS]:
        vocab.setdefault(token, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend), vocab


@cache
def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(BYTES_OF_SYMBOLS, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], **settings: object) -> OutputState:
    state = OutputState(tokenizer, SamplingParams(**settings), (), len(output), prompt)  # type: ignore[arg-type]
    joined = ""
    for token in output:
        state.token_ids.append(token)
        if state.check_end():
            break
        joined += state.delta()
    joined += state.delta()
    assert joined == state.text
    return state


def test_first_word_keeps_its_space_after_a_prompt() -> None:
    tokenizer, vocab = sentencepiece()
    prompt = [1, vocab["▁The"], vocab["▁sky"], vocab["▁is"]]
    output = [vocab["▁blue"], vocab["."]]
    assert tokenizer.decode(prompt) + streamed(tokenizer, prompt, output).text == "The sky is blue."
    assert streamed(tokenizer, [1], output).text == "blue."  # nothing before it: then the space is no text
    assert streamed(tokenizer, [], output).text == "blue."


def test_stop_string_may_begin_with_the_space_before_the_first_word() -> None:
    tokenizer, vocab = sentencepiece()
    state = streamed(tokenizer, [1, vocab["▁is"]], [vocab["▁blue"], vocab["."]], stop=[" blue"])
    assert (state.text, state.finish_reason, state.stop_reason) == ("", "stop", " blue")


@pytest.mark.parametrize("skip", [True, False])
def test_any_continuation_is_the_rest_of_the_whole(skip: bool) -> None:
    tokenizer, vocab = sentencepiece()
    chance = random.Random(3)
    words = [*(vocab[word] for word in WORDS), 1, 2]
    for _ in range(500):
        prompt = [1, *chance.choices(words, k=chance.randrange(12))]
        output = chance.choices(words, k=chance.randrange(1, 6))
        before = tokenizer.decode(prompt, skip_special_tokens=skip)
        whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
        text = streamed(tokenizer, prompt, output, skip_special_tokens=skip).text
        assert before + text == whole, (prompt, output)


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("vocabulary", ["bytes", "sentencepiece"])
def test_character_that_the_prompt_leaves_cut_is_the_answers(vocabulary: str, cut: int) -> None:
    text = "a 😊你b"
    if vocabulary == "bytes":
        tokenizer, ids = byte_level(), list(text.encode())
    else:
        tokenizer, vocab = sentencepiece()
        ids = [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
        assert tokenizer.decode(ids) == text
    cut = min(cut, len(ids) - 1)
    whole_before = text.encode()[:cut].decode(errors="ignore")
    assert whole_before + streamed(tokenizer, ids[:cut], ids[cut:]).text == text


def test_text_after_a_prompt_shows_special_tokens() -> None:
    tokenizer, vocab = sentencepiece()
    assert text_after(tokenizer, [1, vocab["▁is"]], [vocab["▁blue"], 2]) == " blue</s>"


def generate(
    tokenizer: Tokenizer, vocab_size: int, prompt: list[int], **settings: object
) -> list[RequestOutput]:
    from dataclasses import replace

    model = random_llama(replace(TINY, vocab_size=vocab_size))
    engine = Engine(
        model,
        CacheConfig(num_blocks=32, block_size=4, dtype=model.dtype),
        EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64),
        tokenizer=tokenizer,
    )
    settings = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True, "logprobs": 3, **settings}
    engine.add_request("a", prompt, SamplingParams(**settings))  # type: ignore[arg-type]
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("vocabulary", ["bytes", "sentencepiece"])
def test_texts_of_the_chosen_tokens_join_to_the_text(
    vocabulary: str, kind: RequestOutputKind, seed: int
) -> None:
    """Random tokens of a byte vocabulary cut characters all the time."""
    if vocabulary == "bytes":
        tokenizer, prompt = byte_level(), list(b"hi \xf0\x9f")
    else:
        tokenizer, vocab = sentencepiece()
        prompt = [1, vocab["▁The"]]
    outputs = generate(
        tokenizer, tokenizer.vocab_size, prompt, seed=seed, output_kind=kind, skip_special_tokens=False
    )
    token_ids, entries, text = [], [], ""
    for output in outputs:
        part = output.outputs[0]
        if kind is not RequestOutputKind.DELTA:
            token_ids, entries, text = [], [], ""
        token_ids += part.token_ids
        entries += part.logprobs or []
        text += part.text
    names = [entry[token].decoded_token for entry, token in zip(entries, token_ids, strict=True)]
    if vocabulary == "bytes" or "\ufffd" not in text:
        assert "".join(name or "" for name in names) == text


def test_tokens_of_an_emoji_are_named_at_the_last() -> None:
    tokenizer = byte_level()
    prompt = list("x😊y".encode())
    (output,) = generate(tokenizer, 256, prompt, prompt_logprobs=0, max_tokens=1)
    entries = output.prompt_logprobs
    assert entries is not None
    names = [
        entry[token].decoded_token for entry, token in zip(entries[1:], prompt[1:], strict=True) if entry
    ]
    assert names == ["", "", "", "😊", "y"]
