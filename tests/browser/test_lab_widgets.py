"""Every lesson with a widget runs whole in JupyterLab, and the widget answers keyboard and mouse."""

import json
import re

import pytest
from checkout import ROOT
from engine_numbers import EXPECTED
from widget_driver import Widget

pytestmark = pytest.mark.browser
WIDGET = re.compile(r"(Stepper|Explorable)\(")


def test_every_lesson_with_a_widget_has_numbers_to_compare():
    found = []
    for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        found += [path.name[:2]] if WIDGET.search(code) else []
    assert found == list(EXPECTED)


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
