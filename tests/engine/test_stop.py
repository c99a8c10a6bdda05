"""Where a sequence ends and what text it has: EOS, stop ids, stop strings, limits, characters cut in half."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.engine.text import OutputState
from minipaged.sampling_params import SamplingParams
from tests.engine.fake_tokenizers import ByteTokenizer

EOS = 256


def run(tokens, params=None, *, tokenizer=None, max_tokens=None, words=(), eos=(EOS,)):
    """Feed tokens until the state says stop; the state and the deltas seen on the way."""
    params = params or SamplingParams(max_tokens=None)
    tokenizer = tokenizer or ByteTokenizer(words)
    state = OutputState(tokenizer, params, eos, max_tokens or params.max_tokens or 1000)
    deltas = []
    for token in tokens:
        state.token_ids.append(token)
        finished = state.check_end()
        deltas.append(state.delta())
        if finished:
            break
    return state, deltas


def stops(*strings, **options) -> SamplingParams:
    return SamplingParams(stop=list(strings), max_tokens=None, **options)


def test_eos_stays_in_the_ids_and_out_of_the_text():
    state, _ = run([*b"ab", EOS, *b"cd"])
    assert (state.token_ids, state.text) == ([97, 98, EOS], "ab")
    assert (state.finish_reason, state.stop_reason) == ("stop", None)


def test_line_ends_stay_as_they_are():
    text = "a\r\nb\rc\n"
    state, deltas = run(text.encode())
    assert state.text == "".join(deltas) == text


def test_eos_as_first_token_is_one_token():
    state, _ = run([EOS, 97])
    assert (state.token_ids, state.text, state.finish_reason) == ([EOS], "", "stop")


def test_every_one_of_several_eos_ids_ends():
    for eos in (3, 256):
        state, _ = run([97, eos, 98], eos=(3, 256))
        assert (state.token_ids, state.finish_reason) == ([97, eos], "stop")


def test_a_stop_token_ends_and_is_the_reason():
    state, _ = run([10, 42, 12], SamplingParams(stop_token_ids=[42], max_tokens=None))
    assert (state.token_ids, state.finish_reason, state.stop_reason) == ([10, 42], "stop", 42)
    assert state.text == "\n"


def test_include_stop_keeps_the_stop_token_in_the_text():
    params = SamplingParams(stop_token_ids=[98], include_stop_str_in_output=True)
    assert run(b"abc", params)[0].text == "ab"
    assert run(b"abc", SamplingParams(stop_token_ids=[98]))[0].text == "a"


def test_max_tokens_counts_exactly():
    for limit in (1, 2, 5):
        state, _ = run(range(97, 110), SamplingParams(max_tokens=limit))
        assert len(state.token_ids) == limit
        assert (state.finish_reason, state.stop_reason) == ("length", None)


def test_the_context_limit_given_by_the_engine_holds_over_max_tokens():
    state, _ = run(b"abcdef", SamplingParams(max_tokens=5), max_tokens=1)
    assert (len(state.token_ids), state.finish_reason) == (1, "length")


def test_ignore_eos_goes_on_but_a_named_stop_token_still_ends():
    state, _ = run([97, EOS, 98], SamplingParams(ignore_eos=True, max_tokens=3))
    assert (len(state.token_ids), state.finish_reason) == (3, "length")
    state, _ = run([97, EOS, 98], SamplingParams(ignore_eos=True, stop_token_ids=[EOS], max_tokens=3))
    assert (state.finish_reason, state.stop_reason) == ("stop", EOS)


def test_no_token_ends_before_min_tokens():
    params = SamplingParams(min_tokens=5, stop_token_ids=[42], max_tokens=20)
    state, _ = run([EOS, 42, EOS, 42, 42], params)
    assert len(state.token_ids) == 5
    assert run([EOS, 42, EOS, 42], params)[0].finish_reason is None


def test_a_stop_at_the_last_allowed_token_is_a_stop():
    assert run([97, EOS], SamplingParams(max_tokens=2))[0].finish_reason == "stop"
    state, _ = run(b"ab", SamplingParams(max_tokens=2, stop="b"))
    assert (state.finish_reason, state.stop_reason, state.text) == ("stop", "b", "a")


def test_a_stop_string_across_token_borders_is_cut_exactly():
    state, deltas = run([257, 258, 259], stops("STOP"), words=["x S", "TO", "P y"])
    assert (state.text, state.stop_reason) == ("x ", "STOP")
    assert deltas == ["x ", "", ""]
    assert state.token_ids == [257, 258, 259]


def test_a_stop_string_inside_one_token_cuts_the_rest_of_it():
    assert run([257], stops("<|"), words=["yes<|no"])[0].text == "yes"


def test_include_stop_str_keeps_it_and_nothing_after():
    params = stops("STOP", include_stop_str_in_output=True)
    state, deltas = run([257, 258, 259], params, words=["x S", "TO", "P y"])
    assert state.text == "x STOP" == "".join(deltas)


def test_only_what_may_become_a_stop_string_is_held_back():
    _, deltas = run(b"abcabxabc!", stops("abcabc!", "zz"))
    assert deltas == ["", "", "", "", "", "abcabx", "", "", "", "abc!"]


def test_held_text_comes_out_when_the_output_ends_otherwise():
    state, deltas = run(b"xST", SamplingParams(stop="STOP", max_tokens=3))
    assert state.text == "".join(deltas) == "xST"
    assert state.finish_reason == "length"


@pytest.mark.parametrize(
    ("strings", "text", "kept", "reason"),
    [
        (("cd", "b"), "abcd", "a", "b"),  # ends first, though named second
        (("b", "ab"), "xab", "x", "ab"),  # end together: the longer
        (("abcde", "cd"), "abcde", "ab", "cd"),  # ends first, though it begins later
        (("\n\n", "\n"), "a\n\nb", "a", "\n"),
    ],
)
def test_the_first_stop_string_to_be_complete_wins_however_tokens_cut_the_text(strings, text, kept, reason):
    for words in ([text], list(text), [text[:2], text[2:]]):
        state, _ = run(range(257, 257 + len(words)), stops(*strings), words=words)
        assert (state.text, state.stop_reason) == (kept, reason)


def test_a_stop_string_counts_only_when_it_ends_after_min_tokens():
    params = SamplingParams(stop="ab", min_tokens=3, max_tokens=None)
    state, deltas = run(b"ababab", params)
    assert (len(state.token_ids), state.text) == (4, "ab")
    assert "".join(deltas) == "ab"


def test_a_stop_string_of_one_character_of_many_bytes():
    state, deltas = run("hi😊there".encode(), stops("😊"))
    assert state.text == "".join(deltas) == "hi"
    assert "\ufffd" not in "".join(deltas)


def test_a_character_cut_by_max_tokens_is_flushed_once():
    ids = list("aé😊".encode())[:5]
    state, deltas = run(ids, SamplingParams(max_tokens=5))
    assert state.text == "".join(deltas) == ByteTokenizer().decode(ids) == "aé\ufffd"


def test_a_stop_string_in_text_held_until_max_tokens_is_found():
    tokenizer = ByteTokenizer(["x"], has_bytes=False)
    tokenizer.pieces[257] = b"ab\xc3"  # its last byte begins a character
    state, _ = run([257], SamplingParams(stop="ab", max_tokens=1), tokenizer=tokenizer)
    assert (state.finish_reason, state.stop_reason, state.text) == ("stop", "ab", "")


def test_text_asked_for_only_at_the_end_is_the_text_of_the_stream():
    ids = list("aé😊 你!".encode())
    lazy = OutputState(ByteTokenizer(), SamplingParams(), (EOS,), 100)
    for token in ids:
        lazy.token_ids.append(token)
        lazy.check_end()
    lazy.finish("abort")
    assert lazy.text == lazy.text == "".join(run([*ids, EOS])[1]) == "aé😊 你!"
    assert (lazy.finish_reason, lazy.stop_reason) == ("abort", None)


def test_the_first_ending_stays():
    state, _ = run([97, EOS])
    state.finish("abort")
    assert state.finish_reason == "stop"


def test_without_tokenizer_or_detokenize_there_is_no_text():
    for tokenizer, params in ((None, SamplingParams()), (ByteTokenizer(), SamplingParams(detokenize=False))):
        state = OutputState(tokenizer, params, (EOS,), 10)
        state.token_ids.append(97)
        state.check_end()
        assert (state.text, state.delta()) == ("", "")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        OutputState(None, SamplingParams(stop="a"), (EOS,), 10)


def test_special_tokens_show_when_asked_for():
    params = SamplingParams(skip_special_tokens=False, ignore_eos=True, max_tokens=3)
    assert run([97, EOS, 98], params)[0].text == "a<eos>b"


def reference_ending(text: str, strings: list[str]) -> str:
    """Read character by character; stop as soon as some string is complete, cut the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [string for string in strings if text[:end].endswith(string)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@given(
    text=st.text(alphabet="ab😊", max_size=14),
    strings=st.lists(st.text(alphabet="ab😊", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 13)),
    as_bytes=st.booleans(),
)
def test_any_cut_of_the_text_into_tokens_gives_the_same_ending(text, strings, cuts, as_bytes):
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    words = [text[a:b] for a, b in pairwise(borders)]
    tokens = list(text.encode()) if as_bytes else list(range(257, 257 + len(words)))
    state, deltas = run(tokens, stops(*strings), words=words)
    state.finish("length")
    assert state.text == reference_ending(text, strings)
    shown = "".join(deltas)
    assert state.text.startswith(shown)  # nothing shown was taken back
    assert shown + state.delta() == state.text
