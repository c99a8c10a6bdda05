"""A block table as it grows, and what the size of a block costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

LOGICAL_X, TABLE_X, POOL_X = 0.0, 5.6, 10.6  # for blocks of four slots; a slot is one unit wide
ROW_HEIGHT = 0.74


@house_style
def table_growing(
    table: Sequence[int],
    *,
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    others: Mapping[int, int],
) -> Figure:
    """One request: left as it sees itself, in the middle its block table, right the pool, slot by slot.

    Args:
        table: physical block of each logical block of the request.
        num_tokens: tokens of the request; each is drawn with its position, the newest with a frame.
        block_size: slots of a block.
        num_blocks: physical blocks of the pool, ids 0 … num_blocks − 1.
        others: physical blocks of other requests -> slots filled in each, drawn grey.
    """
    if not 0 <= num_tokens <= len(table) * block_size:
        raise ValueError(f"{num_tokens} tokens do not fit {len(table)} blocks of {block_size}")
    figure = Figure(figsize=(8.2, 0.55 + 0.36 * num_blocks), layout="constrained")
    axes = figure.subplots()
    for logical, block in enumerate(table):
        tokens = range(logical * block_size, min((logical + 1) * block_size, num_tokens))
        newest = num_tokens - 1
        _block(axes, LOGICAL_X, logical, block_size, tokens, f"token:{logical}", newest=newest)
        label(
            axes, LOGICAL_X, logical + ROW_HEIGHT / 2, f"{logical}", offset=(-6, 0), ha="right", va="center"
        )
        _entry(axes, logical, block)
        _block(axes, POOL_X, block, block_size, tokens, f"slot:{block}", newest=newest)
    for block in range(num_blocks):
        if block not in table:
            filled = range(others.get(block, 0))
            color = PALE if block in others else "white"
            _block(axes, POOL_X, block, block_size, filled, f"slot:{block}", color=color)
        x = POOL_X + block_size
        label(axes, x, block + ROW_HEIGHT / 2, f"block {block}", offset=(6, 0), va="center", color=GREY)
    for x, words in ((LOGICAL_X, "the request"), (TABLE_X, "block table"), (POOL_X, "the pool")):
        label(axes, x, 0, words, offset=(0, 6))
    axes.set_xlim(-0.8, POOL_X + block_size + 1.9)
    axes.set_ylim(num_blocks, -0.6)
    axes.axis("off")
    return figure


def _entry(axes: Axes, logical: int, block: int) -> None:
    """A row of the table: its box, the physical block in it, and the line to that block."""
    box = Rectangle((TABLE_X, logical), 1.6, ROW_HEIGHT, facecolor="white", edgecolor=INK, linewidth=0.8)
    box.set_gid(f"entry:{logical}")
    axes.add_patch(box)
    middle = logical + ROW_HEIGHT / 2
    label(axes, TABLE_X + 0.8, middle, str(block), ha="center", va="center")
    ends = [middle, block + ROW_HEIGHT / 2]
    axes.plot([TABLE_X + 1.6, POOL_X], ends, color=INK, linewidth=0.8, gid=f"join:{logical}:{block}")


def _block(
    axes: Axes,
    x: float,
    row: int,
    block_size: int,
    tokens: range,
    gid: str,
    *,
    color: str = BLUE,
    newest: int = -1,
) -> None:
    """A row of `block_size` slots, the first `len(tokens)` filled; blue ones carry the token's position."""
    for offset in range(block_size):
        filled = offset < len(tokens)
        cell = Rectangle(
            (x + offset, row),
            1,
            ROW_HEIGHT,
            facecolor=color if filled else "white",
            edgecolor=INK,
            linewidth=0.6,
            gid=f"{gid}:{offset}",
        )
        axes.add_patch(cell)
        if filled and color == BLUE:
            said: dict[str, Any] = {"color": "white", "ha": "center", "va": "center", "fontsize": 8.5}
            weight = "bold" if tokens[offset] == newest else "normal"
            place = (x + offset + 0.5, row + ROW_HEIGHT / 2)
            label(axes, *place, str(tokens[offset]), fontweight=weight, **said)
            if tokens[offset] == newest:
                cell.set(linewidth=2.0, zorder=3)


@house_style
def block_size_tradeoff(
    holds: Mapping[str, Mapping[int, float]], entries: Mapping[str, Mapping[int, float]]
) -> Figure:
    """What large blocks cost and what small blocks cost, against the block size, in powers of two.

    Args:
        holds: workload -> block size -> share of the memory taken that holds tokens, 0 … 1.
        entries: workload -> block size -> block-table entries of a request, on average.
    """
    figure = Figure(figsize=(8.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (name, line) in enumerate(holds.items()):
        color = GREY if index else BLUE
        _draw_line(left, {size: 100 * share for size, share in line.items()}, color, f"holds:{name}")
        size = max(line)
        label(left, size, 100 * line[size], name, color=color, offset=(8, 0), va="center")
    left.set_ylim(0, 105)
    left.set_ylabel("% of memory taken that holds tokens")
    left.set_title("large blocks waste memory")
    for index, (name, line) in enumerate(entries.items()):
        color = GREY if index else BLUE
        _draw_line(right, line, color, f"entries:{name}")
        size = sorted(line)[len(line) // 2]
        beside = {"offset": (-5, -14), "ha": "right"} if index else {"offset": (7, 3)}
        label(right, size, line[size], name, color=color, **beside)
    right.set_yscale("log")
    right.minorticks_off()
    right.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    right.set_ylabel("table entries of a request")
    right.set_title("small blocks need long tables")
    return figure


def _draw_line(axes: Axes, line: Mapping[int, float], color: str, gid: str) -> None:
    sizes = sorted(line)
    axes.plot(sizes, [line[size] for size in sizes], "o-", color=color, markersize=3.5, gid=gid)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("block size (tokens)")
