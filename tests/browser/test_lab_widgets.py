"""Lessons with sliders and steppers run whole in JupyterLab, and answer keyboard and mouse.

Not among them is lesson 11, whose stepper may draw the same picture for two steps.
"""

import pytest
from engine_numbers import EXPECTED
from repository import ROOT
from widget_driver import Widget

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("lesson", EXPECTED)
def test_widget_answers_keyboard_and_mouse_with_the_numbers_of_the_engine(lab, page, lesson):
    (notebook,) = ROOT.glob(f"notebooks/{lesson}_*.ipynb")
    expected = EXPECTED[lesson]
    with lab.run_whole(page, f"notebooks/{notebook.name}"):
        widget = Widget(page)
        assert widget.numbers() == expected(widget.controls()), widget.words()
        widget.after(widget.press_arrow, expected)
        widget.after(widget.click_button, expected)
        widget.after(widget.drag, expected)
