"""Who runs when, what a pool holds in a step, and what the two ways to preempt cost."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label
from coursekit.timeline import Moment, StepView

PARKED = "#a9a9a9"
STATES = {  # state of a moment -> words above the chart, colour, height of the bar
    "prefill": ("prefill", INK, 0.72),
    "decode": ("decode", BLUE, 0.72),
    "waiting": ("waiting", PALE, 0.14),
    "preempted": ("preempted", PARKED, 0.40),
    "swapped": ("swapped", PARKED, 0.40),
}


@house_style
def gantt(states: Mapping[str, Sequence[str | None]]) -> Figure:
    """One row for each request, one column for each step, as `Timeline.states` gives them."""
    figure = Figure(figsize=(8.2, 0.95 + 0.3 * len(states)), layout="constrained")
    axes = figure.subplots()
    for row, (name, moments) in enumerate(states.items()):
        step = 0
        for state, run in groupby(moments):
            length = len(list(run))
            if state is not None:
                _bar(axes, name, row, state, step, length)
            step += length
    num_steps = max(map(len, states.values()), default=0)
    used = [key for key in STATES if any(key in moments for moments in states.values())]
    axes.set_xlim(0, num_steps)
    axes.set_ylim(len(states) - 0.4, -1.5)
    x = 0.0
    for key in used:
        words, color, height = STATES[key]
        swatch = Rectangle(
            (x, -1.08 - height / 2), 0.022 * num_steps, height, facecolor=color, edgecolor=INK, linewidth=0.5
        )
        axes.add_patch(swatch)
        label(axes, x + 0.022 * num_steps, -1.08, words, offset=(4, 0), va="center")
        x += (0.06 + 0.0135 * len(words)) * num_steps
    axes.set_yticks(range(len(states)), list(states))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("step")
    return figure


def _bar(axes: Axes, name: str, row: int, state: str, step: int, length: int) -> None:
    _, color, height = STATES[state]
    bar = Rectangle((step, row - height / 2), length, height, facecolor=color, edgecolor=INK, linewidth=0.4)
    bar.set_gid(f"{name}:{state}:{step}:{length}")
    axes.add_patch(bar)


@house_style
def running_over_steps(lines: Mapping[str, Sequence[int]], rows: int) -> Figure:
    """Requests that run in each step, a panel for each policy; grey is what of `rows` stands idle."""
    figure = Figure(figsize=(8.2, 0.5 + 1.15 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(map(len, lines.values()))
    for axes, (name, running) in zip(panels, lines.items(), strict=True):
        axes.stairs([rows] * len(running), fill=True, color=PALE, gid=f"rows:{name}")
        axes.stairs(running, fill=True, color=BLUE, gid=f"running:{name}")
        axes.set_ylim(0, rows * 1.02)
        axes.set_yticks([0, rows])
        axes.set_ylabel("running")
        axes.set_title(f"{name}: {len(running)} steps")
    panels[-1].set_xlim(0, longest)
    panels[-1].set_xlabel("step")
    return figure


@house_style
def pool_in_step(view: StepView, before: StepView | None, *, num_blocks: int, columns: int = 4) -> Figure:
    """One step: left who waits, in the middle who runs with its block table, right the pool.

    Requests have names of one letter. Blocks taken in this step, that is, not held by the same request in
    `before`, are blue.
    """
    figure = Figure(figsize=(8.2, 0.6 + 0.36 * max(-(-num_blocks // columns), 5)), layout="constrained")
    axes = figure.subplots()
    rows = max(-(-num_blocks // columns), 5)
    inside = _inside(view)
    last = _inside(before) if before else {}
    outside = {n: m for n, m in view.requests.items() if n not in inside}
    for x, words in ((0, "waiting, first in line on top"), (3.6, "running"), (10.4, "the pool")):
        label(axes, x, -0.55, words, color=GREY, va="center")
    for row, (name, moment) in enumerate(outside.items()):
        parked = "" if moment.state == "waiting" else f", {moment.state}"
        label(axes, 0, row + 0.4, f"{name}{parked}", va="center", gid=f"waits:{name}")
    for row, (name, moment) in enumerate(inside.items()):
        label(axes, 3.6, row + 0.4, _running(name, moment), va="center", gid=f"runs:{name}")
    owner = {block: name for name, moment in inside.items() for block in moment.blocks}
    for block in range(num_blocks):
        holder = owner.get(block)
        old = holder in last and block in last[holder].blocks
        color = "white" if holder is None else PALE if old else BLUE
        x, y = 10.4 + block % columns * 0.9, block // columns
        cell = Rectangle((x, y), 0.9, 0.8, facecolor=color, edgecolor=INK, linewidth=0.8)
        cell.set_gid(f"block:{block}:{holder or 'free'}")
        axes.add_patch(cell)
        shade = "white" if color == BLUE else INK
        label(axes, x + 0.45, y + 0.4, holder or "", ha="center", va="center", color=shade)
    axes.set_xlim(0, 10.4 + columns * 0.9 + 0.1)
    axes.set_ylim(rows, -0.9)
    axes.axis("off")
    return figure


def _inside(view: StepView) -> dict[str, Moment]:
    """The requests that hold blocks of the pool; a swapped one holds the host's."""
    return {n: m for n, m in view.requests.items() if m.state in ("prefill", "decode")}


def _running(name: str, moment: Moment) -> str:
    does = {"prefill": f"prefill of {moment.tokens}", "decode": "decode"}[moment.state]
    return f"{name}  {does}, blocks {list(moment.blocks)}"


@house_style
def preemption_costs(recompute: Mapping[int, float], swap: Mapping[int, float]) -> Figure:
    """Milliseconds of both ways to preempt against the tokens that a request holds.

    Args:
        recompute, swap: tokens held -> milliseconds measured.
    """
    figure = Figure(figsize=(5.2, 2.8), layout="constrained")
    axes = figure.subplots()
    for name, points, color in (("recompute", recompute, INK), ("swap", swap, BLUE)):
        sizes = sorted(points)
        axes.plot(
            sizes, [points[n] for n in sizes], "o-", color=color, markersize=3.5, gid=f"measured:{name}"
        )
        label(axes, sizes[-1], points[sizes[-1]], name, color=color, offset=(0, 7), ha="right")
    axes.set_yscale("log")
    axes.set_xlabel("tokens held")
    axes.set_ylabel("ms")
    return figure
