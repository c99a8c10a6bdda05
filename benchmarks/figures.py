"""The pictures of the benchmarks, in the course's style. Each takes a result as its script writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

OURS = ("minipaged", "minipaged-torch")
DASHES = (0, (4, 3))
MIXES = {"chat48": "48 chats", "instruct64": "64 short instructions", "alone": "one request alone"}
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


@house_style
def throughput(result: dict[str, Any]) -> Figure:
    """Tokens per second of each engine, one panel for each mix; a line spans the samples."""
    mixes = {mix: engines for mix, engines in result["mixes"].items() if engines}
    rows = max((len(engines) for engines in mixes.values()), default=1)
    figure = Figure(figsize=(max(3.4 * len(mixes), 4.5), 1.3 + 0.36 * rows), layout="constrained")
    grid = figure.subplots(1, max(len(mixes), 1), squeeze=False, sharey=True)[0]
    for axes, (mix, engines) in zip(grid, mixes.items(), strict=False):
        _bars(axes, mix, engines, result["floors"][mix]["floor"])
    return figure


def _bars(axes: Axes, mix: str, engines: dict[str, dict[str, Any]], floor: float) -> None:
    for row, (name, found) in enumerate(engines.items()):
        rate, (low, high) = found["tokens_per_second"], found["spread"]
        color = BLUE if name in OURS else PALE
        axes.barh(row, rate, 0.62, color=color, gid=f"rate:{mix}:{name}")
        axes.plot([low, high], [row, row], color=INK, linewidth=1.0)
        label(axes, max(rate, high), row, f"{rate:.0f}", offset=(5, 0), va="center", bbox=ON_WHITE)
    axes.axvline(floor, color=GREY, linewidth=0.9, linestyle=DASHES, gid=f"floor:{mix}")
    label(axes, floor, -0.5, "limit of this machine", offset=(-4, 2), color=GREY, ha="right")
    axes.set_yticks(range(len(engines)), list(engines))
    axes.set_ylim(len(engines) - 0.5, -0.9)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 1.06 * max(floor, *(found["spread"][1] for found in engines.values())))
    axes.set_title(MIXES.get(mix, mix))
    axes.set_xlabel("output tokens per second")


@house_style
def curves(result: dict[str, Any]) -> Figure:
    """How many times faster than transformers: against the spread of lengths, and against batch × context."""
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = (
        (left, "static", "transformers, static batches", "longest answer of a batch / mean answer"),
        (right, "continuous", "transformers, continuous batching", "requests × tokens of context"),
    )
    for axes, name, title, x_label in panels:
        points = result[name]
        x, y = ([point[key] for point in points] for key in ("x", "ratio"))
        axes.axhline(1, color=INK, linewidth=0.9, linestyle=DASHES)
        axes.plot(x, y, "o-", color=BLUE, markersize=4.5, gid=f"ratio:{name}")
        for point in points:
            label(axes, point["x"], point["ratio"], f"{point['ratio']:.1f}", offset=(-5, 7), ha="center")
        axes.margins(x=0.08)
        axes.set_ylim(0, 1.2 * max([1.0, *y]))
        axes.set_title(title)
        axes.set_xlabel(x_label)
    left.set_ylabel("times as fast as transformers")
    right.set_xscale("log", base=2)
    right.set_xticks([point["x"] for point in result["continuous"]])
    right.xaxis.set_major_formatter(FuncFormatter(_thin_thousands))
    right.minorticks_off()
    return figure


@house_style
def scaling(result: dict[str, Any]) -> Figure:
    """Step time above, KV memory below, as requests, context and block size grow; lines are the fits."""
    panels = result["series"]
    figure = Figure(figsize=(3.2 * len(panels), 5.2), layout="constrained")
    grid = figure.subplots(2, len(panels), squeeze=False)
    for column, (name, series) in enumerate(panels.items()):
        x = np.array([point["x"] for point in series["points"]], dtype=float)
        measures = (
            ("step", 1e3, "step time (ms)", "seconds"),
            ("memory", 1 / 2**20, "KV memory taken (MiB)", "bytes"),
        )
        for row, (kind, scale, y_label, key) in enumerate(measures):
            axes = grid[row, column]
            y = scale * np.array([point[key] for point in series["points"]], dtype=float)
            fit = series["fits"][kind]
            line = scale * (fit["a"] + fit["b"] * np.array([p[fit["against"]] for p in series["points"]]))
            axes.plot(x, line, color=GREY, linewidth=1.2, gid=f"fit:{kind}:{name}")
            axes.plot(x, y, "o", color=BLUE, markersize=4.5, gid=f"points:{kind}:{name}")
            if kind == "step" and series.get("bend"):
                _bend(axes, series["bend"])
            if name == "block size":
                axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(_thin_thousands))
            axes.minorticks_off()
            axes.set_ylim(0, 1.15 * max(y.max(), line.max()))
            if column == 0:
                axes.set_ylabel(y_label)
        grid[0, column].set_title(series["title"])
        grid[1, column].set_xlabel(series["x_label"])
    return figure


def _bend(axes: Axes, x: float) -> None:
    axes.axvline(x, color=INK, linewidth=0.9, linestyle=DASHES, gid="bend")
    words = f"{x:.0f}: as long to multiply\nas to read the weights"
    above_the_points = axes.get_xaxis_transform()
    label(axes, x, 1, words, xycoords=above_the_points, offset=(5, -2), va="top")


@house_style
def prefix_sharing(result: dict[str, Any]) -> Figure:
    """Time to first token of each request, in order of arrival, with and without sharing."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    styles = {
        "off": (GREY, "sharing off"),
        "cold": (INK, "on, cache empty"),
        "warm": (BLUE, "on, prompt known"),
    }
    up = {"cold": 6, "warm": -4}  # the two lines run close to each other
    last = 0
    for name, (color, words) in styles.items():
        ttft: Sequence[float] = result["runs"][name]["ttft"]
        axes.plot(range(1, len(ttft) + 1), ttft, color=color, gid=f"ttft:{name}")
        label(axes, len(ttft), ttft[-1], words, color=color, offset=(6, up.get(name, 0)), va="center")
        last = max(last, len(ttft))
    axes.set_xlim(1, last)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("request, in order of arrival")
    axes.set_ylabel("time to first token (s)")
    return figure


@house_style
def beside_the_model(result: dict[str, Any]) -> Figure:
    """Where the time beside the model goes, one panel for each way of reporting."""
    kinds = result["smollm2"]
    names = list(kinds["streamed"]["parts"])
    figure = Figure(figsize=(7.6, 2.9), layout="constrained")
    longest = max(micros for found in kinds.values() for micros in found["parts"].values())
    for axes, (kind, found) in zip(figure.subplots(1, len(kinds), sharey=True), kinds.items(), strict=True):
        for row, name in enumerate(names):
            micros = found["parts"].get(name, 0.0)
            axes.barh(row, micros, 0.62, color=BLUE, gid=f"part:{kind}:{name}")
            label(axes, micros, row, f"{micros:.0f}", offset=(5, 0), va="center")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, 1.15 * longest)
        axes.set_title(f"text {kind}: {found['share']:.1%} of a step")
        axes.set_xlabel("µs of a step")
    return figure


def _thin_thousands(value: float, _: int) -> str:
    return f"{value:,.0f}".replace(",", " ")
