"""The answers in a notebook, whoever wrote it, and their marks."""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coursekit.grading.cell import plain_text
from coursekit.grading.grade import TaskResult, grade_answer
from coursekit.grading.task import Task
from coursekit.grading.tasks import TASKS

CONFLICT = re.compile(rb"^(<<<<<<< |>>>>>>> )", re.MULTILINE)
CHECK = "-check"  # the grade_id of a task's test cell is the task's name and this
LARGEST_FILE = 20 * 2**20  # bytes; an exercise has some 50 thousand
# At the start of a line, as code is at a cell's top. Python's parser runs out of stack on text made for that.
DEFINITION = re.compile(r"^[ \t]*(?:async +def|def|class) +(\w+)|^(\w+) *(?::[^=\n]*)?=(?!=)", re.MULTILINE)


class Unreadable(Exception):
    """A file is not a notebook that can be graded; `str()` says why."""


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook stored at `path` as plain JSON. Unreadable if it is a link, too large or no notebook."""
    try:
        # Never wait for a pipe that somebody put there; never follow a link to somebody else's answers.
        flags = os.O_RDONLY
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # each system has some of them
            flags |= getattr(os, name, 0)
        with open(path, "rb", opener=lambda file, _: os.open(file, flags)) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise Unreadable("is not a file")
            if facts.st_size > LARGEST_FILE:
                raise Unreadable(f"has {facts.st_size} bytes, the limit is {LARGEST_FILE}")
            data = file.read(LARGEST_FILE + 1)
        if CONFLICT.search(data):
            raise Unreadable("holds two versions: git left its marks <<<<<<< and >>>>>>> in it")
        notebook = json.loads(data)
    except OSError as error:
        raise Unreadable("is a link" if path.is_symlink() else f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is not a notebook: {error}") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise Unreadable("is not a notebook: it has no list of cells")
    return notebook


def tasks_of(exercise: str) -> list[Task]:
    """The tasks of an exercise, named by its two digits, in the order of the notebook."""
    return [task for task in TASKS.values() if task.exercise == exercise]


def answer_cells(notebook: Mapping[str, Any], tasks: Sequence[Task]) -> dict[str, int]:
    """The index of each task's answer cell; tasks that have none are left out.

    It is the code cell whose grade_id is the task's name. If that is gone, was turned into text or does not
    name what the task asks for, it is the last code cell that defines what the task asks for.
    """
    cells = notebook["cells"]
    marked: dict[Any, int] = {}  # of several cells with one id the last counts, as nbgrader has it
    for index, cell in enumerate(cells):
        marks = marks_of(cell)
        if any(marks.get(kind) for kind in ("grade", "solution", "locked")):
            marked[marks["grade_id"]] = index
    found = {}
    for task in tasks:
        its_own = [marked[task.name]] if task.name in marked else []
        candidates = [index for index in its_own if code_of(cells[index]) is not None]
        if not any(_names(cells[index], task) for index in candidates):
            candidates += [index for index, cell in enumerate(cells) if _defines(cell, task)]
        if candidates:
            found[task.name] = candidates[-1]
    return found


def marks_of(cell: Any) -> Mapping[str, Any]:
    """nbgrader's metadata of a cell; empty when there is none, or none that makes sense."""
    for key in ("metadata", "nbgrader"):
        cell = cell.get(key) if isinstance(cell, Mapping) else None
    is_named = isinstance(cell, Mapping) and isinstance(cell.get("grade_id"), str)
    return cell if is_named else {}


def code_of(cell: Any) -> str | None:
    """The text of a code cell; None for any other cell."""
    if not isinstance(cell, Mapping) or cell.get("cell_type") != "code":
        return None
    source = cell.get("source")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    return source if isinstance(source, str) else None


def _names(cell: Any, task: Task) -> bool:
    """Whether all names that the task asks for stand in the code of a cell, in whatever statement."""
    code = re.sub(r"#.*", "", code_of(cell) or "")
    return all(re.search(rf"\b{name}\b", code) for name in task.defines)


def _defines(cell: Any, task: Task) -> bool:
    text = plain_text(code_of(cell) or "")
    names = {name for match in DEFINITION.findall(text) for name in match}
    return set(task.defines) <= names


def answers(notebook: Mapping[str, Any], tasks: Sequence[Task]) -> dict[str, str]:
    """The text of each task's answer cell, by the name of the task."""
    found = answer_cells(notebook, tasks)
    return {name: code_of(notebook["cells"][index]) or "" for name, index in found.items()}


def grade_file(path: Path, exercise: str) -> Iterator[TaskResult]:
    """One result a task of the exercise, named by its two digits. Nothing that the file holds raises here."""
    yield from (grade_task(path, exercise, index) for index in range(len(tasks_of(exercise))))


def grade_task(path: Path, exercise: str, index: int) -> TaskResult:
    """The result of one task of the exercise, by its place in it."""
    tasks = tasks_of(exercise)
    try:
        sources = answers(read_notebook(path), tasks)
    except Unreadable as error:
        return TaskResult(tasks[index], [], f"the file {error}")
    return grade_one(tasks[index], sources)


def grade_notebook(notebook: Mapping[str, Any], exercise: str) -> Iterator[TaskResult]:
    """As grade_file, for a notebook that was read already."""
    tasks = tasks_of(exercise)
    sources = answers(notebook, tasks)
    yield from (grade_one(task, sources) for task in tasks)


def grade_one(task: Task, sources: Mapping[str, str]) -> TaskResult:
    """One task's result; a check that stumbles over what an answer returned is not passed."""
    try:
        return grade_answer(task, sources)
    except Exception as error:
        return TaskResult(task, [], f"the check cannot judge this answer: {type(error).__name__}: {error}")
