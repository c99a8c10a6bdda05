"""Which keys the queries of a step see, a prompt computed in chunks, and what a server's steps compute."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label


@house_style
def mask_corners(query_len: int, context_len: int, values: Mapping[str, Sequence[float]]) -> Figure:
    """Two causal masks side by side, a square for each query and key, blue where the query sees the key.

    Left the mask whose first query stands at the first key, right the one whose last stands at the last.

    Args:
        query_len: queries of the step.
        context_len: keys of the sequence, at least `query_len`.
        values: "first" and "last", by the corner that the mask is aligned to -> what each query gets, written
            beside its row.
    """
    figure = Figure(figsize=(8.2, 1.5 + 0.4 * query_len), layout="constrained")
    corners = {"first": 0, "last": context_len - query_len}
    titles = {"first": "aligned to the first key: wrong", "last": "aligned to the last key: right"}
    for axes, (corner, offset) in zip(figure.subplots(1, 2), corners.items(), strict=True):
        for query in range(query_len):
            for key in range(context_len):
                color = BLUE if key <= offset + query else PALE
                _square(axes, key, query, color, f"{corner}:{query}:{key}")
            words = f"query {query}"
            label(axes, 0, query + 0.5, words, offset=(-6, 0), ha="right", va="center")
            result = f"gets {values[corner][query]:g}"
            label(axes, context_len, query + 0.5, result, offset=(6, 0), va="center", gid=f"{corner}:{query}")
        for key in range(context_len):
            label(axes, key + 0.5, query_len, str(key), offset=(0, -12), ha="center", color=GREY)
        label(
            axes, context_len / 2, query_len, "position of the key", offset=(0, -27), ha="center", color=GREY
        )
        axes.set_title(titles[corner])
        _frame(axes, context_len + 1.2, query_len)
    return figure


@house_style
def prompt_in_chunks(chunk_lens: Sequence[int], step: int) -> Figure:
    """One chunk of a prompt: rows are queries, columns are keys; blue is what this step computes.

    Scores of earlier chunks are grey, those of later ones pale. Below, whether a key is read from the cache
    or is written in this step.

    Args:
        chunk_lens: tokens of each chunk.
        step: the chunk that is computed, from 0.
    """
    total = sum(chunk_lens)
    start = sum(chunk_lens[:step])
    stop = start + chunk_lens[step]
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for query in range(total):
        for key in range(query + 1):
            color = PALE if query >= stop else BLUE if query >= start else GREY
            _square(axes, key, query, color, f"score:{query}:{key}")
        label(axes, 0, query + 0.5, str(query), offset=(-5, 0), ha="right", va="center", color=GREY)
    for key in range(stop):
        color = BLUE if key >= start else GREY
        _square(axes, key, total + 0.6, color, f"key:{key}")
    legend = [("computed in this step", BLUE), ("computed before", GREY), ("still to come", GREY)]
    for row, (words, color) in enumerate(legend):  # the upper right triangle is empty
        shade = PALE if words == "still to come" else color
        _square(axes, total - 5.2, 0.4 + 1.1 * row, shade, f"legend:{words}")
        label(axes, total - 4, 0.9 + 1.1 * row, words, va="center", color=color)
    if start:
        label(axes, start / 2, total + 1.6, "in the cache", offset=(0, -13), ha="center", color=GREY)
    label(axes, (start + stop) / 2, total + 1.6, "new", offset=(0, -13), ha="center", color=BLUE)
    label(axes, 0, total + 1.1, "keys", offset=(-5, 0), ha="right", va="center")
    label(axes, 0, 0, "position of the query", offset=(-18, 8))
    _frame(axes, total, total + 2.2)
    return figure


@house_style
def tokens_per_step(traces: Mapping[str, Sequence[tuple[int, int]]]) -> Figure:
    """Bars of the tokens that each step computes, prompts in blue on top of decodes in grey.

    Args:
        traces: name of a run, the title of its panel -> (prefill tokens, decode tokens) of each step.
    """
    figure = Figure(figsize=(8.2, 1.0 + 1.7 * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, steps) in zip(panels, traces.items(), strict=True):
        for index, (prefill, decode) in enumerate(steps):
            bar = Rectangle((index - 0.4, 0), 0.8, decode, facecolor=GREY, gid=f"{name}:decode:{index}")
            axes.add_patch(bar)
            bottom = (index - 0.4, decode)
            axes.add_patch(Rectangle(bottom, 0.8, prefill, facecolor=BLUE, gid=f"{name}:prefill:{index}"))
        totals = [sum(step) for step in steps]
        most = max(range(len(steps)), key=totals.__getitem__)
        longest = totals.count(totals[most])
        words = f"{totals[most]} tokens" if longest == 1 else f"{longest} steps of {totals[most]} tokens"
        label(axes, most - 0.4, totals[most], words, offset=(0, 3), color=INK)
        axes.set_title(name)
        axes.set_ylabel("tokens")
    longest = max(len(steps) for steps in traces.values())
    panels[0].set_xlim(-0.8, longest - 0.2)
    panels[0].set_ylim(0, 1.15 * max(sum(step) for steps in traces.values() for step in steps))
    panels[-1].set_xlabel("step (blue: prompts, grey: decodes)")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _square(axes: Axes, x: float, y: float, color: str, gid: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=1.5, gid=gid))


def _frame(axes: Axes, width: float, height: float) -> None:
    axes.set_xlim(-0.1, width + 0.1)
    axes.set_ylim(height + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.axis("off")
