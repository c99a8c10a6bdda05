"""What clients of a server wait for, against the rate at which they come."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from coursekit.figures.style import BLUE, GREY, INK, house_style, label


@house_style
def latency_against_rate(
    curves: Mapping[str, Sequence[tuple[float, float]]], capacities: Mapping[str, float], *, y_label: str
) -> Figure:
    """A line for each server: name -> (requests a second, seconds); a mark on the axis at its capacity."""
    figure = Figure(figsize=(6.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, points), color in zip(curves.items(), (GREY, BLUE, INK), strict=False):
        rates, seconds = zip(*points, strict=True)
        axes.plot(rates, seconds, color=color, marker="o", markersize=4)
        label(axes, rates[-1], seconds[-1], name, color=color, offset=(6, 0), va="center")
        axes.plot(capacities[name], 0, color=color, marker="^", markersize=8, clip_on=False)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.set_xlabel("requests a second")
    axes.set_ylabel(y_label)
    return figure
