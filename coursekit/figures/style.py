"""The house style: white ground, thin crisp lines, black and greys with one blue, labels on the marks."""

import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names

P = ParamSpec("P")

INK = "#1a1a1a"
GREY = "#757575"
PALE = "#d4d4d4"
BLUE = "#1f5fbf"

PIXELS_PER_INCH = 200
"""Resolution of stored pictures; they are shown at half of it, so that they are sharp on any screen."""

# For Chinese labels, the first that this machine has: Debian's fonts-noto-cjk, Windows', macOS'. They have a
# bold face; of a font without one matplotlib complains.
CHINESE = ("Noto Sans CJK SC", "Microsoft YaHei", "PingFang SC")

STYLE: dict[Any, Any] = {
    # The first comes with matplotlib, so a figure is the same on every machine; the other has what it lacks.
    "font.family": ["DejaVu Sans", *[name for name in CHINESE if name in get_font_names()][:1]],
    "font.size": 9.5,
    "text.color": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.8,
    "ytick.major.width": 0.8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "butt",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "minipaged",
}


def house_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under the house style, whatever the caller's own settings are."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Write `stem.svg` and `stem.png`. The same figure gives the same bytes: no date, no random ids."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg, png = stem.with_suffix(".svg"), stem.with_suffix(".png")
    with matplotlib.rc_context(STYLE):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    png.write_bytes(png_bytes(figure))
    return [svg, png]


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG without date or program name."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def show(figure: Figure, text: str) -> None:
    """Display a figure in a notebook; `text` says in words what it shows, for those who cannot see it."""
    width = round(figure.get_figwidth() * PIXELS_PER_INCH / 2)
    display(
        {"image/png": png_bytes(figure), "text/plain": f"[figure] {text}"},
        raw=True,
        metadata={"image/png": {"width": width, "alt": text}},
    )


def label(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Words beside a mark, in data coordinates, `offset` points away from it."""
    offset = options.pop("offset", (0, 0))
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", annotation_clip=False, **options)
