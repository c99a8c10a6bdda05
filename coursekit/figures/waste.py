"""Where the bytes of a KV budget are: one bar for each policy, and a map of contiguous memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label
from coursekit.replay import Snapshot

KINDS = {  # kind of WasteReport -> words and colour
    "used": ("holds tokens", BLUE),
    "to_come": ("for tokens to come", "#a9a9a9"),
    "never": ("never used", PALE),
    "internal": ("end of last block", "#8c8c8c"),
    "external": ("holes", "#ededed"),
    "free": ("free", "white"),
}


@house_style
def waste_bars(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """One bar for each policy, cut into the kinds of `WasteReport`.

    shares: name of the policy -> share of the budget (0 … 1) by kind, as `WasteReport.shares` gives them.
    """
    figure = Figure(figsize=(8.2, 0.6 + 0.62 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for row, (name, by_kind) in enumerate(shares.items()):
        left = 0.0
        for kind, share in by_kind.items():
            words, color = KINDS[kind]
            axes.barh(
                row, share, 0.62, left=left, color=color, edgecolor=INK, linewidth=0.6, gid=f"{kind}:{name}"
            )
            _name_share(axes, left + share / 2, row, words, share, "white" if kind == "used" else INK)
            left += share
        thin = [f"{KINDS[kind][0]} {100 * share:.0f} %" for kind, share in by_kind.items() if is_thin(share)]
        label(axes, 1, row, "\n".join(thin), offset=(6, 0), va="center", fontsize=8, color=GREY)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0, 1.001)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
    axes.set_xlabel("share of the KV budget")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


def is_thin(share: float) -> bool:
    """Whether a stretch is too short for a percentage in it, and yet worth a name beside the bar."""
    return 0.005 <= share <= 0.033


def _name_share(axes: Axes, x: float, y: float, words: str, share: float, color: str) -> None:
    """Words and percentage inside their stretch of the bar; two lines or the number alone if it is short."""
    percent = f"{100 * share:.0f} %"
    for text, size in ((f"{words}, {percent}", 9.5), (f"{words}\n{percent}", 8.5), (percent, 8.5)):
        longest = max(map(len, text.split("\n")))
        if share > 0.0105 * longest * size / 9.5 + 0.005:
            label(axes, x, y, text, ha="center", va="center", color=color, fontsize=size, linespacing=1.05)
            return


@house_style
def arena_map(snapshot: Snapshot, num_slots: int) -> Figure:
    """Contiguous memory in one step as a long bar: strips, their tokens, the holes, and who waits for one."""
    figure = Figure(figsize=(8.2, 1.9), layout="constrained")
    axes = figure.subplots()
    _box(axes, 0, num_slots, 0.0, "white", "arena")
    for strip in snapshot.strips:
        _box(axes, strip.start, strip.size, 0.0, PALE, f"strip:{strip.start}")
        _box(axes, strip.start, strip.stored, 0.0, BLUE, f"stored:{strip.start}")
    label(axes, 0, 1.0, "blue: tokens   grey: reserved   white: holes", offset=(0, 11), color=GREY)
    slots = f"{num_slots:,} slots".replace(",", " ")
    label(axes, num_slots, 1.0, slots, offset=(0, 11), ha="right", color=GREY)
    if snapshot.waiting is not None:
        start, largest = max(snapshot.holes, key=lambda hole: hole[1], default=(0, 0))
        _outline(axes, 0, snapshot.waiting, -1.15, 0.6, "waiting")
        if largest:
            _outline(axes, start, snapshot.waiting, -0.12, 1.24, "tried")
        said = (
            f"waits for {snapshot.waiting} slots in a row; "
            f"the largest hole has {largest}, all holes together {snapshot.free}"
        )
        label(axes, snapshot.waiting, -0.85, said, offset=(6, 0), va="center")
    axes.set_xlim(-0.002 * num_slots, 1.002 * num_slots)
    axes.set_ylim(-1.3, 1.45)
    axes.axis("off")
    return figure


@house_style
def arena_over_time(snapshots: Sequence[Snapshot], num_slots: int, *, rows: int = 700) -> Figure:
    """Contiguous memory step by step, a column for each step: tokens blue, reserved grey, holes white.

    `rows` is the height of the picture in cells, each of `num_slots / rows` slots.
    """
    cells = np.zeros((rows, len(snapshots)), dtype=np.uint8)
    for step, snapshot in enumerate(snapshots):
        for strip in snapshot.strips:
            ends = (strip.start, strip.start + strip.stored, strip.start + strip.size)
            start, stored, stop = (round(slot * rows / num_slots) for slot in ends)
            cells[start:stop, step] = 1
            cells[start:stored, step] = 2
    figure = Figure(figsize=(8.2, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.imshow(
        cells,
        cmap=ListedColormap(["white", PALE, BLUE]),
        vmin=0,
        vmax=2,
        origin="lower",
        extent=(0, len(snapshots), 0, num_slots),
        aspect="auto",
        interpolation="nearest",
        gid="arena",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("slot")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}".replace(",", " ")))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}".replace(",", " ")))
    label(axes, 0, num_slots, "blue: tokens   grey: reserved   white: holes", offset=(0, 6), color=GREY)
    return figure


def _box(axes: Axes, x: float, width: float, y: float, color: str, gid: str, height: float = 1.0) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=0.6, gid=gid))


def _outline(axes: Axes, x: float, width: float, y: float, height: float, gid: str) -> None:
    """The request that waits: blue and hollow, so that what lies under it can be seen."""
    shape = Rectangle(
        (x, y), width, height, facecolor="none", edgecolor=BLUE, linewidth=1.4, zorder=5, gid=gid
    )
    axes.add_patch(shape)
