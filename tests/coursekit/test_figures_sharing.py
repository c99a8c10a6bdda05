import pytest
from matplotlib.colors import to_hex

from coursekit.figures.sharing import eviction_queue, first_token_times, prefix_tree, tokens_computed
from coursekit.figures.style import BLUE

CHAINS = {
    "first": [(0, "a1"), (1, "b2"), (2, "c3")],
    "second": [(0, "a1"), (1, "b2"), (5, "d4"), (6, "")],
    "third": [(0, "a1"), (7, "e5")],
}
WAYS = {"alone": [(0, 40), (0, 50)], "shared": [(0, 40), (32, 18)]}


def marks_of(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def words_of(figure):
    return {text.get_text() for text in figure.axes[0].texts}


def test_each_block_is_drawn_once_and_shared_ones_are_blue():
    marks = marks_of(prefix_tree(CHAINS))
    blocks = {gid: mark for gid, mark in marks.items() if gid.startswith("block:")}
    assert set(blocks) == {f"block:{block}" for block in (0, 1, 2, 5, 6, 7)}
    blue = {gid for gid, mark in blocks.items() if to_hex(mark.get_facecolor()) == BLUE}
    assert blue == {"block:0", "block:1"}


def test_a_line_joins_each_block_to_the_one_before_it():
    links = {gid for gid in marks_of(prefix_tree(CHAINS)) if gid.startswith("behind:")}
    assert links == {"behind:0:1", "behind:1:2", "behind:1:5", "behind:5:6", "behind:0:7"}


def test_the_tree_says_names_of_requests_and_blocks():
    words = words_of(prefix_tree(CHAINS))
    assert {"first", "second", "third", "block 5", "a1", "d4", "no hash"} <= words


def test_bars_are_as_long_as_the_tokens_found_and_computed():
    figure = tokens_computed(WAYS)
    marks = marks_of(figure)
    for name, rows in WAYS.items():
        for row, (found, computed) in enumerate(rows):
            assert marks[f"found:{name}:{row}"].get_width() == found
            bar = marks[f"computed:{name}:{row}"]
            assert (bar.get_x(), bar.get_width()) == (found, computed)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "alone: 90 computed",
        "shared: 58 computed",
    ]


def test_first_token_times_are_in_milliseconds():
    marks = marks_of(first_token_times([0.2, 0.3], [0.05, 0.06], ("without", "with")))
    assert list(marks["ttft:without"].get_xdata()) == pytest.approx([200, 300])
    assert list(marks["ttft:with"].get_xdata()) == pytest.approx([50, 60])


def test_the_queue_shows_states_and_the_order_of_taking():
    blocks = [("held", "A0"), ("cached", "B0"), ("blank", ""), ("cached", "B1")]
    marks = marks_of(eviction_queue(blocks, [2, 3, 1]))
    assert {"held:0", "cached:1", "blank:2", "cached:3"} <= set(marks)
    places = sorted((gid for gid in marks if gid.startswith("order:")), key=lambda gid: marks[gid].get_x())
    assert places == ["order:0:2", "order:1:3", "order:2:1"]


def test_a_pool_without_free_blocks_says_so():
    assert "nothing is free" in words_of(eviction_queue([("held", "A0")], []))
