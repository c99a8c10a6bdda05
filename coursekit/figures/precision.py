"""What fewer bits for keys and values cost, and what they save."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

Points = tuple[np.ndarray, np.ndarray]
"""Magnitudes and relative errors, one of each for every stored vector."""


class FormatCost(NamedTuple):
    """Bytes per token of the numbers and of their scales; perplexity beyond the exact one, in percent."""

    number_bytes: int
    scale_bytes: int
    perplexity_percent: float


@house_style
def error_against_magnitude(panels: Mapping[str, Mapping[str, Points]]) -> Figure:
    """A dot for every stored vector: its relative error against the largest number in it.

    Args:
        panels: title -> number format -> its points. The first format is grey, the second blue.
    """
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, formats) in zip(grid, panels.items(), strict=True):
        for color, (name, (magnitude, error)) in zip((GREY, BLUE), formats.items(), strict=True):
            axes.plot(magnitude, 100 * error, ".", color=color, markersize=1.6, gid=f"error:{title}:{name}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_title(title)
        axes.set_xlabel("largest number in the vector")
        axes.axhline(4, color=PALE, linewidth=0.8, zorder=0)
        for color, (name, (magnitude, error)) in zip((GREY, BLUE), formats.items(), strict=True):
            place = float(np.median(100 * error[magnitude >= np.quantile(magnitude, 0.95)]))
            label(axes, 1.3 * float(magnitude.max()), place, name, color=color, va="center")
    grid[0].set_ylabel("relative error, % (line: 4 %)")
    return figure


@house_style
def format_costs(formats: Mapping[str, FormatCost]) -> Figure:
    """Bytes per token of each format, the scales apart, with what the format does to the perplexity."""
    figure = Figure(figsize=(8.2, 0.7 + 0.5 * len(formats)), layout="constrained")
    axes = figure.subplots()
    for row, (name, cost) in enumerate(formats.items()):
        total = cost.number_bytes + cost.scale_bytes
        color = BLUE if cost.scale_bytes else PALE
        axes.barh(row, cost.number_bytes, 0.66, color=color, gid=f"numbers:{name}")
        axes.barh(row, cost.scale_bytes, 0.66, left=cost.number_bytes, color=INK, gid=f"scales:{name}")
        more = round(cost.perplexity_percent, 1) + 0.0  # never "-0.0"
        said = f"{total} bytes, perplexity {more:+.1f} %"
        label(axes, total, row, said, offset=(7, 0), va="center")
    axes.set_yticks(range(len(formats)), list(formats))
    axes.set_ylim(len(formats) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 1.45 * max(cost.number_bytes + cost.scale_bytes for cost in formats.values()))
    axes.set_xlabel("bytes per token (black: scales)")
    return figure
