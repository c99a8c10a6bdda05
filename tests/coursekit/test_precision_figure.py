import numpy as np
import pytest

from coursekit.figures.precision import FormatCost, error_against_magnitude, format_costs


def marks_of(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def test_every_vector_is_a_dot_at_its_magnitude_and_error():
    magnitude, error = np.array([0.1, 1.0, 10.0]), np.array([0.2, 0.02, 0.01])
    panels = {"row": {"fp8": (magnitude, error), "int8": (magnitude, error / 2)}}
    panels["block"] = {"fp8": (magnitude, 2 * error), "int8": (magnitude, 3 * error)}
    marks = marks_of(error_against_magnitude(panels))
    assert len(marks) == 4
    for title, formats in panels.items():
        for name, (x, y) in formats.items():
            drawn = marks[f"error:{title}:{name}"].get_data()
            assert np.allclose(drawn[0], x) and np.allclose(drawn[1], 100 * y)


def test_bars_are_as_long_as_the_bytes_and_scales_stand_behind_the_numbers():
    costs = {"16 bits": FormatCost(400, 0, -0.04), "int8": FormatCost(200, 50, 1.26)}
    figure = format_costs(costs)
    boxes = {patch.get_gid() or "": patch for patch in figure.axes[0].patches}
    assert [box.get_width() for box in boxes.values()] == [400, 0, 200, 50]
    assert boxes["scales:int8"].get_x() == pytest.approx(200)
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said == ["400 bytes, perplexity +0.0 %", "250 bytes, perplexity +1.3 %"]
