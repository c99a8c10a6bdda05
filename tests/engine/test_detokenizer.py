"""Incremental text: characters that span tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.engine.text import make_detokenizer
from tests.engine.fake_tokenizers import ByteFallbackTokenizer, ByteTokenizer, MetaspaceTokenizer

TEXT = "aé😊 你!"


def pieces(tokenizer, token_ids, **options) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, **options)
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.fixture(params=[True, False], ids=["bytes", "window"])
def tokenizer(request) -> ByteTokenizer:
    return ByteTokenizer(["😊!", " you"], has_bytes=request.param)


def test_a_character_appears_whole_with_its_last_byte(tokenizer):
    deltas = pieces(tokenizer, TEXT.encode())
    assert deltas == ["a", "", "é", "", "", "", "😊", " ", "", "", "你", "!", ""]


def test_a_cut_character_comes_out_once_at_the_flush(tokenizer):
    cut = list(TEXT.encode())[:5]  # the emoji's second byte
    deltas = pieces(tokenizer, cut)
    assert "".join(deltas[:-1]) == "aé"
    assert deltas[-1] == "\ufffd"
    assert "".join(deltas) == tokenizer.decode(cut)


def test_a_second_flush_gives_nothing(tokenizer):
    detokenizer = make_detokenizer(tokenizer)
    detokenizer.feed(0xF0)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_invalid_bytes_do_not_block_what_follows(tokenizer):
    ids = [*b"ab", *[0xFF] * 6, *"😊c".encode()]
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == "ab" + "\ufffd" * 6 + "😊c"
    assert "😊" in deltas[11]  # with its last byte, nothing waits for the flush
    assert "\ufffd" in "".join(deltas[:8])  # nor do the invalid ones wait for the good ones


def test_a_real_replacement_character_is_text(tokenizer):
    ids = list("x\ufffdy".encode())
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == "x\ufffdy"
    assert deltas[-1] == ""


def test_two_sequences_do_not_share_bytes(tokenizer):
    first, second = make_detokenizer(tokenizer), make_detokenizer(tokenizer)
    emoji = "😊".encode()
    assert first.feed(*emoji[:2]) == second.feed(*emoji[:3]) == ""
    assert second.feed(emoji[3]) == "😊"
    assert first.feed(*emoji[2:]) == "😊"


def test_several_tokens_at_once_give_the_text_of_one_by_one(tokenizer):
    ids = list((TEXT * 3).encode())
    assert make_detokenizer(tokenizer).feed(*ids) == "".join(pieces(tokenizer, ids))


def test_special_tokens_are_left_out_on_demand(tokenizer):
    ids = [*b"a", 256, *b"b"]
    assert "".join(pieces(tokenizer, ids)) == "ab"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "a<eos>b"


def test_a_skipped_token_inside_a_character_does_not_break_it(tokenizer):
    emoji = "😊".encode()
    assert "".join(pieces(tokenizer, [*emoji[:2], 256, *emoji[2:]])) == "😊"


def test_an_id_beyond_the_vocabulary_has_no_text():
    assert pieces(ByteTokenizer(), [97, 5000, 98]) == ["a", "", "b", ""]


def test_a_byte_fallback_vocabulary_shows_no_half_character():
    """There one bad byte spoils the text of all the byte tokens around it, whole characters included."""
    tokenizer = ByteFallbackTokenizer()
    ids = list("aé😊 你é!".encode())
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == "aé😊 你é!"
    assert "\ufffd" not in "".join(deltas)


def test_spaces_at_token_borders_stay_where_decoding_depends_on_the_neighbours():
    tokenizer = MetaspaceTokenizer(["▁a", "b", "▁", "▁c", "\ufffd", ""])
    ids = [1, 2, 3, 4, 1, 3, 3, 4, 5, 5, 5, 5, 5, 1, 0, 2]
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert deltas[:4] == ["a", "b", " ", " c"]
    for ids, text in (([3, 2, 1], "b a"), ([3, 3, 1], "  a"), ([1, 6, 1, 6, 6, 2], "a ab")):
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text


@given(data=st.data(), has_bytes=st.booleans())
def test_deltas_join_to_the_text_of_all_ids(data, has_bytes):
    tokenizer = ByteTokenizer(["😊!", " you", "\ufffd"], has_bytes=has_bytes)
    part = st.one_of(st.text(max_size=4).map(lambda s: list(s.encode())), st.lists(st.integers(0, 259)))
    ids = [token for tokens in data.draw(st.lists(part, max_size=8)) for token in tokens]
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


@given(text=st.text(), has_bytes=st.booleans())
def test_valid_text_never_shows_half_a_character(text, has_bytes):
    deltas = pieces(ByteTokenizer(has_bytes=has_bytes), text.encode())
    assert "".join(deltas) == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")
    if "\ufffd" not in text:
        assert deltas[-1] == ""
