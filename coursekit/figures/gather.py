"""Keys as they lie in the pool, and as attention sees them."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

GAP = 0.5  # between blocks of the pool, in slots
TOP, BOTTOM = 0.0, 3.2


@house_style
def gathered_through_table(
    table: Sequence[int], *, num_tokens: int, block_size: int, num_blocks: int
) -> Figure:
    """Above the pool, slot by slot; below the row of keys that the block table makes of it.

    Args:
        table: physical block of each logical block of the sequence.
        num_tokens: tokens of the sequence; each is drawn with its position.
        block_size: slots of a block.
        num_blocks: blocks of the pool, drawn side by side.
    """
    width = num_blocks * (block_size + GAP)
    figure = Figure(figsize=(8.2, 2.5), layout="constrained")
    axes = figure.subplots()
    owner = {block: logical for logical, block in enumerate(table)}
    first = (width - num_tokens) / 2  # where the lower row begins
    for block in range(num_blocks):
        left = block * (block_size + GAP)
        for offset in range(block_size):
            position = owner[block] * block_size + offset if block in owner else num_tokens
            _slot(axes, left + offset, TOP, position, num_tokens, f"slot:{block * block_size + offset}")
        label(axes, left + block_size / 2, TOP, str(block), offset=(0, 5), ha="center", color=GREY)
    for logical, block in enumerate(table):
        length = min(block_size, num_tokens - logical * block_size)
        start = (block * (block_size + GAP) + length / 2, TOP + 1)
        end = (first + logical * block_size + length / 2, BOTTOM)
        line = ConnectionPatch(start, end, "data", color=INK, linewidth=0.8, gid=f"join:{block}:{logical}")
        axes.add_patch(line)
    for position in range(num_tokens):
        _slot(axes, first + position, BOTTOM, position, num_tokens, f"key:{position}")
    label(axes, 0, TOP, "block", offset=(-6, 5), ha="right", color=GREY)
    label(axes, first, BOTTOM + 0.5, "what attention sees", offset=(-8, 0), ha="right", va="center")
    axes.set_xlim(-1.6, width)
    axes.set_ylim(BOTTOM + 1.15, TOP - 0.9)
    axes.axis("off")
    return figure


def _slot(axes: Axes, x: float, y: float, position: int, num_tokens: int, gid: str) -> None:
    """One slot: blue with its token's position, or grey when no token of the sequence is in it."""
    live = position < num_tokens
    box = Rectangle((x, y), 1, 1, facecolor=BLUE if live else PALE, edgecolor="white", linewidth=1.0, gid=gid)
    axes.add_patch(box)
    if live:
        size = {"fontsize": 7.5, "color": "white"}
        label(axes, x + 0.5, y + 0.5, str(position), ha="center", va="center", **size)
