"""The two pictures of a book's chapter on paging, drawn to be read at a glance, in any language.

`words` are the labels, by the names used here; `make pictures` has them in English and in Chinese.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

COLUMNS = 4
MIB = 2**20
BOX, GUTTER = 1.0, 0.8  # height of a block and of the room between two rows of blocks
FIRST_X, STEP_X, WIDTH = 3.6, 1.75, 1.25  # where blocks stand, and how wide they are
TABLE_X, TABLE_WIDTH, ENTRY = 0.2, 0.9, 0.8
CHANNEL_X = 3.2  # here each line has reached the gutter that leads to its block


@house_style
def growth(
    bytes_per_token: int, measured: Sequence[tuple[int, int]], words: Mapping[str, str], font: str
) -> Figure:
    """KV memory against sequence length: the line of the formula, and what a model wrote as dots.

    Args:
        measured: (tokens, bytes) pairs.
        words: "tokens" and "memory" (the axes), "formula", "measured".
        font: family that has the signs of `words`.
    """
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    last = max(tokens for tokens, _ in measured)
    axes.plot([0, last], [0, last * bytes_per_token / MIB], color=BLUE, linewidth=2, gid="line")
    x, y = zip(*((tokens, written / MIB) for tokens, written in measured), strict=True)
    axes.plot(x, y, "o", color=INK, markersize=4.5, gid="points", clip_on=False, zorder=3)
    style: dict[str, Any] = {"fontfamily": font}
    high, low = 0.62 * last, 0.5 * last
    label(
        axes,
        high,
        high * bytes_per_token / MIB,
        words["formula"],
        offset=(-8, 6),
        ha="right",
        color=BLUE,
        **style,
    )
    label(axes, low, low * bytes_per_token / MIB, words["measured"], offset=(12, -8), va="top", **style)
    axes.set_xlim(0, 1.02 * last)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(words["tokens"], **style)
    axes.set_ylabel(words["memory"], **style)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}".replace(",", " ")))
    return figure


def lanes(table: Sequence[int]) -> list[bool] | None:
    """For each entry, whether its line reaches its block from above (else from below), so that none cross.

    None when that cannot be: the rows of the blocks must not go up again, and within a row the lines that
    come from above must go ever less far, those from below ever farther.
    """
    rows = [block // COLUMNS for block in table]
    if rows != sorted(rows):
        return None
    above = []
    for row in sorted(set(rows)):
        columns = [block % COLUMNS for block in table if block // COLUMNS == row]
        turn = next((i for i in range(1, len(columns)) if columns[i] > columns[i - 1]), len(columns) - 1)
        if columns[turn:] != sorted(columns[turn:]):
            return None
        above += [i < turn for i in range(len(columns))]
    return above


@house_style
def strip_and_blocks(
    table: Sequence[int],
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    others: Collection[int],
    words: Mapping[str, str],
    font: str,
) -> Figure:
    """Left one contiguous strip, right the same memory in blocks, joined to their table without crossings.

    Args:
        table: physical block of each logical block of the request; `lanes` must find a way for it.
        others: blocks that other requests hold.
        words: "strip" and "blocks" (the titles), "tokens", "reserved", "table", "other", "free".
        font: family that has the signs of `words`.
    Raises ValueError for a table whose lines would cross.
    """
    above = lanes(table)
    if above is None:
        raise ValueError(f"the lines to blocks {list(table)} would cross")
    rows = -(-num_blocks // COLUMNS)
    height = rows * BOX + (rows - 1) * GUTTER
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.9))
    style: dict[str, Any] = {"fontfamily": font}
    for axes, title in ((left, words["strip"]), (right, words["blocks"])):
        axes.set_title(title, **style)
        axes.set_ylim(height + 0.75, -0.75)
        axes.axis("off")
    used = height * num_tokens / (num_blocks * block_size)
    _box(left, 0, 0, 1, height, PALE, "strip:reserved")
    _box(left, 0, 0, 1, used, BLUE, "strip:used")
    label(left, 1, used / 2, words["tokens"], offset=(6, 0), va="center", color=BLUE, **style)
    label(left, 1, (used + height) / 2, words["reserved"], offset=(6, 0), va="center", **style)
    left.set_xlim(-0.05, 2.3)
    _draw_pool(right, table, above, num_tokens, block_size, num_blocks, others)
    top = (height - len(table) * ENTRY) / 2
    label(right, TABLE_X + TABLE_WIDTH / 2, top, words["table"], offset=(0, 6), ha="center", **style)
    marks = ((words["this"], BLUE), (words["other"], PALE), (words["free"], "white"))
    for place, (text, color) in enumerate(marks):
        x = FIRST_X + place * 2.4
        _box(right, x, height + 0.35, 0.3, 0.3, color, f"mark:{place}")
        label(right, x + 0.3, height + 0.5, text, offset=(5, 0), va="center", color=GREY, **style)
    right.set_xlim(0, FIRST_X + STEP_X * COLUMNS)
    return figure


def _draw_pool(
    axes: Axes,
    table: Sequence[int],
    above: Sequence[bool],
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    others: Collection[int],
) -> None:
    """The table, the blocks in rows of four, and a line for each entry through the room between the rows."""
    for block in range(num_blocks):
        x, y = FIRST_X + STEP_X * (block % COLUMNS), (BOX + GUTTER) * (block // COLUMNS)
        _box(axes, x, y, WIDTH, BOX, PALE if block in others else "white", f"block:{block}")
    rows = -(-num_blocks // COLUMNS)
    top = (rows * BOX + (rows - 1) * GUTTER - len(table) * ENTRY) / 2
    for logical, block in enumerate(table):
        row = block // COLUMNS
        x, y = FIRST_X + STEP_X * (block % COLUMNS), (BOX + GUTTER) * row
        filled = min(num_tokens - logical * block_size, block_size) / block_size
        _box(axes, x, y, WIDTH * filled, BOX, BLUE, f"filled:{block}")
        name = {"ha": "center", "va": "center", "color": "white" if filled > 0.6 else INK, "zorder": 6}
        label(axes, x + WIDTH / 2, y + BOX / 2, str(block), **name)
        entry = top + logical * ENTRY
        _box(axes, TABLE_X, entry, TABLE_WIDTH, ENTRY, "white", f"entry:{logical}")
        label(axes, TABLE_X + TABLE_WIDTH / 2, entry + ENTRY / 2, str(block), ha="center", va="center")
        same = [i for i, other in enumerate(table) if other // COLUMNS == row and above[i] == above[logical]]
        place = same.index(logical) + 1
        if above[logical]:
            lane, end = y - GUTTER * (0.5 - 0.5 * place / (len(same) + 1)), y
        else:
            lane, end = y + BOX + GUTTER * 0.5 * place / (len(same) + 1), y + BOX
        middle = x + WIDTH / 2
        points = [
            (TABLE_X + TABLE_WIDTH, entry + ENTRY / 2),
            (CHANNEL_X, lane),
            (middle, lane),
            (middle, end),
        ]
        axes.plot(
            *zip(*points, strict=True), color=INK, linewidth=0.9, gid=f"join:{logical}:{block}", zorder=4
        )
        axes.plot(middle, end, "o", color=INK, markersize=3, zorder=5)


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str, gid: str) -> None:
    edge = BLUE if color == BLUE else INK
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.8, gid=gid))
