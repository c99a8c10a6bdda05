"""What the programs of a decode kernel share out among themselves, and what one of them reads at a time."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

LANES, TABLE, POOL = 0.0, 3.0, 6.2  # where the three rows of a tile's way begin
GAP = 0.5  # between blocks of the pool, in slots
ENTRY = 3.0  # width of an entry of the block table


@house_style
def program_grid(
    context_lens: Sequence[int], *, num_heads: int, queries_per_kv: int, tile: int, chosen: tuple[int, int]
) -> Figure:
    """One strip per program, as long as the tiles it walks over; rows are sequences, columns query heads.

    Args:
        context_lens: keys of each sequence.
        num_heads: query heads, so programs per sequence.
        queries_per_kv: neighbouring query heads that read the same KV head; set closer together.
        tile: lanes of a tile. The idle lanes of a last tile are pale.
        chosen: (sequence, head) of the program drawn in blue.
    """
    longest = max(-(-length // tile) for length in context_lens) * tile
    space = longest / 8
    lefts = [head * (longest + space) + head // queries_per_kv * 2 * space for head in range(num_heads)]
    figure = Figure(figsize=(8.2, 0.9 + 0.42 * len(context_lens)), layout="constrained")
    axes = figure.subplots()
    for seq, length in enumerate(context_lens):
        label(axes, 0, seq + 0.25, f"{length} keys", offset=(-8, 0), ha="right", va="center")
        for head, left in enumerate(lefts):
            _strip(axes, left, seq, length, tile, BLUE if (seq, head) == chosen else GREY, f"{seq}:{head}")
    for head, left in enumerate(lefts):
        label(axes, left + longest / 2, 0, str(head), offset=(0, 6), ha="center", color=GREY)
    for kv_head, first in enumerate(range(0, num_heads, queries_per_kv)):
        last = min(first + queries_per_kv, num_heads) - 1
        below, left, right = len(context_lens) - 0.1, lefts[first], lefts[last] + longest
        axes.plot([left, right], [below, below], color=INK, linewidth=0.8, gid=f"reads:{kv_head}")
        label(axes, (left + right) / 2, below, f"KV head {kv_head}", offset=(0, -12), ha="center")
    label(axes, 0, 0, "query head", offset=(-8, 6), ha="right", color=GREY)
    axes.set_xlim(-longest, lefts[-1] + longest)
    axes.set_ylim(len(context_lens) + 0.5, -0.6)
    axes.axis("off")
    return figure


def _strip(axes: Axes, left: float, seq: int, length: int, tile: int, color: str, name: str) -> None:
    """The tiles of one program, side by side."""
    for first in range(0, length, tile):
        live = min(tile, length - first)
        gid = f"tile:{name}:{first // tile}"
        axes.add_patch(Rectangle((left + first, seq), tile, 0.5, facecolor=PALE))
        axes.add_patch(Rectangle((left + first, seq), live, 0.5, facecolor=color, gid=gid))
        axes.add_patch(Rectangle((left + first, seq), tile, 0.5, facecolor="none", edgecolor="white"))


@house_style
def tile_through_table(
    table: Sequence[int], *, context_len: int, block_size: int, tile: int, first_key: int, num_blocks: int
) -> Figure:
    """One step of a decode program: lanes of its tile, table entries they look up, slots they read.

    Args:
        table: physical block of each logical block of the sequence.
        context_len: keys of the sequence; lanes at and beyond it are idle.
        block_size: slots of a block.
        tile: lanes of the tile.
        first_key: position of the tile's first lane.
        num_blocks: blocks of the pool, drawn side by side.
    """
    positions = range(first_key, first_key + tile)
    live = [position for position in positions if position < context_len]
    width = num_blocks * (block_size + GAP)
    lanes_left, table_left = (width - tile) / 2, (width - ENTRY * len(table)) / 2
    figure = Figure(figsize=(8.2, 3.3), layout="constrained")
    axes = figure.subplots()
    for lane, position in enumerate(positions):
        used = position < context_len
        _box(axes, lanes_left + lane, LANES, 1, BLUE if used else PALE, str(position), f"lane:{lane}")
    looked_up = sorted({position // block_size for position in live})
    for logical, block in enumerate(table):
        color = BLUE if logical in looked_up else GREY
        _box(axes, table_left + ENTRY * logical, TABLE, ENTRY, color, str(block), f"entry:{logical}")
    _draw_pool(axes, table, context_len, block_size, num_blocks, live)
    for logical in looked_up:
        inside = [position for position in live if position // block_size == logical]
        above = lanes_left + sum(inside) / len(inside) - first_key + 0.5
        middle = table_left + ENTRY * (logical + 0.5)
        offset = sum(position % block_size for position in inside) / len(inside) + 0.5
        below = table[logical] * (block_size + GAP) + offset
        _line(axes, (above, LANES + 1), (middle, TABLE), f"look up:{logical}")
        _line(axes, (middle, TABLE + 1), (below, POOL), f"read:{logical}:{table[logical]}")
    label(axes, lanes_left, LANES + 0.5, "lanes, by position", offset=(-8, 0), ha="right", va="center")
    label(axes, table_left, TABLE + 0.5, "block table", offset=(-8, 0), ha="right", va="center")
    axes.set_xlim(-0.2, width)
    axes.set_ylim(POOL + 2.4, LANES - 0.3)
    axes.axis("off")
    return figure


def _draw_pool(
    axes: Axes, table: Sequence[int], context_len: int, block_size: int, num_blocks: int, live: Sequence[int]
) -> None:
    """All slots: blue what this tile reads, grey what else is of the sequence, pale the rest."""
    owner = {block: logical for logical, block in enumerate(table)}
    for block in range(num_blocks):
        left = block * (block_size + GAP)
        for offset in range(block_size):
            position = owner[block] * block_size + offset if block in owner else context_len
            color = BLUE if position in live else GREY if position < context_len else PALE
            slot = block * block_size + offset
            _box(axes, left + offset, POOL, 1, color, str(slot), f"slot:{slot}")
        label(axes, left + block_size / 2, POOL + 1, str(block), offset=(0, -12), ha="center", color=GREY)
    label(axes, 0, POOL + 1, "slots of the pool, block by block", offset=(0, -28))


def _box(axes: Axes, x: float, y: float, width: float, color: str, text: str, gid: str) -> None:
    box = Rectangle((x, y), width, 1, facecolor=color, edgecolor="white", linewidth=1.0, gid=gid)
    axes.add_patch(box)
    shade = GREY if color == PALE else "white"
    label(axes, x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=7.5, color=shade)


def _line(axes: Axes, start: tuple[float, float], end: tuple[float, float], gid: str) -> None:
    axes.add_patch(ConnectionPatch(start, end, "data", color=INK, linewidth=0.8, gid=gid))
