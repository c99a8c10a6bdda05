"""What requests share, what that saves them, and in which order a pool gives cached blocks up."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

WIDTH, HEIGHT = 1.0, 0.66  # of a block in the tree, in columns and rows
COLUMN = 1.35  # from one block to the next
STATES = {"held": BLUE, "cached": PALE, "blank": "white"}
Chain = Sequence[tuple[int, str]]
"""The blocks of a request in order: (physical block, the letters of its hash; "" when it has none)."""


@house_style
def prefix_tree(requests: Mapping[str, Chain]) -> Figure:
    """Requests as the leaves of a tree of blocks; a block that several share is drawn once, in blue.

    Args:
        requests: name -> its chain. Give neighbours in the tree as neighbours here.
    """
    rows: dict[int, list[int]] = {}  # block -> rows of the requests that list it
    for row, chain in enumerate(requests.values()):
        for block, _ in chain:
            rows.setdefault(block, []).append(row)
    center = {block: sum(listed) / len(listed) + 0.5 for block, listed in rows.items()}
    longest = max(map(len, requests.values()))
    figure = Figure(figsize=(8.2, 0.5 + 0.62 * len(requests)), layout="constrained")
    axes = figure.subplots()
    drawn: set[int] = set()
    for row, (name, chain) in enumerate(requests.items()):
        before: int | None = None
        for column, (block, letters) in enumerate(chain):
            if block not in drawn:
                _draw_node(axes, column * COLUMN, center[block], block, letters, len(rows[block]) > 1)
                if before is not None:
                    _draw_link(axes, column * COLUMN, before, block, center)
            drawn.add(block)
            before = block
        end = (len(chain) - 1) * COLUMN + WIDTH
        label(axes, end, row + 0.5, name, offset=(8, 0), va="center")
    axes.set_xlim(-0.1, (longest - 1) * COLUMN + WIDTH + 1.6)
    axes.set_ylim(len(requests) + 0.05, -0.05)
    axes.axis("off")
    return figure


def _draw_node(axes: Axes, x: float, y: float, block: int, letters: str, is_shared: bool) -> None:
    face, ink = (BLUE, "white") if is_shared else ("white", INK)
    edge = BLUE if is_shared else INK
    corner = (x, y - HEIGHT / 2)
    box = Rectangle(corner, WIDTH, HEIGHT, facecolor=face, edgecolor=edge, gid=f"block:{block}")
    axes.add_patch(box)
    middle, words = x + WIDTH / 2, {"ha": "center", "va": "center", "color": ink}
    label(axes, middle, y - 0.13, f"block {block}", fontsize=8.5, **words)
    label(axes, middle, y + 0.15, letters or "no hash", fontsize=7.5, **words)


def _draw_link(axes: Axes, x: float, before: int, block: int, center: Mapping[int, float]) -> None:
    axes.plot(
        [x - COLUMN + WIDTH, x],
        [center[before], center[block]],
        color=INK,
        linewidth=0.9,
        gid=f"behind:{before}:{block}",
    )


@house_style
def tokens_computed(ways: Mapping[str, Sequence[tuple[int, int]]]) -> Figure:
    """One panel for each way, one bar for each request: prompt tokens found, then those computed.

    Args:
        ways: name -> (found, computed) of each request, in order.
    """
    most = max(found + computed for rows in ways.values() for found, computed in rows)
    count = max(map(len, ways.values()))
    figure = Figure(figsize=(8.2, 0.9 + 0.3 * count), layout="constrained")
    grid = figure.subplots(1, len(ways), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (name, rows) in zip(grid, ways.items(), strict=True):
        for row, (found, computed) in enumerate(rows):
            axes.barh(row, found, 0.7, color=PALE, gid=f"found:{name}:{row}")
            axes.barh(row, computed, 0.7, left=found, color=BLUE, gid=f"computed:{name}:{row}")
            if found:
                label(axes, found / 2, row, f"{found} found", ha="center", va="center", color=INK)
            if found + computed > most / 2 and computed > most / 4:
                words = {"ha": "center", "va": "center", "color": "white"}
                label(axes, found + computed / 2, row, f"{computed} computed", **words)
            else:
                label(axes, found + computed, row, str(computed), offset=(4, 0), va="center", color=BLUE)
        axes.set_title(f"{name}: {sum(computed for _, computed in rows)} computed")
        axes.set_xlabel("tokens of the prompt")
        axes.set_yticks(range(len(rows)), [str(row + 1) for row in range(len(rows))])
        axes.tick_params(axis="y", length=0)
    grid[0].set_xlim(0, 1.12 * most)
    grid[0].set_ylim(count - 0.5, -0.5)
    grid[0].set_ylabel("request")
    return figure


@house_style
def first_token_times(before: Sequence[float], after: Sequence[float], names: tuple[str, str]) -> Figure:
    """TTFT of the same requests served in two ways: a grey and a blue dot for each, joined by a line.

    Args:
        before, after: seconds, in the order of the requests.
        names: of the two ways.
    """
    figure = Figure(figsize=(6.4, 0.9 + 0.3 * len(before)), layout="constrained")
    axes = figure.subplots()
    gaps = [abs(slow - fast) for slow, fast in zip(before, after, strict=True)]
    widest = gaps.index(max(gaps))  # where the two names do not get in each other's way
    for row, (slow, fast) in enumerate(zip(before, after, strict=True)):
        axes.plot([1e3 * fast, 1e3 * slow], [row, row], color=PALE, linewidth=1.2, zorder=1)
    for seconds, color, name in ((before, GREY, names[0]), (after, BLUE, names[1])):
        points = [1e3 * value for value in seconds]
        axes.plot(points, range(len(points)), "o", color=color, markersize=5, gid=f"ttft:{name}")
        label(axes, points[widest], widest, name, offset=(0, 7), ha="center", color=color)
    axes.set_xlim(0, 1.2e3 * max(*before, *after))
    axes.set_ylim(len(before) - 0.5, -0.9)
    axes.set_yticks(range(len(before)), [str(row + 1) for row in range(len(before))])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time to first token (ms)")
    axes.set_ylabel("request")
    return figure


@house_style
def eviction_queue(blocks: Sequence[tuple[str, str]], order: Sequence[int]) -> Figure:
    """A pool as a row of blocks, and below it those that are free, in the order in which they are taken.

    Args:
        blocks: for each block of the pool its state ("held", "cached" or "blank") and what it holds.
        order: the free blocks, the one to be taken first at the left.
    """
    figure = Figure(figsize=(8.2, 2.5), layout="constrained")
    axes = figure.subplots()
    for block, (state, contents) in enumerate(blocks):
        _draw_block(axes, block, 0.0, state, contents, f"{state}:{block}")
        label(axes, block + 0.44, 0, str(block), offset=(0, 4), ha="center", color=GREY)
    for place, block in enumerate(order):
        _draw_block(axes, place, 2.1, *blocks[block], f"order:{place}:{block}")
        label(axes, place + 0.44, 2.1, str(block), offset=(0, 4), ha="center", color=GREY)
    label(axes, 0, 0.5, "the pool", offset=(-8, 0), ha="right", va="center")
    label(axes, 0, 2.6, "taken in this order", offset=(-8, 0), ha="right", va="center")
    if not order:
        label(axes, 0, 2.6, "nothing is free", offset=(4, 0), va="center", color=GREY)
    meaning = "blue: held by a request    grey: cached, can be found    white: blank"
    label(axes, 0, 3.1, meaning, offset=(0, -14), color=GREY)
    axes.set_xlim(-1.9, len(blocks))
    axes.set_ylim(3.7, -0.5)
    axes.axis("off")
    return figure


def _draw_block(axes: Axes, x: float, y: float, state: str, contents: str, gid: str) -> None:
    face = STATES[state]
    edge = face if state == "held" else INK
    axes.add_patch(Rectangle((x, y), 0.88, 1.0, facecolor=face, edgecolor=edge, linewidth=0.8, gid=gid))
    ink = "white" if state == "held" else INK
    label(axes, x + 0.44, y + 0.5, contents, ha="center", va="center", color=ink)
