import ast
import re

import numpy as np
import pytest
from checkout import ROOT

from benchmarks.gpu.predict import CARDS
from coursekit.figures.programs import decode_on_a_card, programs_over_time
from coursekit.figures.roofline import roofline
from coursekit.multiprocessors import run_programs


def marks_of(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def test_every_program_is_drawn_in_its_row_and_at_its_time():
    whole, cut = run_programs([6, 6], 4), run_programs([3, 3, 3, 3], 4)
    figure = programs_over_time({"whole": whole, "cut": cut}, 4)
    marks = marks_of(figure)
    for name, runs in (("whole", whole), ("cut", cut)):
        drawn = [path.get_extents().extents.tolist() for path in marks[f"programs:{name}"].get_paths()]
        assert drawn == [[r.start, r.multiprocessor, r.stop, r.multiprocessor + 1] for r in runs]


def test_the_title_says_how_much_of_the_card_is_used():
    figure = programs_over_time({"whole": run_programs([6, 6], 4)}, 4)
    assert figure.axes[0].get_title(loc="left") == (
        "whole: 2 programs, 50% of the multiprocessors' time used"
    )


def test_panels_share_their_time():
    figure = programs_over_time({"whole": run_programs([8], 2), "cut": run_programs([4, 4], 2)}, 2)
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() and upper.get_xlim()[1] >= 8


def test_a_roof_has_its_ridge_where_memory_and_arithmetic_are_equal():
    figure = roofline({"card": (2e12, 100e12), "other": (1e12, 10e12)}, {})
    x, y = marks_of(figure)["roof:card"].get_data()
    assert x[1] == 50 and y[1] == y[2] == 100
    assert y[0] == pytest.approx(2 * x[0])
    assert np.all(np.diff(marks_of(figure)["roof:other"].get_ydata()) >= 0)


def test_kernels_stand_under_the_first_roof():
    figure = roofline({"card": (2e12, 100e12), "other": (9e12, 900e12)}, {"decode": 4, "prefill": 500})
    marks = marks_of(figure)
    assert marks["kernel:decode"].get_data()[1] == [8]
    assert marks["kernel:prefill"].get_data()[1] == [100]


def test_a_kernel_whose_operations_are_partly_useless_has_a_hollow_mark():
    marks = marks_of(roofline({"card": (2e12, 100e12)}, {"decode": 4, "padded": 16}, hollow=["padded"]))
    assert marks["kernel:padded"].get_markerfacecolor() == "white"
    assert marks["kernel:decode"].get_markerfacecolor() != "white"


def test_the_lesson_has_the_same_data_sheets_as_the_benchmark():
    source = (ROOT / "notebooks/src/07_fast_decode.py").read_text()
    (block,) = re.findall(r"^CARDS = \{.*?\n(.*?)^\}", source, re.MULTILINE | re.DOTALL)
    rows = re.findall(r'"(.+)": \((\S+), (\S+)\)', block)
    assert len(rows) >= 5
    assert {name: (ast.literal_eval(b), ast.literal_eval(f)) for name, b, f in rows}.items() <= CARDS.items()


def test_a_card_is_drawn_uncut_and_in_the_parts_of_the_engine():
    figure, words = decode_on_a_card("sm_90", 1, 32768, 8)
    uncut, cut = (axes.get_title(loc="left") for axes in figure.axes)
    assert uncut == "not cut: 8 programs, 6% of the multiprocessors' time used"
    assert cut.startswith("parts of 512 keys: 512 programs")
    assert words.startswith("1 × 32768 keys: uncut, 6% of the time of 132 multiprocessors is used; cut, ")
