"""What memory and arithmetic allow a kernel at most, against its arithmetic intensity."""

from collections.abc import Collection, Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

LOWEST, HIGHEST = 0.5, 8192.0  # operations per byte


@house_style
def roofline(
    machines: Mapping[str, tuple[float, float]],
    kernels: Mapping[str, float],
    hollow: Collection[str] = (),
) -> Figure:
    """One roof for each machine, and where kernels stand under the first of them.

    Args:
        machines: name -> bandwidth in bytes per second, and operations per second.
        kernels: name -> operations per byte.
        hollow: kernels of whose operations a part is useless; their marks are not filled.
    """
    figure = Figure(figsize=(8.2, 4.0), layout="constrained")
    axes = figure.subplots()
    for index, (name, (bandwidth, flops)) in enumerate(machines.items()):
        ridge = flops / bandwidth
        x = [LOWEST, ridge, HIGHEST]
        y = [LOWEST * bandwidth / 1e12, flops / 1e12, flops / 1e12]
        axes.plot(x, y, color=GREY if index else INK, gid=f"roof:{name}")
        label(axes, HIGHEST, y[-1], name, offset=(6, 0), va="center", color=GREY if index else INK)
    bandwidth, flops = next(iter(machines.values()))
    for name, intensity in kernels.items():
        reached = min(intensity * bandwidth, flops) / 1e12
        gid = f"kernel:{name}"
        axes.plot([intensity] * 2, [1e-9, reached], color=PALE, linewidth=0.8, zorder=0)
        filled = "white" if name in hollow else BLUE
        axes.plot([intensity], [reached], "o", color=BLUE, mfc=filled, markersize=6, zorder=3, gid=gid)
        label(axes, intensity, reached, name, offset=(-7, 5), ha="right", color=BLUE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(LOWEST, HIGHEST)
    lowest = min(LOWEST * bandwidth for bandwidth, _ in machines.values()) / 1e12
    axes.set_ylim(lowest / 2, 3 * max(flops for _, flops in machines.values()) / 1e12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.minorticks_off()
    axes.set_xlabel("operations per byte read")
    axes.set_ylabel("TFLOP/s at most")
    return figure
