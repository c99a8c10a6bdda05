import base64

import ipywidgets
import pytest

from coursekit.figures import memory_against_length
from coursekit.widgets import Explorable, Stepper


def draw(step):
    return memory_against_length({"a": [(0, 0), (1, step + 1)]}), f"step is {step}"


def slider(value=2):
    return ipywidgets.IntSlider(value=value, min=0, max=9)


def test_moving_a_slider_draws_again():
    explorable = Explorable({"step": slider()}, draw)
    before = explorable._picture.value
    explorable.controls["step"].value = 7
    assert explorable.text == "step is 7"
    assert explorable._picture.value != before


def test_a_viewer_without_a_kernel_gets_a_picture_and_words():
    explorable = Explorable({"step": slider()}, draw)
    data, metadata = explorable._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == "[run this cell to move the sliders] step is 2"
    assert "application/vnd.jupyter.widget-view+json" in data
    assert metadata["image/png"]["alt"] == "step is 2"


def test_a_stepper_walks_and_stops_at_both_ends():
    stepper = Stepper(4, draw, start=1)
    seen = []
    for button in (stepper.back, stepper.back, *[stepper.forward] * 5):
        button.click()
        seen.append(stepper.text)
    assert seen == [f"step is {step}" for step in (0, 0, 1, 2, 3, 3, 3)]


def test_a_stepper_refuses_a_start_outside_its_history():
    with pytest.raises(ValueError, match="start is 4, there are 4 steps"):
        Stepper(4, draw, start=4)


def test_what_a_picture_always_shows_comes_before_the_sentence_of_the_moment():
    _, metadata = Stepper(4, draw, start=1, shows="A rising line.")._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == "A rising line. step is 1"
