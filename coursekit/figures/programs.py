"""Which multiprocessors have work, and for how long."""

from collections.abc import Mapping, Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coursekit.figures.style import BLUE, GREY, PALE, house_style, label
from coursekit.language import said
from coursekit.multiprocessors import ProgramRun, busy_share, decode_programs, run_programs
from minipaged.attention.targets import TARGETS

LIGHT_BLUE = "#7ea3dc"


@house_style
def programs_over_time(ways: Mapping[str, Sequence[ProgramRun]], num_multiprocessors: int) -> Figure:
    """One panel for each way to cut the work: a row for each multiprocessor, blue where it has a program.

    Programs that follow one another on a multiprocessor alternate in shade.

    Args:
        ways: name -> its programs.
        num_multiprocessors: of the card; those without any program stay grey.
    """
    figure = Figure(figsize=(8.2, 1.0 + 1.35 * len(ways)), layout="constrained")
    grid = figure.subplots(len(ways), 1, squeeze=False, sharex=True)[:, 0]
    end = max((run.stop for runs in ways.values() for run in runs), default=1)
    for axes, (name, runs) in zip(grid, ways.items(), strict=True):
        last = max((run.stop for run in runs), default=0)
        axes.add_patch(Rectangle((0, 0), last, num_multiprocessors, facecolor=PALE, zorder=0))
        shades: dict[int, int] = {}
        boxes, colors = [], []
        for run in runs:
            turn = shades[run.multiprocessor] = shades.get(run.multiprocessor, -1) + 1
            top = run.multiprocessor
            boxes.append([(run.start, top), (run.stop, top), (run.stop, top + 1), (run.start, top + 1)])
            colors.append(LIGHT_BLUE if turn % 2 else BLUE)
        axes.add_collection(PolyCollection(boxes, facecolors=colors, linewidths=0, gid=f"programs:{name}"))
        share = busy_share(runs, num_multiprocessors)
        axes.set_title(f"{name}: {len(runs)} programs, {share:.0%} of the multiprocessors' time used")
        axes.set_xlim(0, 1.02 * end)
        axes.set_ylim(num_multiprocessors, 0)
        axes.set_yticks([0.5, num_multiprocessors - 0.5], ["1", str(num_multiprocessors)])
        axes.set_ylabel("multi-\nprocessor")
        if last < 0.8 * end:
            label(axes, last, num_multiprocessors / 2, "done", offset=(6, 0), va="center", color=GREY)
    grid[-1].set_xlabel("time, in keys that one program reads one after the other")
    return figure


def decode_on_a_card(target: str, sequences: int, context: int, num_kv_heads: int) -> tuple[Figure, str]:
    """`programs_over_time` of a decode step, uncut and in the engine's parts, and a sentence about it.

    Args:
        target: a name of `TARGETS`.
        sequences: of the step, equally long.
        context: keys of each.
        num_kv_heads: of the model.
    """
    from minipaged.attention.kernels.arguments import keys_per_part  # needs Triton, the figures do not

    count = TARGETS[target].num_multiprocessors
    part_len = keys_per_part(sequences, num_kv_heads, context, count)
    ways = {"not cut": context, f"parts of {part_len} keys": part_len}
    runs = {
        name: run_programs(decode_programs([context] * sequences, num_kv_heads, keys), count)
        for name, keys in ways.items()
    }
    before, after = (f"{busy_share(each, count):.0%}" for each in runs.values())
    words = said(
        "{sequences} × {context} keys: uncut, {before} of the time of {count} multiprocessors is used; "
        "cut, {after}",
        sequences=sequences,
        context=context,
        before=before,
        count=count,
        after=after,
    )
    return programs_over_time(runs, count), words
