import numpy as np
import pytest

from coursekit.figures import arena_map, arena_over_time, waste_bars
from coursekit.replay import PlacedStrip, Snapshot, power_of_two, replay_contiguous
from coursekit.traffic import contiguous_traffic
from coursekit.workloads import lognormal_lengths

LENGTHS = lognormal_lengths("alpaca", 120, seed=5)


@pytest.mark.parametrize("rule", ["maximum", "power_of_two", "oracle"])
def test_the_replay_and_the_averages_agree(rule):
    """Two simulations, written apart, of the same server."""
    averages = contiguous_traffic(LENGTHS, 1500, 700, rule)
    steps = [step for step in replay_contiguous(LENGTHS, 1500, 700, rule) if step.waiting is not None]
    assert len(steps) == averages.steps
    assert sum(step.used for step in steps) == averages.waste.used
    assert sum(step.external for step in steps) == averages.waste.external
    assert sum(len(step.strips) for step in steps) == averages.request_steps


@pytest.mark.parametrize("compact", [False, True])
def test_strips_and_holes_tile_the_arena_at_every_step(compact):
    for step in replay_contiguous(LENGTHS, 1500, 700, "oracle", compact=compact):
        pieces = sorted([*((strip.start, strip.size) for strip in step.strips), *step.holes])
        ends = [start + size for start, size in pieces]
        assert [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == 1500
        assert all(strip.stored <= strip.final <= strip.size for strip in step.strips)


def test_compaction_leaves_no_hole_that_the_next_request_would_fit_into_together_with_others():
    plain = list(replay_contiguous(LENGTHS, 1500, 700, "oracle"))
    packed = list(replay_contiguous(LENGTHS, 1500, 700, "oracle", compact=True))
    assert any(step.waiting and step.waiting <= step.free for step in plain)
    assert not any(step.waiting and step.waiting <= step.free for step in packed)
    assert sum(step.moved for step in plain) == 0 < sum(step.moved for step in packed)
    assert len(packed) < len(plain)


def test_only_stored_tokens_are_moved():
    lengths = np.array([[3, 1], [3, 6], [5, 1], [8, 1]])  # strips of 3, 8 and 5 slots; the fourth needs 8
    steps = list(replay_contiguous(lengths, 16, 16, "oracle", compact=True))
    assert [step.moved for step in steps] == [0, 4, 0, 0, 0, 0]  # the second, with four of its tokens
    assert [strip.start for strip in steps[1].strips] == [0, 8]


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="reserves 700 slots, the arena has 600"):
        list(replay_contiguous(LENGTHS, 600, 700, "maximum"))


def test_a_map_shows_every_strip_and_who_waits():
    snapshot = Snapshot([PlacedStrip(0, 40, 10, 30), PlacedStrip(60, 20, 5, 20)], [(40, 20), (80, 20)], 30, 0)
    figure = arena_map(snapshot, 100)
    marks = {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}
    spans = {gid: (mark.get_x(), mark.get_width()) for gid, mark in marks.items()}
    assert spans["strip:60"] == (60, 20) and spans["stored:60"] == (60, 5) and spans["stored:0"] == (0, 10)
    assert spans["waiting"] == (0, 30)
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "waits for 30 slots in a row; the largest hole has 20, all holes together 40" in words


def test_bars_show_every_share():
    shares = {"a": {"used": 0.2, "to_come": 0.1, "never": 0.7}, "b": {"used": 0.9, "internal": 0.1}}
    figure = waste_bars(shares)
    marks = {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}
    assert {gid: round(mark.get_width(), 9) for gid, mark in marks.items()} == {
        f"{kind}:{name}": share for name, kinds in shares.items() for kind, share in kinds.items()
    }
    assert marks["never:a"].get_x() == pytest.approx(0.3)


def test_strips_are_as_long_as_the_allocator_grants():
    exact = list(replay_contiguous(LENGTHS, 1500, 700, "oracle"))
    rounded = list(replay_contiguous(LENGTHS, 1500, 700, "oracle", granted=power_of_two))
    sizes = {strip.size for step in rounded for strip in step.strips}
    assert sizes == {power_of_two(strip.size) for step in exact for strip in step.strips}
    assert all(size & (size - 1) == 0 for size in sizes) and len(sizes) > 3
    assert len(rounded) > len(exact)


def test_an_arena_over_time_has_a_column_for_each_step_and_a_row_for_each_slot():
    strips = [PlacedStrip(0, 4, 1, 4), PlacedStrip(6, 3, 3, 3)]
    snapshots = [Snapshot(strips, [(4, 2), (9, 1)], 5, 0), Snapshot(strips[:1], [(4, 6)], None, 0)]
    figure = arena_over_time(snapshots, 10, rows=10)
    [image] = figure.axes[0].images
    assert image.get_array().T.tolist() == [[2, 1, 1, 1, 0, 0, 2, 2, 2, 0], [2, 1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert list(image.get_extent()) == [0, 2, 0, 10] and image.origin == "lower"
