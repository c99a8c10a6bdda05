"""The engine as a whole: how many requests run at once, and what a step spends its time on."""

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

SHADES = (BLUE, "#7fa3dc", GREY, "#a3a3a3", INK, PALE, "#ececec")
LIGHT = {"#a3a3a3", PALE, "#ececec", "#7fa3dc"}
SHORTEST_NAMED = 0.05
"""Share of the longest bar from which a part carries its percentage."""


@house_style
def requests_at_once(
    slots: int,
    max_lengths: Sequence[int],
    blocks: Mapping[str, tuple[int, float]],
    points: Mapping[str, Sequence[tuple[int, float]]],
) -> Figure:
    """Requests at once against the longest length that the server accepts.

    Args:
        slots: tokens that the budget holds; the line of strips is slots / length.
        max_lengths: lengths on the axis, rising.
        blocks: traffic -> (its longest request, requests at once from blocks by arithmetic): a level line
            each, from that length on, since a server that accepts less refuses some of it.
        points: series -> measured (longest length, requests at once), drawn as dots.
    """
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    strips = [slots // length for length in max_lengths]
    axes.plot(max_lengths, strips, color=GREY, gid="strips")
    label(axes, max_lengths[-1], strips[-1], "strips", color=GREY, offset=(7, 0), va="center")
    for name, (longest, level) in blocks.items():
        axes.plot([longest, max_lengths[-1]], [level, level], color=BLUE, gid=f"blocks:{name}")
        label(axes, max_lengths[-1], level, f"blocks, {name}", color=BLUE, offset=(7, 0), va="center")
    for name, measured in points.items():
        x, y = zip(*measured, strict=True)
        axes.plot(x, y, "o", color=INK, markersize=4.5, zorder=3, gid=f"points:{name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(max_lengths, [str(length) for length in max_lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylim(1, 1.6 * max(strips[0], *(level for _, level in blocks.values())))
    axes.set_xlabel("longest length accepted (tokens)")
    axes.set_ylabel("requests at once")
    axes.set_title("lines: arithmetic    dots: measured")
    return figure


@house_style
def step_parts(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """What a step spends its time on: one bar for each kind of step, in percent of that step.

    Args:
        steps: kind of step -> part -> seconds. The parts of the first are the order of all.
    """
    figure = Figure(figsize=(8.2, 0.9 + 0.75 * len(steps)), layout="constrained")
    axes = figure.subplots()
    order = list(next(iter(steps.values())))
    for row, (name, parts) in enumerate(steps.items()):
        total, left = sum(parts.values()), 0.0
        for index, part in enumerate(order):
            width = 100 * parts.get(part, 0.0) / total
            shade = SHADES[index % len(SHADES)]
            box = Rectangle((left, row), width, 0.6, facecolor=shade, edgecolor="white", linewidth=0.6)
            box.set_gid(f"part:{name}:{part}")
            axes.add_patch(box)
            if width >= 100 * SHORTEST_NAMED:
                color = INK if shade in LIGHT else "white"
                middle = (left + width / 2, row + 0.3)
                label(axes, *middle, f"{width:.0f}", color=color, ha="center", va="center", fontsize=8.5)
            left += width
        label(axes, 0, row, f"{name}: {1e3 * total:.0f} ms, in percent", offset=(0, 4))
    place = 0.0
    for index, part in enumerate(order):
        shade = SHADES[index % len(SHADES)]
        key = Rectangle((place, len(steps) + 0.12), 1.6, 0.25, facecolor=shade, gid=f"key:{part}")
        axes.add_patch(key)
        label(axes, place + 2.2, len(steps) + 0.25, part, va="center", fontsize=8.5)
        place += 4 + 1.05 * len(part)
    axes.set_xlim(0, 100)
    axes.set_ylim(len(steps) + 0.5, -0.35)
    axes.axis("off")
    return figure


@house_style
def blocks_over_steps(steps: Sequence[Mapping[str, Sequence[int]]], num_blocks: int) -> Figure:
    """A pool in time: each block in each step is free (white), held by one (grey) or by several (blue).

    Args:
        steps: for each step, the blocks of every request in it.
        num_blocks: how many the pool has.
    """
    figure = Figure(figsize=(7.2, 0.9 + 0.13 * num_blocks), layout="constrained")
    axes = figure.subplots()
    for number, step in enumerate(steps):
        holders = Counter(block for blocks in step.values() for block in blocks)
        for block, count in holders.items():
            color = BLUE if count > 1 else PALE
            cell = Rectangle((number, block), 1, 1, facecolor=color, edgecolor="white", linewidth=0.8)
            cell.set_gid(f"block:{block}:{number}:{count}")
            axes.add_patch(cell)
    axes.set_xlim(0, len(steps))
    axes.set_ylim(num_blocks, 0)
    axes.yaxis.set_major_locator(MultipleLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("block")
    axes.set_title("grey: held by one request    blue: shared by several    white: free")
    return figure
