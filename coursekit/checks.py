"""Checks for the exercises, to be called in the notebook where the answer was written.

    from coursekit.checks import attempt, check
    check.block_table(MyBlockTable)

finds the cell that defines MyBlockTable, runs it in a guarded process of its own (coursekit/grading)
and prints what holds and what does not. Only the answer's own cell and the imports of the exercise are run:
helpers must stand in that cell.
"""

import ast
import builtins
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from coursekit.grading.grade import grade_answer
from coursekit.grading.task import Task
from coursekit.grading.tasks import TASKS


class Checks:
    """One method a task: `check.NAME(what you wrote)`. Tab completion lists them."""

    def __getattr__(self, name: str) -> Any:
        if name not in TASKS:
            raise AttributeError(f"there is no check {name!r}; there are: {', '.join(TASKS)}")
        return partial(run, TASKS[name])

    def __dir__(self) -> list[str]:
        return list(TASKS)


check = Checks()


def run(task: Task, *objects: Any) -> None:
    """Grade the answer and print the result.

    Raises TypeError when `objects` are not the task's, and under nbgrader AssertionError unless it passed.
    """
    names = [getattr(item, "__name__", None) for item in objects]
    if names != list(task.defines):
        raise TypeError(
            f"call check.{task.name}({', '.join(task.defines)}), with what you wrote under that name"
        )
    answers = {task.name: (task.defines, objects)}
    answers |= {name: (TASKS[name].defines, ()) for name in task.needs}
    sources = {name: find_source(*answer) for name, answer in answers.items()}
    result = grade_answer(task, sources)
    print(result.text())
    if os.environ.get("NBGRADER_EXECUTION") and not result.passed:
        raise AssertionError(result.reason)


_seen: list[str] = []  # cells run since this module was imported: a runner may leave them out of In


def watch_cells() -> None:
    """In a notebook, note each cell from here on before it runs."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    if shell is not None:
        shell.events.register("pre_run_cell", lambda info: _seen.append(info.raw_cell))


watch_cells()


def find_source(names: Any, objects: Any = ()) -> str:
    """The last cell that was run and defines all of `names`; outside a notebook, the objects' own source."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    for cell in reversed([*(shell.user_ns.get("In", []) if shell else []), *_seen]):
        if set(names) <= set(defined_names(cell)):
            return str(cell)
    try:
        return "\n\n".join(inspect.getsource(getattr(item, "fn", item)) for item in objects)
    except (OSError, TypeError):
        return ""


def defined_names(source: str) -> list[str]:
    """Functions, classes and variables that a piece of code defines at its top; none if it is no Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return names + [target.id for target in targets if isinstance(target, ast.Name)]


@contextmanager
def attempt() -> Iterator[None]:
    """For cells that use what the learner writes: says so, without a traceback, while it is not written."""
    try:
        yield
    except NotImplementedError:
        print("not done yet")
