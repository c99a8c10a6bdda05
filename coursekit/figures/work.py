"""What is computed in each step, and what is only read."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coursekit.figures.style import BLUE, GREY, PALE, house_style, label


@house_style
def work_per_step(ways: Mapping[str, Sequence[Sequence[int]]], *, shown: int | None = None) -> Figure:
    """One panel for each way to write a text: a row for each step, a column for each token.

    Args:
        ways: name -> for each step the positions whose keys and values were computed in it. The last of them
            is the newest token.
        shown: steps to draw, all by default; the others leave their place empty.
    """
    figure = Figure(figsize=(4.1 * len(ways), 3.4), layout="constrained")
    grid = figure.subplots(1, len(ways), squeeze=False)[0]
    num_steps = max(map(len, ways.values()))
    num_tokens = max(max(step) for steps in ways.values() for step in steps) + 1
    for axes, (name, steps) in zip(grid, ways.items(), strict=True):
        drawn = steps[:shown]
        for row, computed in enumerate(drawn):
            for token in range(max(computed) + 1):
                color, kind = (BLUE, "computed") if token in computed else (PALE, "kept")
                box = Rectangle(
                    (token + 0.06, row + 0.06),
                    0.88,
                    0.88,
                    facecolor=color,
                    gid=f"{kind}:{name}:{row}:{token}",
                )
                axes.add_patch(box)
        total = sum(map(len, drawn))
        axes.set_title(f"{name}: {total} computed")
        axes.set_xlim(0, num_tokens)
        axes.set_ylim(num_steps, 0)
        axes.set_aspect("equal")
        axes.set_xlabel("token")
        axes.set_ylabel("step")
        axes.set_xticks([0.5, num_tokens - 0.5], ["0", str(num_tokens - 1)])
        axes.set_yticks([0.5, num_steps - 0.5], ["0", str(num_steps - 1)])
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
    label(grid[-1], num_tokens, 0.5, "blue: computed", ha="right", va="center", color=BLUE)
    label(grid[-1], num_tokens, 1.7, "grey: kept, only read", ha="right", va="center", color=GREY)
    return figure
