"""Marks as files and on the screen. Names and messages come from submissions, so none is written as it is."""

import csv
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coursekit.grading.gradebook import Item, Marks

COLUMNS = ("student", "exercise", "task", "points", "max_points", "verdict", "reason")
# A spreadsheet takes a cell that begins like this for a formula, and runs it.
FORMULA = tuple("=+-@＝＋－＠")
WIDEST_NAME = 30


def printable(text: str, keep: str = "") -> str:
    """Text without control characters and halves of characters: those are spelled out. `keep` may stay."""
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode()
        for character in text
    )


def spreadsheet_cell(text: str) -> str:
    """Text that a spreadsheet shows and does not compute."""
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#+\-.!|~&])", r"\\\1", printable(text))


def code_block(text: str) -> str:
    """Text in a Markdown code block that no backticks in it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text, keep=chr(10))}\n{fence}"


def file_name(student: str) -> str:
    """A plain file name for a learner, different for different learners on every file system."""
    plain = re.sub(r"[^a-z0-9-]+", "_", student)[:40].strip("-") or "_"
    if plain == student:
        return f"{plain}.md"
    digest = hashlib.sha256(student.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{plain}-{digest}.md"


def learner_report(marks: Marks) -> str:
    """What one learner reads: every item with its points, then what the checks said."""
    lines = [f"# {markdown(marks.student)}", "", f"**{marks.points} of {marks.max_points} points**", ""]
    lines += [f"- {markdown(note)}" for note in marks.notes] + ([""] if marks.notes else [])
    lines += ["| exercise | task | points | verdict | why not |", "|---|---|---|---|---|"]
    for item in marks.items:
        cells = [
            item.exercise,
            item.task,
            f"{item.points} of {item.max_points}",
            item.verdict,
            item.reason,
        ]
        lines.append(f"| {' | '.join(map(markdown, cells))} |")
    for item in marks.items:
        if item.text:
            lines += ["", f"## {markdown(f'{item.exercise}: {item.task}')}", "", code_block(item.text)]
    return "\n".join(lines) + "\n"


@contextmanager
def files_in(folder: Path) -> Iterator[Callable[[Marks], None]]:
    """Open `folder`/grades.csv and give a function that adds a learner to it and writes their report.

    What is written stays when a later learner is never reached.
    """
    reports = folder / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    with open(folder / "grades.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)

        def add(marks: Marks) -> None:
            writer.writerows(row_of(item) for item in marks.items)
            file.flush()
            (reports / file_name(marks.student)).write_text(learner_report(marks), encoding="utf-8")

        yield add


def row_of(item: Item) -> list[str | int]:
    """An item as it stands in grades.csv."""
    values = (getattr(item, name) for name in COLUMNS)
    return [value if isinstance(value, int) else spreadsheet_cell(value) for value in values]


def table(everybody: Sequence[Marks], names: Sequence[str]) -> Iterator[str]:
    """One line a learner: points for each exercise, and together."""
    shown = [_shorten(printable(marks.student)) for marks in everybody]
    width = max(len(name) for name in ["learner", *shown])
    yield "  ".join(["learner".ljust(width), *(name[:2].rjust(7) for name in names), "   all"])
    for name, marks in zip(shown, everybody, strict=True):
        sums = []
        for exercise in names:
            items = [item for item in marks.items if item.exercise == exercise]
            handed_in = any(item.verdict != "not handed in" for item in items)
            points, of = sum(item.points for item in items), sum(item.max_points for item in items)
            sums.append(f"{points}/{of}".rjust(7) if handed_in else "-".rjust(7))
        yield "  ".join([name.ljust(width), *sums, f"{marks.points}/{marks.max_points}".rjust(6)])


def _shorten(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else name[: WIDEST_NAME - 1] + "…"
