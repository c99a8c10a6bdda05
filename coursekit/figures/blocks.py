"""Blocks, and the table that finds them."""

from collections.abc import Collection, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

COLUMNS = 4
"""Physical blocks are drawn in rows of four."""


@house_style
def blocks_and_table(
    table: Sequence[int],
    *,
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    others: Collection[int] = (),
) -> Figure:
    """The same request in one contiguous strip, and in blocks found through its table.

    Args:
        table: physical block of each logical block of the request.
        num_tokens: tokens the request holds; must fit `table`.
        block_size: tokens a block holds.
        num_blocks: physical blocks of the pool, ids 0 … num_blocks − 1.
        max_model_len: tokens that the contiguous strip reserves.
        others: physical blocks held by other requests, drawn grey.
    """
    if not 0 < num_tokens <= len(table) * block_size:
        raise ValueError(f"{num_tokens} tokens do not fit {len(table)} blocks of {block_size}")
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.6))
    _draw_strip(left, num_tokens, max_model_len)
    _draw_pool(right, table, num_tokens, block_size, num_blocks, others)
    return figure


def _draw_strip(axes: Axes, num_tokens: int, max_model_len: int) -> None:
    """One tall strip: the used part from the top down, the rest reserved."""
    used = num_tokens / max_model_len
    _box(axes, 0, 0, 1, 1, PALE, gid="strip:reserved")
    _box(axes, 0, 0, 1, used, BLUE, gid="strip:used")
    label(axes, 1, used / 2, f"{num_tokens} tokens", offset=(6, 0), va="center", color=BLUE)
    empty = max_model_len - num_tokens
    label(axes, 1, (1 + used) / 2, f"{empty} slots\nreserved,\nempty", offset=(6, 0), va="center")
    axes.set_xlim(-0.1, 2.0)
    axes.set_ylim(1.02, -0.02)
    axes.set_title("one contiguous strip")
    axes.axis("off")


def _draw_pool(
    axes: Axes,
    table: Sequence[int],
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    others: Collection[int],
) -> None:
    """Left the block table, right the pool as a grid, joined by one line for each entry."""
    rows = -(-num_blocks // COLUMNS)
    place = {block: (3.0 + 1.5 * (block % COLUMNS), block // COLUMNS) for block in range(num_blocks)}
    for block, (x, y) in place.items():
        _box(axes, x, y, 1.2, 0.72, PALE if block in others else "white", gid=f"block:{block}")
    top = (rows - len(table)) / 2
    filled = {
        block: min(max(num_tokens - logical * block_size, 0), block_size) / block_size
        for logical, block in enumerate(table)
    }
    for logical, block in enumerate(table):
        x, y = place[block]
        _box(axes, x, y, 1.2 * filled[block], 0.72, BLUE, gid=f"filled:{block}")
        _box(axes, 0.4, top + logical, 1.0, 1.0, "white", gid=f"entry:{logical}")
        label(axes, 0.9, top + logical + 0.5, str(block), ha="center", va="center")
        label(
            axes,
            0.4,
            top + logical + 0.5,
            str(logical),
            offset=(-6, 0),
            ha="right",
            va="center",
            color=GREY,
        )
        start, end = (1.4, top + logical + 0.5), (x, y + 0.36)
        axes.add_patch(
            ConnectionPatch(
                start,
                end,
                "data",
                color=INK,
                linewidth=0.8,
                zorder=4,
                gid=f"join:{logical}:{block}",
            )
        )
        axes.plot(*end, "o", color=INK, markersize=2.5, zorder=5)
    for block, (x, y) in place.items():
        small = {"ha": "left", "va": "center", "fontsize": 7.5, "zorder": 6}
        on_blue = filled.get(block, 0) > 0.3
        label(axes, x + 0.14, y + 0.36, str(block), color="white" if on_blue else GREY, **small)
    label(axes, 0.9, top, "block table", offset=(0, 6), ha="center")
    label(
        axes,
        3.0,
        rows - 0.28,
        "blue: this request    grey: other requests    white: free",
        offset=(0, -6),
        va="top",
        color=GREY,
    )
    axes.set_xlim(-0.3, 3.0 + 1.5 * COLUMNS)
    axes.set_ylim(rows + 0.15, -0.4)
    axes.set_title(f"the same memory in blocks of {block_size} tokens")
    axes.axis("off")


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str, *, gid: str) -> None:
    edge = INK if color != BLUE else BLUE
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.8, gid=gid))
