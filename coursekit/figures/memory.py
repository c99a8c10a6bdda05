"""Memory against time and against length."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

MIB = 2**20
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


class StepSample(Protocol):
    """What the engine holds after one step."""

    @property
    def time(self) -> float: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def running(self) -> int: ...


@house_style
def memory_over_time(
    series: Mapping[str, Sequence[StepSample]], budget_bytes: int, *, x_label: str = "time (s)"
) -> Figure:
    """KV memory reserved and really used, and requests running, one column for each memory policy.

    Args:
        series: name of the policy -> samples in order of time, which is drawn from the first sample on.
            All columns share one time axis.
        budget_bytes: the KV budget that every policy was given.
        x_label: name and unit of `StepSample.time`.
    """
    most_running = max(sample.running for samples in series.values() for sample in samples)
    rows = 2 if most_running > 1 else 1  # requests at once are worth a row when there are several
    figure = Figure(figsize=(max(4.1 * len(series), 6.0), 2.4 + 0.8 * rows), layout="constrained")
    heights = (2.2, 1)[:rows]
    grid = figure.subplots(rows, len(series), sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    last = max(samples[-1].time - samples[0].time for samples in series.values())
    grid[0, 0].set_xlim(0, last)
    grid[0, 0].set_ylim(0, 1.22 * budget_bytes / MIB)
    for column, (name, samples) in enumerate(series.items()):
        _draw_memory(grid[0, column], name, samples, budget_bytes)
        if rows == 2:
            _draw_running(grid[1, column], name, samples)
        grid[-1, column].set_xlabel(x_label)
    grid[0, 0].set_ylabel("KV memory (MiB)")
    if rows == 2:
        grid[1, 0].set_ylabel("requests at once")
        grid[1, 0].set_ylim(0, 1.35 * most_running)
    return figure


def _draw_memory(axes: Axes, name: str, samples: Sequence[StepSample], budget_bytes: int) -> None:
    time = np.array([sample.time - samples[0].time for sample in samples])
    reserved = np.array([sample.reserved_bytes for sample in samples]) / MIB
    used = np.array([sample.used_bytes for sample in samples]) / MIB
    axes.set_title(name)
    axes.fill_between(time, used, reserved, step="post", color=PALE, linewidth=0, gid=f"waste:{name}")
    axes.fill_between(time, 0, used, step="post", color=BLUE, alpha=0.9, linewidth=0)
    axes.plot(time, reserved, drawstyle="steps-post", color=INK, linewidth=1.0, gid=f"reserved:{name}")
    axes.plot(time, used, drawstyle="steps-post", color=BLUE, linewidth=1.0, gid=f"used:{name}")
    axes.axhline(budget_bytes / MIB, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), gid=f"budget:{name}")
    label(axes, 0, budget_bytes / MIB, f"budget, {budget_bytes / MIB:g} MiB", offset=(4, 4))
    _name_area(axes, "holds tokens", time, np.zeros_like(used), used, color="white")
    _name_area(axes, "reserved, empty", time, used, reserved, color=INK)


def _name_area(
    axes: Axes, text: str, time: np.ndarray, low: np.ndarray, high: np.ndarray, color: str
) -> None:
    """Name an area where it is highest over a stretch as wide as the words; leave it out where it is thin."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    fine = np.linspace(time[0], time[-1], 200)
    step = np.searchsorted(time, fine, side="right") - 1  # the sample in force at each moment
    width = min(int(0.3 * right / (fine[1] - fine[0])), len(fine))
    starts = range(len(fine) - width + 1)
    floor = np.array([low[step[i : i + width]].max() for i in starts])
    ceiling = np.array([high[step[i : i + width]].min() for i in starts])
    widest = np.flatnonzero(ceiling - floor == (ceiling - floor).max())
    best = widest[len(widest) // 2]
    if ceiling[best] - floor[best] > 0.07 * top:
        x = (fine[best] + fine[best + width - 1]) / 2
        label(axes, x, (floor[best] + ceiling[best]) / 2, text, color=color, ha="center", va="center")


def _draw_running(axes: Axes, name: str, samples: Sequence[StepSample]) -> None:
    time = np.array([sample.time - samples[0].time for sample in samples])
    running = np.array([sample.running for sample in samples])
    axes.plot(time, running, drawstyle="steps-post", color=INK, linewidth=1.2, gid=f"running:{name}")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    peak = int(np.argmax(running))
    label(axes, time[peak], running[peak], f"at most {running[peak]}", offset=(3, 4))


def memory_against_length(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    points: Sequence[tuple[float, float]] = (),
    points_label: str = "measured",
    limit: tuple[str, float] | None = None,
    x_label: str = "sequence length (tokens)",
    y_label: str = "KV memory",
) -> Figure:
    """Memory against sequence length. The first line is blue, the others grey; each is named at its end.

    Args:
        lines: name -> (tokens, bytes) pairs.
        points: measured (tokens, bytes) pairs, drawn as dots over the lines.
        limit: name and height in bytes of a level that memory must not pass.
    """
    top = max(y for line in lines.values() for _, y in line)
    size, unit = next((size, name) for size, name in UNITS if top >= size)
    return lines_against_length(
        {name: [(x, y / size) for x, y in line] for name, line in lines.items()},
        points=[(x, y / size) for x, y in points],
        points_label=points_label,
        limit=(limit[0], limit[1] / size) if limit else None,
        x_label=x_label,
        y_label=f"{y_label} ({unit})",
    )


@house_style
def lines_against_length(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    points: Sequence[tuple[float, float]] = (),
    points_label: str = "measured",
    limit: tuple[str, float] | None = None,
    x_label: str = "sequence length (tokens)",
    y_label: str,
) -> Figure:
    """Any cost against sequence length; arguments as for `memory_against_length`, in the unit you name."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, line in lines.items():
        x, y = np.array(line, dtype=float).T
        color = BLUE if name == next(iter(lines)) else GREY
        axes.plot(x, y, color=color, gid=f"line:{name}", zorder=2)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a name may lie on the axis
        label(axes, x[-1], y[-1], name, color=color, offset=(6, 0), va="center", bbox=ground)
    if points:
        x, y = np.array(points, dtype=float).T
        axes.plot(x, y, "o", color=INK, markersize=4.5, gid="points", zorder=3, clip_on=False)
        middle = len(points) // 2
        label(axes, x[middle], y[middle], points_label, offset=(8, -12))
    if limit:
        axes.axhline(limit[1], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), gid="limit")
        label(axes, 0, limit[1], limit[0], offset=(4, 4))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}".replace(",", " ")))
    axes.margins(x=0.02)
    return figure
