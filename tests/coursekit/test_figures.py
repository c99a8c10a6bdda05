from dataclasses import dataclass

import matplotlib
import numpy as np
import pytest

from coursekit.figures import (
    blocks_and_table,
    card_filled,
    lines_against_length,
    memory_against_length,
    memory_over_time,
    save,
    show,
    work_per_step,
)
from coursekit.figures.memory import MIB


@dataclass(frozen=True)
class Sample:
    time: float
    reserved_bytes: int
    used_bytes: int
    running: int


SERIES = {
    "strips": [Sample(100 + t, 48 * MIB, (t + 1) * MIB, 5) for t in range(6)],
    "blocks": [Sample(t, (10 * t + 1) * MIB, 10 * t * MIB, 6 * t) for t in range(4)],
}


def artists(figure):
    """Every artist that carries data, by its gid."""
    found = {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}
    return found


def words(figure):
    return {text.get_text() for text in figure.findobj(matplotlib.text.Text)}


def test_memory_over_time_shows_every_sample_of_every_policy():
    marks = artists(memory_over_time(SERIES, 64 * MIB))
    for name, samples in SERIES.items():
        for kind, field, unit in (
            ("reserved", "reserved_bytes", MIB),
            ("used", "used_bytes", MIB),
            ("running", "running", 1),
        ):
            line = marks[f"{kind}:{name}"].get_xydata()
            assert line[:, 0].tolist() == [sample.time - samples[0].time for sample in samples]
            assert line[:, 1].tolist() == [getattr(sample, field) / unit for sample in samples]
        assert set(marks[f"budget:{name}"].get_ydata()) == {64}


def test_memory_over_time_gives_all_policies_one_scale():
    figure = memory_over_time(SERIES, 64 * MIB)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert len({axes.get_ylim() for axes in figure.axes[:2]}) == 1
    assert {
        "strips",
        "blocks",
        "time (s)",
        "KV memory (MiB)",
        "at most 18",
        "budget, 64 MiB",
    } <= words(figure)


def test_memory_against_length_shows_lines_points_and_limit():
    lines = {"grouped": [(0, 0), (1024, 24 * MIB)], "one head": [(0, 0), (1024, 8 * MIB)]}
    points = [(256, 6 * MIB), (512, 12 * MIB)]
    figure = memory_against_length(lines, points=points, limit=("budget", 16 * MIB))
    marks = artists(figure)
    assert marks["line:grouped"].get_xydata().tolist() == [[0, 0], [1024, 24]]
    assert marks["line:one head"].get_xydata().tolist() == [[0, 0], [1024, 8]]
    assert marks["points"].get_xydata().tolist() == [[256, 6], [512, 12]]
    assert set(marks["limit"].get_ydata()) == {16}
    assert {"grouped", "one head", "measured", "budget", "KV memory (MiB)"} <= words(figure)


@pytest.mark.parametrize(
    ("top", "unit"),
    [(900, "bytes"), (2**11, "KiB"), (2**21, "MiB"), (2**31, "GiB"), (2**41, "TiB")],
)
def test_memory_against_length_chooses_a_unit_that_reads_well(top, unit):
    assert f"KV memory ({unit})" in words(memory_against_length({"a": [(0, 0), (10, top)]}))


def test_blocks_and_table_joins_each_entry_to_its_block():
    table, others = [7, 1, 10], {0, 2}
    figure = blocks_and_table(
        table, num_tokens=9, block_size=4, num_blocks=12, max_model_len=48, others=others
    )
    marks = artists(figure)
    assert {gid for gid in marks if gid.startswith("join:")} == {
        "join:0:7",
        "join:1:1",
        "join:2:10",
    }
    assert {gid for gid in marks if gid.startswith("block:")} == {f"block:{i}" for i in range(12)}
    widths = {
        block: marks[f"filled:{block}"].get_width() / marks[f"block:{block}"].get_width() for block in table
    }
    assert widths == pytest.approx({7: 1, 1: 1, 10: 0.25})
    strip = marks["strip:used"].get_height() / marks["strip:reserved"].get_height()
    assert strip == pytest.approx(9 / 48)
    grey = {i for i in range(12) if marks[f"block:{i}"].get_facecolor() != (1, 1, 1, 1)}
    assert grey == others


def test_a_join_ends_at_the_block_it_names():
    figure = blocks_and_table([5, 2], num_tokens=8, block_size=4, num_blocks=8, max_model_len=32)
    marks = artists(figure)
    for gid in ("join:0:5", "join:1:2"):
        block = marks["block:" + gid.rsplit(":", 1)[1]]
        x, y = marks[gid].xy2
        assert x == block.get_x() and block.get_y() < y < block.get_y() + block.get_height()


def test_more_tokens_than_the_table_holds_are_refused():
    with pytest.raises(ValueError, match="9 tokens do not fit 2 blocks of 4"):
        blocks_and_table([0, 1], num_tokens=9, block_size=4, num_blocks=4, max_model_len=16)


def test_saved_pictures_are_the_same_bytes_each_time(tmp_path):
    first, second = (
        [
            path.read_bytes()
            for path in save(memory_over_time(SERIES, 64 * MIB), tmp_path / str(i) / "picture")
        ]
        for i in range(2)
    )
    assert first == second
    assert b"<svg" in first[0] and b"dc:date" not in first[0] and first[1].startswith(b"\x89PNG")


def test_figures_leave_the_callers_settings_alone():
    before = dict(matplotlib.rcParams)
    memory_over_time(SERIES, 64 * MIB)
    assert dict(matplotlib.rcParams) == before


def test_a_shown_figure_carries_words_for_those_who_cannot_see_it(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "coursekit.figures.style.display",
        lambda data, raw, metadata: shown.append((data, metadata)),
    )
    show(memory_against_length({"a": [(0, 0), (10, 100)]}), "Memory rises with length.")
    [(data, metadata)] = shown
    assert data["text/plain"] == "[figure] Memory rises with length."
    assert data["image/png"].startswith(b"\x89PNG") and metadata["image/png"]["alt"] in data["text/plain"]


def test_steps_are_drawn_as_steps():
    """Memory holds its value until the next step; a sloping line would show bytes that never were."""
    marks = artists(memory_over_time(SERIES, 64 * MIB))
    assert {marks[f"{kind}:blocks"].get_drawstyle() for kind in ("reserved", "used", "running")} == {
        "steps-post"
    }
    filled = marks["waste:blocks"].get_paths()[0].vertices
    assert np.unique(filled[:, 0]).tolist() == [0, 1, 2, 3]


def test_a_card_shows_weights_and_every_conversation_to_scale():
    marks = artists(card_filled(80e9, 40e9, 10e9, 3))
    assert marks["card"].get_width() == 80e9 and marks["weights"].get_width() == 40e9
    boxes = [marks[f"conversation:{i}"] for i in range(3)]
    assert [(box.get_x(), box.get_width()) for box in boxes] == [
        (40e9, 10e9),
        (50e9, 10e9),
        (60e9, 10e9),
    ]
    assert "conversation:3" not in marks


def test_a_card_too_small_for_the_weights_says_so():
    figure = card_filled(24e9, 40e9, 10e9, 0)
    assert artists(figure)["weights"].get_width() == 24e9
    assert "weights, 40 GB: larger than the card" in words(figure)


def test_work_per_step_draws_each_computed_and_each_kept_token():
    ways = {"again": [[0, 1], [0, 1, 2]], "kept": [[0, 1], [2]]}
    figure = work_per_step(ways)
    marks = set(artists(figure))
    assert {gid for gid in marks if gid.startswith("computed:kept")} == {
        "computed:kept:0:0",
        "computed:kept:0:1",
        "computed:kept:1:2",
    }
    assert {gid for gid in marks if gid.startswith("kept:kept")} == {"kept:kept:1:0", "kept:kept:1:1"}
    assert len([gid for gid in marks if gid.startswith("computed:again")]) == 5
    assert {"again: 5 computed", "kept: 3 computed"} <= words(figure)


def test_work_per_step_stops_at_the_step_shown():
    marks = set(artists(work_per_step({"again": [[0], [0, 1], [0, 1, 2]]}, shown=2)))
    assert "computed:again:1:1" in marks and "computed:again:2:2" not in marks


def test_lines_against_length_keep_the_unit_they_are_given():
    figure = lines_against_length({"again": [(1, 2.0), (8, 16.0)]}, y_label="GFLOP")
    assert artists(figure)["line:again"].get_xydata().tolist() == [[1, 2], [8, 16]]
    assert {"again", "GFLOP"} <= words(figure)
