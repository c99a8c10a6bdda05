from coursekit.figures.scheduling import gantt, pool_in_step, preemption_costs, running_over_steps
from coursekit.timeline import Moment, StepView


def artists(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_a_gantt_chart_has_a_bar_for_each_run_of_a_state():
    figure = gantt(
        {"A": ["prefill", "decode", "decode", None], "B": ["waiting", "waiting", "prefill", "decode"]}
    )
    marks = artists(figure)
    assert set(marks) == {
        "A:prefill:0:1",
        "A:decode:1:2",
        "B:waiting:0:2",
        "B:prefill:2:1",
        "B:decode:3:1",
    }
    bar = marks["A:decode:1:2"]
    assert (bar.get_x(), bar.get_width()) == (1, 2)
    assert marks["B:decode:3:1"].get_facecolor() == bar.get_facecolor()
    assert words(figure) == ["prefill", "decode", "waiting"]  # no word for what is not in the chart


def test_running_over_steps_shows_each_line_and_the_rows():
    marks = artists(running_over_steps({"static": [8, 8, 1], "continuous": [8, 8]}, 8))
    assert list(marks["running:static"].get_data().values) == [8, 8, 1]
    assert list(marks["rows:static"].get_data().values) == [8, 8, 8]
    assert list(marks["running:continuous"].get_data().values) == [8, 8]


def moment(state, blocks=(), tokens=1):
    return Moment(state=state, tokens=tokens, again=0, stored=4 * len(blocks), blocks=blocks)


def test_a_pool_in_a_step_shows_the_owner_of_each_block_and_what_is_new():
    before = StepView({"A": moment("decode", (0,)), "B": moment("waiting")}, 5, (), ())
    view = StepView(
        {"A": moment("decode", (0, 3)), "B": moment("prefill", (1,), 4), "C": moment("waiting")},
        3,
        (),
        ("B",),
    )
    figure = pool_in_step(view, before, num_blocks=6)
    marks = artists(figure)
    owners = {gid.split(":")[1]: gid.split(":")[2] for gid in marks if gid.startswith("block:")}
    assert owners == {"0": "A", "1": "B", "2": "free", "3": "A", "4": "free", "5": "free"}
    color = {gid: mark.get_facecolor() for gid, mark in marks.items() if gid.startswith("block:")}
    assert color["block:3:A"] == color["block:1:B"] != color["block:0:A"]
    assert color["block:2:free"] == (1, 1, 1, 1)
    assert marks["waits:C"].get_text() == "C"
    assert marks["runs:B"].get_text() == "B  prefill of 4, blocks [1]"


def test_swapped_blocks_are_not_drawn_in_the_pool():
    view = StepView({"A": moment("swapped", (0, 1))}, 4, ("A",), ())
    marks = artists(pool_in_step(view, None, num_blocks=4))
    assert {gid for gid in marks if gid.startswith("block:")} == {f"block:{i}:free" for i in range(4)}
    assert marks["waits:A"].get_text() == "A, swapped"


def test_preemption_costs_has_a_line_for_each_way():
    marks = artists(preemption_costs({64: 50.0, 128: 100.0}, {64: 1.0, 128: 2.0}))
    assert list(marks["measured:recompute"].get_ydata()) == [50.0, 100.0]
    assert list(marks["measured:swap"].get_ydata()) == [1.0, 2.0]
