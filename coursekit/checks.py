"""Checks for the exercises, to be called in the notebook where the answer was written.

    from coursekit.checks import attempt, check
    check.block_table(MyBlockTable)

takes the cell that made this MyBlockTable, runs it in a guarded process of its own (coursekit/grading)
and prints what holds and what does not. Only the answer's own cell and the imports of the exercise are run:
helpers must stand in that cell.
"""

import builtins
import inspect
import linecache
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coursekit.grading.grade import TaskResult, grade_answer
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
    try:
        sources = {task.name: find_source(objects)}
        for needed in task.needs:
            sources[needed] = find_source([_notebook().get(name) for name in TASKS[needed].defines])
    except Untraceable as error:
        result = TaskResult(task, [], str(error))
    else:
        result = grade_answer(task, sources)
    print(result.text())
    if os.environ.get("NBGRADER_EXECUTION") and not result.passed:
        raise AssertionError(result.reason)


class Untraceable(Exception):
    """The text that made an object is not known, or is no longer what made it; `str()` says why."""


@dataclass
class Made:
    """What a cell made under a name, the text of the cell, and the functions of a class at that moment."""

    item: Any
    cell: str
    functions: dict[str, Any] = field(default_factory=dict)


class Notebook:
    """Which cell made what. A name may be made by any statement, or by IPython: what counts is the object."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.made: dict[str, Made] = {}
        self.running: list[tuple[str, dict[str, Any]]] = []  # cells that run now, what the names were before

    def before(self, info: Any) -> None:
        """IPython is about to run a cell."""
        self.running.append((info.raw_cell, self.answers()))

    def after(self, *_: Any) -> None:
        """A cell is over, whether it raised or not."""
        if self.running:
            cell, earlier = self.running.pop()
            self.note(cell, earlier)

    def note(self, cell: str, earlier: dict[str, Any]) -> None:
        for name, item in self.answers().items():
            known = self.made.get(name)
            if item is not earlier.get(name) and (known is None or known.item is not item):
                self.made[name] = Made(item, cell, functions_of(item))

    def answers(self) -> dict[str, Any]:
        """What the names that tasks ask for stand for now."""
        names = {name for task in TASKS.values() for name in task.defines}
        return {name: self.shell.user_ns[name] for name in names if name in self.shell.user_ns}

    def get(self, name: str) -> Any:
        return self.shell.user_ns.get(name)

    def cell_of(self, item: Any) -> str | None:
        """The text of the cell that made `item`; None when it was not seen."""
        for cell, earlier in self.running:  # the check may stand in the same cell
            self.note(cell, earlier)
        made = next((made for made in self.made.values() if made.item is item), None)
        if made is None:
            return None
        now = functions_of(item)
        changed = [name for name in made.functions | now if made.functions.get(name) is not now.get(name)]
        if changed:
            raise Untraceable(
                f"{item.__name__}.{changed[0]} was changed after the cell with {item.__name__} ran: write it "
                "in that cell, and run the cell again"
            )
        return made.cell


def functions_of(item: Any) -> dict[str, Any]:
    """The functions of a class by name; of anything else none."""
    return (
        {name: value for name, value in vars(item).items() if callable(value)}
        if isinstance(item, type)
        else {}
    )


_notebooks: list[Notebook] = []  # one, from the moment on in which this module is imported in a notebook


def watch_cells() -> None:
    """In a notebook, note from here on which cell makes what."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    if shell is not None:
        _notebooks[:] = [Notebook(shell)]
        shell.events.register("pre_run_cell", _notebooks[0].before)
        shell.events.register("post_run_cell", _notebooks[0].after)


watch_cells()


def _notebook() -> Any:
    return _notebooks[0] if _notebooks else {}


def find_source(objects: Sequence[Any]) -> str:
    """The text of the one cell that made all of `objects`; outside a notebook, their own source.

    Untraceable when that is not known for certain: a check of some other text would judge somebody else.
    """
    texts = []
    for item in objects:
        if item is None:
            return ""
        imported = imported_from(item)
        if imported:
            raise Untraceable(
                f"{item.__name__} comes from {imported}, and only the cell with your answer is checked: "
                "copy it into that cell"
            )
        cell = _notebooks[0].cell_of(item) if _notebooks else None
        texts.append(cell if cell is not None else own_source(item))
    if len(set(texts)) > 1 and _notebooks:
        names = " and ".join(item.__name__ for item in objects)
        raise Untraceable(f"{names} come from different cells: write them in one, and run it")
    return "\n\n".join(dict.fromkeys(texts))


def code_file(item: Any) -> str:
    """The file name of the code of a function, a kernel or a class's first method; "" where there is none."""
    item = inspect.unwrap(getattr(item, "fn", item))
    functions = [item, *functions_of(item).values()]
    codes = [
        getattr(inspect.unwrap(function), "__code__", None) for function in functions if function is not item
    ]
    codes.insert(0, getattr(item, "__code__", None))
    return next((str(code.co_filename) for code in codes if code is not None), "")


def imported_from(item: Any) -> str:
    """The file that an object was imported from into a notebook; "" for one that a cell made."""
    name = code_file(item)
    is_cell = os.path.basename(os.path.dirname(name)).startswith("ipykernel_")
    return name if _notebooks and not is_cell and os.path.isfile(name) else ""


def own_source(item: Any) -> str:
    """The text that Python remembers for an object's code: of a cell all of it, of a module its own part."""
    if _notebooks:
        lines = linecache.getlines(code_file(item))
        if not lines:
            raise Untraceable(f"it is not known which cell made {item.__name__}: run that cell again")
        return "".join(lines)
    try:
        return inspect.getsource(getattr(item, "fn", item))
    except (OSError, TypeError):
        return ""


@contextmanager
def attempt() -> Iterator[None]:
    """For cells that use what the learner writes: says so, without a traceback, while it is not written."""
    try:
        yield
    except NotImplementedError:
        print("not done yet")
