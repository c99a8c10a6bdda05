"""Two block tables that point into one pool, and what sharing saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

LEFT_X, POOL_X, GAP, TABLE_WIDTH = 0.0, 2.4, 1.3, 1.1  # a slot is one unit wide
BLOCK_HEIGHT = 0.56
LABEL_HEIGHT = 0.36  # words above a block


@dataclass(frozen=True)
class ForkState:
    """Two tables and the pool at one moment.

    parent, child: the blocks that each table lists. contents: block -> the words stored in its slots, for
    blocks in use. ref_counts: reference count of every block of the pool, in order of id.
    """

    title: str
    parent: Sequence[int]
    child: Sequence[int]
    ref_counts: Sequence[int]
    contents: Mapping[int, Sequence[str]] = field(default_factory=dict)


@house_style
def forked_tables(states: Sequence[ForkState], *, block_size: int) -> Figure:
    """Side by side, one panel a state: the parent's table left of the pool, the child's right of it.

    A block that both list is blue, one that a single table lists is grey, a free one white. Its reference
    count stands above it. Raises ValueError for an entry that is no block of the pool.
    """
    for state in states:
        for block in (*state.parent, *state.child):
            if not 0 <= block < len(state.ref_counts):
                raise ValueError(f"block {block} is not one of {len(state.ref_counts)}")
    rows = max(len(state.ref_counts) for state in states)
    figure = Figure(figsize=(4.4 * len(states), 0.7 + 0.52 * rows), layout="constrained")
    all_axes = figure.subplots(1, len(states), squeeze=False)[0]
    for panel, (axes, state) in enumerate(zip(all_axes, states, strict=True)):
        _panel(axes, state, block_size, panel)
        axes.set_ylim(rows, -0.45)
    return figure


def _panel(axes: Axes, state: ForkState, block_size: int, panel: int) -> None:
    right_x = POOL_X + block_size + GAP
    for block, count in enumerate(state.ref_counts):
        _draw_block(axes, state, block, count, block_size, panel)
    sides = (("parent", state.parent, LEFT_X), ("child", state.child, right_x))
    for name, blocks, x in sides:
        label(axes, x, LABEL_HEIGHT, f"{name}'s table", offset=(0, 18))
        near, far = (x + TABLE_WIDTH, POOL_X) if x == LEFT_X else (x, POOL_X + block_size)
        for index, block in enumerate(blocks):
            row = index + LABEL_HEIGHT
            box = Rectangle((x, row), TABLE_WIDTH, BLOCK_HEIGHT, facecolor="white", edgecolor=INK, lw=0.8)
            box.set_gid(f"{panel}:{name}:{index}:{block}")
            axes.add_patch(box)
            middle = row + BLOCK_HEIGHT / 2
            label(axes, x + TABLE_WIDTH / 2, middle, str(block), ha="center", va="center")
            end = block + LABEL_HEIGHT + BLOCK_HEIGHT / 2
            gid = f"{panel}:join:{name}:{index}:{block}"
            axes.plot([near, far], [middle, end], color=INK, linewidth=0.8, gid=gid)
    axes.set_xlim(-0.2, right_x + TABLE_WIDTH + 0.6)
    axes.set_title(state.title)
    axes.axis("off")


def _draw_block(axes: Axes, state: ForkState, block: int, count: int, block_size: int, panel: int) -> None:
    shared = block in state.parent and block in state.child
    color = BLUE if shared else PALE if count else "white"
    words = state.contents.get(block, ()) if count else ()
    said = f"block {block}: {count} reference{'s' if count != 1 else ''}" if count else f"block {block}: free"
    label(axes, POOL_X, block + LABEL_HEIGHT, said, offset=(0, 2.5), fontsize=8, color=INK if count else GREY)
    for offset in range(block_size):
        filled = offset < len(words)
        cell = Rectangle(
            (POOL_X + offset, block + LABEL_HEIGHT),
            1,
            BLOCK_HEIGHT,
            facecolor=color if filled else "white",
            edgecolor=INK if count else GREY,
            linewidth=0.6,
            gid=f"{panel}:slot:{block}:{offset}",
        )
        axes.add_patch(cell)
        if filled:
            place = (POOL_X + offset + 0.5, block + LABEL_HEIGHT + BLOCK_HEIGHT / 2)
            ink = "white" if shared else INK
            label(axes, *place, words[offset], ha="center", va="center", fontsize=8, color=ink)


Saved = Mapping[str, Mapping[int, float]]
"""Workload -> sequences of a request -> blocks saved, in percent."""


@house_style
def blocks_saved_by_n(panels: Mapping[str, tuple[Saved, Saved]]) -> Figure:
    """Blocks saved against the number of sequences, one panel for each way to decode.

    Args:
        panels: title -> what we measured (lines and dots) and what the paper prints (rings).
    """
    figure = Figure(figsize=(8.2, 3.3), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, (ours, paper)) in zip(all_axes, panels.items(), strict=True):
        for index, (name, line) in enumerate(ours.items()):
            color = GREY if index else BLUE
            counts = sorted(line)
            axes.plot(
                counts,
                [line[n] for n in counts],
                "o-",
                color=color,
                markersize=4,
                gid=f"{title}:ours:{name}",
            )
            label(axes, counts[-1], line[counts[-1]], name, color=color, offset=(8, 0), va="center")
        for index, (name, points) in enumerate(paper.items()):
            axes.plot(
                list(points),
                list(points.values()),
                "o",
                color=GREY if index else BLUE,
                fillstyle="none",
                markersize=9,
                gid=f"{title}:paper:{name}",
            )
        axes.set_title(title)
        axes.set_xlabel("sequences of a request")
        axes.set_xticks(sorted({n for line in ours.values() for n in line}))
        axes.set_xlim(1.5, 7.6)
        axes.set_ylim(0, 100)
    all_axes[0].set_ylabel("% of blocks saved")
    label(all_axes[0], 1.6, 94, "rings: the PagedAttention paper", color=GREY, va="center")
    return figure
