"""Write the tables of docs/teaching.md from the lessons, the exercises and their graders.

    python -m coursekit.publish.teaching             rewrite the tables between their markers
    python -m coursekit.publish.teaching --check     say whether they are up to date

Run it from the root of the repository. Times are the authors' estimates, which stand in the sources.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from coursekit.grading.tasks import TASKS
from coursekit.publish.exercise_build import solved_notebook
from coursekit.publish.exercise_text import TaskText, task_texts
from coursekit.publish.notebooks import find_sources

DOCUMENT = Path("docs") / "teaching.md"

# What is read and written in each week of a term, and in each part of one day, by number.
TERM = [
    ("The memory problem", ["00", "01"]),
    ("Counting bytes", ["02"]),
    ("Reserving in advance", ["03"]),
    ("Blocks and tables", ["04"]),
    ("Attention through a table", ["05"]),
    ("A first kernel", ["06"]),
    ("A fast kernel", ["07"]),
    ("Prefill and chunks", ["08"]),
    ("Sharing by fork", ["09"]),
    ("Sharing by prefix", ["10"]),
    ("Scheduling", ["11"]),
    ("The engine", ["12"]),
    ("Smaller caches, vLLM today", ["13", "14"]),
    ("Serving", ["15"]),
]
DAY = [
    ("Morning: why memory is the limit", ["00", "02"], ["bytes_per_token"]),
    ("Late morning: blocks", ["04"], ["allocator", "block_table"]),
    ("Afternoon: attention through the table", ["05"], ["paged_attention"]),
    ("Late afternoon: sharing, and the whole", ["12"], ["ref_counts"]),
]


@cache
def lesson_minutes() -> dict[str, int]:
    """Minutes that a lesson says it takes, by number."""
    found = {}
    for source in find_sources(Path("notebooks")):
        said = re.compile(r"^# (?:About|.*This lesson) (\d+) minutes", re.MULTILINE)
        minutes = said.search(source.read_text(encoding="utf-8"))
        if minutes is None:
            raise ValueError(f"{source} does not say how long it takes")
        found[source.name[:2]] = int(minutes[1])
    return found


@cache
def tasks() -> dict[str, TaskText]:
    """What the exercises say of their tasks, by name."""
    notebooks = map(solved_notebook, find_sources(Path("solutions")))
    return {task.name: task for notebook in notebooks for task in task_texts(notebook)}


def of_exercise(number: str) -> list[TaskText]:
    return [task for name, task in tasks().items() if TASKS[name].exercise == number]


def hours(minutes: int) -> str:
    """90 -> "1:30"."""
    return f"{minutes // 60}:{minutes % 60:02d}"


def times() -> Iterator[str]:
    """Every lesson with its tasks, and the sums."""
    yield "| lesson | reading | tasks: lines, difficulty of 5, minutes | writing | points |"
    yield "|---|--:|---|--:|--:|"
    for number, minutes in lesson_minutes().items():
        found = of_exercise(number)
        rows = [f"{t.title} ({t.lines} lines, {t.difficulty}, {t.minutes} min)" for t in found]
        writing, points = sum(task.minutes for task in found), sum(task.points for task in found)
        cells = [number, hours(minutes), " · ".join(rows) or "none"]
        yield f"| {' | '.join([*cells, hours(writing) if found else '–', str(points) if found else '–'])} |"
    reading, writing = sum(lesson_minutes().values()), sum(task.minutes for task in tasks().values())
    points = sum(task.points for task in tasks().values())
    yield f"| **all** | **{hours(reading)}** | {len(tasks())} tasks | **{hours(writing)}** | **{points}** |"


def term() -> Iterator[str]:
    """One row a week, with the hours at home."""
    yield "| week | subject | lesson, exercise | hours |"
    yield "|--:|---|---|--:|"
    for week, (subject, numbers) in enumerate(TERM, start=1):
        minutes = sum(lesson_minutes()[number] for number in numbers)
        minutes += sum(task.minutes for number in numbers for task in of_exercise(number))
        yield f"| {week} | {subject} | {', '.join(numbers)} | {hours(minutes)} |"


def day() -> Iterator[str]:
    """One row a part of the day."""
    yield "| part | lessons | tasks | hours |"
    yield "|---|---|---|--:|"
    total = 0
    for part, numbers, names in DAY:
        minutes = sum(lesson_minutes()[number] for number in numbers) + sum(tasks()[n].minutes for n in names)
        titles = "; ".join(f"{TASKS[name].exercise}: {tasks()[name].title}" for name in names)
        yield f"| {part} | {', '.join(numbers)} | {titles} | {hours(minutes)} |"
        total += minutes
    yield f"| | | | **{hours(total)}** |"


def mistakes() -> Iterator[str]:
    """What each check holds, and what it usually means when it fails."""
    for task in TASKS.values():
        yield f"**{task.exercise} · {task.title}**\n"
        for check in task.checks:
            stop = "" if check.hint[-1] in ".?!" else "."
            yield f"- *{check.title}.* If not: {check.hint}{stop}"
        yield ""


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "times": times,
    "term": term,
    "day": day,
    "mistakes": mistakes,
}


def with_tables(text: str) -> str:
    """The document with every table made anew. ValueError when a marker is missing."""
    for name, rows in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        if not end:
            raise ValueError(f"{DOCUMENT} has no place for the table {name!r}")
        table = "\n".join(rows()).strip()
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    old = DOCUMENT.read_text(encoding="utf-8")
    new = with_tables(old)
    if "--check" in arguments:
        print("the tables are up to date" if old == new else "run python -m coursekit.publish.teaching")
        return int(old != new)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
