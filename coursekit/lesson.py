"""What a lesson says from code: sentences with computed numbers, tables, the engine's own source."""

import importlib.util
import inspect
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from IPython.display import Markdown, display

from coursekit.language import said
from minipaged.dtypes import gpu_has_bfloat16

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
    """Print classes, functions or properties as they stand in the package, under the file they come from."""
    for path, group in groupby(objects, key=_package_path):
        sources = [textwrap.dedent(inspect.getsource(_function(item))).rstrip() for item in group]
        display(Markdown(f"`{path}`\n```python\n" + "\n\n".join(sources) + "\n```"))


def _function(item: Callable[..., Any] | type | property) -> Any:
    return item.fget if isinstance(item, property) else item


def _package_path(item: Callable[..., Any] | type | property) -> str:
    """minipaged/memory.py, or coursekit/lesson.py, wherever they are installed."""
    package = _function(item).__module__.partition(".")[0]
    parts = Path(inspect.getsourcefile(_function(item)) or "").parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])


def changed_copy(module: ModuleType, before: str, after: str) -> ModuleType:
    """A module loaded from a copy of the file of `module`, in which `after` stands for `before`.

    The copy is kept, as Triton reads the source of its kernels. ValueError unless `before` occurs once.
    """
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    if (count := text.count(before)) != 1:
        raise ValueError(f"{module.__name__} has {before!r} {count} times, not once")
    name = f"changed_{module.__name__.rpartition('.')[2]}"
    file = Path(tempfile.mkdtemp()) / f"{name}.py"
    file.write_text(text.replace(before, after), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def compare(guess: float | None, answer: float, unit: str, wrong: Mapping[float, str] | None = None) -> None:
    """Put the guess that the reader committed to beside the answer.

    `guess` is None where the reader wrote none; the lesson then goes on with the answer alone.
    `wrong`: guesses that are to be expected, each with the thought that leads there and what it leaves out.
    """
    text = said("It is **{answer} {unit}**.", answer=short(answer), unit=unit)
    if guess is None:
        text += said(" You wrote no guess.")
    elif guess == answer:
        text += said(" Your guess was exactly that.")
    elif expected := [why for value, why in (wrong or {}).items() if abs(guess - value) <= abs(value) / 100]:
        text += said(" Your guess was {guess}: {why}.", guess=short(guess), why=expected[0])
    elif guess <= 0 or answer <= 0:
        text += said(" Your guess was {guess}.", guess=short(guess))
    else:
        factor = f"{max(guess / answer, answer / guess):.2g}"
        side = "high" if guess > answer else "low"
        message = f" Your guess of {{guess}} was {{factor}} times too {side}."
        text += said(message, guess=short(guess), factor=factor)
    say(text)


def number(value: Any) -> str:
    """Digits in groups of three with thin spaces between; two decimals unless the value is whole."""
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return text.replace(",", THIN_SPACE)


def short(value: Any) -> str:
    """As `number`, without the zeros at the end: an answer given to one decimal is printed with one."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def pick_device() -> tuple[torch.device, torch.dtype]:
    """A GPU when there is one, and a 16-bit number format that the device multiplies.

    That is bfloat16 except on GPUs before compute capability 8.0, such as the T4, which only have float16.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu"), torch.bfloat16
    return torch.device("cuda"), torch.bfloat16 if gpu_has_bfloat16() else torch.float16
