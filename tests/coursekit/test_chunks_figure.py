from coursekit.figures.chunks import mask_corners, prompt_in_chunks, tokens_per_step
from coursekit.figures.style import BLUE, GREY, PALE

COLORS = {tuple(int(shade[i : i + 2], 16) for i in (1, 3, 5)): shade for shade in (BLUE, GREY, PALE)}


def marks_of(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def in_color(marks, shade, prefix):
    return {gid for gid, mark in marks.items() if gid.startswith(prefix) and color_of(mark) == shade}


def color_of(mark):
    if not hasattr(mark, "get_facecolor"):
        return None
    return COLORS[tuple(round(255 * part) for part in mark.get_facecolor()[:3])]


def corners():
    return marks_of(mask_corners(2, 5, {"first": [1.0, 1.5], "last": [2.5, 3.0]}))


def test_the_last_query_stands_at_the_last_key():
    assert in_color(corners(), BLUE, "last:") == {
        f"last:{query}:{key}" for query in range(2) for key in range(4 + query)
    }


def test_the_wrong_mask_counts_from_the_first_key():
    assert in_color(corners(), BLUE, "first:") == {"first:0:0", "first:1:0", "first:1:1"}
    assert len(in_color(corners(), PALE, "first:")) == 7


def test_what_a_query_gets_stands_beside_its_row():
    marks = corners()
    assert [marks[f"first:{i}"].get_text() for i in range(2)] == ["gets 1", "gets 1.5"]
    assert [marks[f"last:{i}"].get_text() for i in range(2)] == ["gets 2.5", "gets 3"]


def test_a_chunk_computes_its_own_rows_against_all_keys_before_them():
    marks = marks_of(prompt_in_chunks([4, 4, 2], 1))
    assert in_color(marks, BLUE, "score:") == {
        f"score:{query}:{key}" for query in range(4, 8) for key in range(query + 1)
    }
    assert len(in_color(marks, GREY, "score:")) == 10
    assert len(in_color(marks, PALE, "score:")) == 9 + 10


def test_keys_of_earlier_chunks_are_read_and_those_of_this_one_are_new():
    marks = marks_of(prompt_in_chunks([4, 4, 2], 1))
    assert in_color(marks, GREY, "key:") == {f"key:{key}" for key in range(4)}
    assert in_color(marks, BLUE, "key:") == {f"key:{key}" for key in range(4, 8)}
    assert "key:8" not in marks


def test_bars_are_as_high_as_the_tokens_of_a_step():
    steps = [(0, 8), (56, 8), (8, 9)]
    marks = marks_of(tokens_per_step({"chunks": steps, "whole": [(400, 8)]}))
    for index, (prefill, decode) in enumerate(steps):
        assert marks[f"chunks:decode:{index}"].get_height() == decode
        top = marks[f"chunks:prefill:{index}"]
        assert (top.get_y(), top.get_height()) == (decode, prefill)
    assert marks["whole:prefill:0"].get_height() == 400


def test_panels_share_their_scale():
    upper, lower = tokens_per_step({"chunks": [(56, 8)], "whole": [(400, 8)]}).axes
    assert upper.get_ylim() == lower.get_ylim() and upper.get_ylim()[1] >= 408


def test_equal_longest_steps_are_counted_in_the_label():
    figure = tokens_per_step({"chunks": [(56, 8), (56, 8), (8, 8)], "whole": [(400, 8)]})
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert words == ["2 steps of 64 tokens", "408 tokens"]
