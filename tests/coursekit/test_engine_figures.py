"""The figures of the whole engine contain the data that they show."""

import pytest

from coursekit.figures.engine import blocks_over_steps, requests_at_once, step_parts

STEPS = {"few": {"weights": 0.006, "head": 0.002, "sampler": 0.002}, "many": {"weights": 0.03, "head": 0.01}}


def artists(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def at_once():
    return requests_at_once(
        8192, [512, 1024, 4096], {"chats": (700, 40.5)}, {"strips": [(1024, 8)], "chats": [(4096, 39)]}
    )


def test_strips_are_slots_divided_by_the_longest_length():
    assert artists(at_once())["strips"].get_xydata().tolist() == [[512, 16], [1024, 8], [4096, 2]]


def test_blocks_are_level_from_the_longest_request_on():
    assert artists(at_once())["blocks:chats"].get_xydata().tolist() == [[700, 40.5], [4096, 40.5]]


def test_dots_are_what_was_measured_and_all_of_it_is_in_view():
    marks = artists(at_once())
    assert marks["points:strips"].get_xydata().tolist() == [[1024, 8]]
    assert marks["points:chats"].get_xydata().tolist() == [[4096, 39]]
    low, high = at_once().axes[0].get_ylim()
    assert low < 2 and high > 40.5


def test_parts_are_shares_of_their_own_step_side_by_side():
    marks = artists(step_parts(STEPS))
    few = [marks[f"part:few:{part}"] for part in ("weights", "head", "sampler")]
    assert [box.get_width() for box in few] == pytest.approx([60, 20, 20])
    assert [box.get_x() for box in few] == pytest.approx([0, 60, 80])
    assert marks["part:many:weights"].get_width() == pytest.approx(75)
    assert marks["part:many:sampler"].get_width() == 0


def test_each_step_is_named_with_its_time_and_each_part_in_the_key():
    said = words(step_parts(STEPS))
    assert "few: 10 ms, in percent" in said and "many: 40 ms, in percent" in said
    assert {"weights", "head", "sampler"} <= set(said)


def test_a_part_has_the_colour_of_its_key():
    marks = artists(step_parts(STEPS))
    for part in ("weights", "head", "sampler"):
        assert marks[f"part:few:{part}"].get_facecolor() == marks[f"key:{part}"].get_facecolor()


def test_blocks_over_steps_marks_what_is_shared():
    marks = artists(blocks_over_steps([{"a": [0, 1]}, {"a": [0, 1], "b": [0, 2]}], 4))
    assert {name for name in marks if name.startswith("block:")} == {
        *("block:0:0:1", "block:1:0:1"),
        *("block:0:1:2", "block:1:1:1", "block:2:1:1"),
    }
    assert marks["block:0:1:2"].get_facecolor() != marks["block:1:1:1"].get_facecolor()
