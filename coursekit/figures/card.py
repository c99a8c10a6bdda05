"""What fills the memory of a card."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coursekit.figures.style import BLUE, GREY, INK, PALE, house_style, label

MOST_DRAWN = 400
"""Conversations drawn one by one; more would be thinner than a line."""


@house_style
def card_filled(card_bytes: float, weight_bytes: float, bytes_each: float, count: int) -> Figure:
    """The memory of a card as one bar: weights, then one box for each conversation, then what is left.

    Args:
        card_bytes, weight_bytes: of the card and of the weights; the weights may be larger than the card.
        bytes_each: KV bytes of one conversation.
        count: conversations that fit.
    """
    figure = Figure(figsize=(8.2, 1.7), layout="constrained")
    axes = figure.subplots()
    _box(axes, 0, card_bytes, "white", "card")
    _box(axes, 0, min(weight_bytes, card_bytes), PALE, "weights")
    drawn = min(count, MOST_DRAWN)
    each = bytes_each * count / drawn if drawn else 0.0
    for index in range(drawn):
        _box(axes, weight_bytes + index * each, each, BLUE, f"conversation:{index}", edge="white")
    fits = weight_bytes <= card_bytes
    said = f"weights, {weight_bytes / 1e9:.0f} GB" + ("" if fits else ": larger than the card")
    label(axes, 0, 1.0, said, offset=(0, 6))
    if fits:
        x = weight_bytes + max(count, 0) * bytes_each / 2
        label(
            axes,
            x,
            0.0,
            f"{count} conversations, {bytes_each / 1e9:.2f} GB each",
            offset=(0, -14),
            ha="center",
            color=BLUE,
        )
    axes.set_xlim(-0.002 * card_bytes, 1.002 * card_bytes)
    axes.set_ylim(-0.45, 1.4)
    label(
        axes,
        card_bytes,
        1.0,
        f"card, {card_bytes / 1e9:.0f} GB",
        offset=(0, 6),
        ha="right",
        color=GREY,
    )
    axes.axis("off")
    return figure


def _box(axes: Axes, x: float, width: float, color: str, gid: str, edge: str = INK) -> None:
    axes.add_patch(Rectangle((x, 0), width, 1, facecolor=color, edgecolor=edge, linewidth=0.6, gid=gid))
