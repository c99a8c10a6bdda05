import itertools
import json
import random

import numpy as np
import pytest
from checkout import ROOT

from coursekit.figures.book import COLUMNS, growth, lanes, strip_and_blocks

WORDS = dict.fromkeys(
    [
        "strip",
        "blocks",
        "tokens",
        "reserved",
        "table",
        "this",
        "other",
        "free",
        "memory",
        "formula",
        "measured",
    ],
    "word",
)
MEASURED = json.loads((ROOT / "docs/images/measured.json").read_text())


def marks(figure, prefix):
    """gid -> what is drawn under it."""
    return {
        artist.get_gid(): artist
        for artist in figure.findobj(lambda artist: (artist.get_gid() or "").startswith(prefix))
    }


def draw(table, others=()):
    return strip_and_blocks(table, 16 * len(table) - 5, 16, 16, others, WORDS, "DejaVu Sans")


def pieces(line):
    """The straight pieces of a line, as pairs of points."""
    return list(itertools.pairwise(np.column_stack(line.get_data())))


def cross(one, other):
    def side(a, b, c):
        return np.sign(round((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]), 9))

    (a, b), (c, d) = one, other
    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def tables():
    """Tables that can be drawn: random ones, and the one that was measured."""
    numbers = random.Random(0)
    drawn = [numbers.sample(range(16), numbers.randint(3, 7)) for _ in range(4000)]
    return [MEASURED["blocks"]["table"], *[table for table in drawn if lanes(table)][:12]]


@pytest.mark.parametrize("table", tables(), ids=str)
def test_the_lines_cross_neither_each_other_nor_a_block(table):
    figure = draw(table)
    lines = marks(figure, "join:")
    assert len(lines) == len(table)
    for one, other in itertools.combinations(lines.values(), 2):
        assert not any(cross(a, b) for a in pieces(one) for b in pieces(other))
    for name, line in lines.items():
        for gid, box in marks(figure, "block:").items():
            (left, top), right, bottom = (
                box.get_xy(),
                box.get_x() + box.get_width(),
                box.get_y() + box.get_height(),
            )
            diagonals = [((left, top), (right, bottom)), ((left, bottom), (right, top))]
            hit = any(cross(piece, diagonal) for piece in pieces(line) for diagonal in diagonals)
            assert not hit, f"{name} runs through {gid}"


def test_a_table_whose_lines_would_cross_is_refused():
    assert lanes([4 * COLUMNS - 1, 0]) is None
    with pytest.raises(ValueError, match=r"the lines to blocks \[12, 3\] would cross"):
        draw([12, 3])


def test_blocks_are_filled_as_far_as_they_hold_tokens():
    boxes = marks(draw([2, 5, 11], others=[3]), "filled:")
    widths = [boxes[f"filled:{block}"].get_width() for block in (2, 5, 11)]
    assert widths[0] == widths[1] and widths[2] == pytest.approx(widths[0] * 11 / 16)


def test_growth_is_the_line_that_was_measured():
    figure = growth(MEASURED["bytes_per_token"], MEASURED["growth"], WORDS, "DejaVu Sans")
    (line,), (points,) = marks(figure, "line").values(), marks(figure, "points").values()
    slope = line.get_ydata()[1] / line.get_xdata()[1]
    assert np.allclose(points.get_ydata(), slope * points.get_xdata())
    assert len(MEASURED["growth"]) >= 8
