"""What a lesson says from code: sentences with computed numbers, tables, the engine's own source."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from IPython.display import Markdown, display

THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"


def say(text: str) -> None:
    """Print one paragraph of prose, as Markdown: for sentences whose numbers a cell has just computed."""
    display(Markdown(textwrap.dedent(text).strip()))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are numbers and stand to the right."""
    lines = ["| " + " | ".join(header) + " |", "|:--" + "|--:" * (len(header) - 1) + "|"]
    for row in rows:
        cells = (cell if isinstance(cell, str) else number(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    display(Markdown("\n".join(lines)))


def show_source(*objects: Callable[..., Any] | type | property) -> None:
    """Print classes, functions or properties as they stand in the package, with the file they come from."""
    for item in objects:
        code: Any = item.fget if isinstance(item, property) else item
        path = Path(inspect.getsourcefile(code) or "")
        parts = path.parts[len(path.parts) - 1 - path.parts[::-1].index("minipaged") :]
        source = textwrap.dedent(inspect.getsource(code)).rstrip()
        display(Markdown(f"`{'/'.join(parts)}`\n```python\n{source}\n```"))


def compare(guess: float | None, measured: float, unit: str) -> None:
    """Put the guess that the reader committed to beside the measurement.

    `guess` is None where the reader wrote none; the lesson then goes on with the measurement alone.
    """
    said = f"Measured: **{number(measured)} {unit}**."
    if guess is None:
        said += " You had written no guess."
    elif guess == measured:
        said += " Your guess was exactly that."
    elif guess <= 0 or measured <= 0:
        said += f" Your guess was {number(guess)}."
    else:
        factor = max(guess / measured, measured / guess)
        side = "high" if guess > measured else "low"
        said += f" Your guess of {number(guess)} was {factor:.2g} times too {side}."
    say(said)


def number(value: Any) -> str:
    """Digits in groups of three with thin spaces between; two decimals unless the value is whole."""
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return text.replace(",", THIN_SPACE)
