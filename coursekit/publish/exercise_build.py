"""Build the exercises only: each `solutions/src/NN_name.py` becomes two notebooks.

    solutions/NN_name/NN_name.ipynb     as written, executed
    exercises/NN_name/NN_name.ipynb     as handed out: solution regions replaced by a stub, executed

    python -m coursekit.publish.exercise_build 04          build exercise 04
    python -m coursekit.publish.exercise_build --check     which notebooks differ from their source?

Folders and cell metadata follow nbgrader. A source names what differs between cells; the rest is filled in:

    # %% nbgrader={"grade_id": "fork", "solution": true}           an answer: the name of its task
    # %% nbgrader={"grade_id": "fork-check", "grade": true}        its test
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

from coursekit.grading.notebook import CHECK
from coursekit.grading.tasks import TASKS
from coursekit.publish.notebooks import (
    Kind,
    compare_cells,
    find_sources,
    parse,
    run,
    run_and_write,
    with_home_cells,
)

FOLDER = Path("solutions")
RELEASED = "exercises"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")  # nbgrader's for Python


def solved_notebook(source: Path) -> NotebookNode:
    """The notebook with its solutions, not executed.

    Its badge opens the exercise, not the solution: nbgrader hands that cell out as it is.
    """
    notebook = parse(source)
    for cell in notebook.cells:
        if "nbgrader" in cell.metadata:
            cell.metadata["nbgrader"] = complete(cell.metadata["nbgrader"])
    return with_home_cells(notebook, _path(source, RELEASED))


def complete(given: NotebookNode) -> dict[str, object]:
    """nbgrader's cell metadata, with what is the same in every answer or test cell filled in."""
    is_test = bool(given.get("grade"))
    filled: dict[str, object] = {
        "schema_version": 3,
        "solution": False,
        "grade": False,
        "task": False,
        "locked": is_test,
    }
    filled |= given
    if is_test:
        filled["points"] = TASKS[given["grade_id"].removesuffix(CHECK)].points
    return filled


def handed_out_notebook(source: Path) -> NotebookNode:
    """The notebook as a learner gets it, not executed: stubs for solutions, tests that cannot be edited."""
    notebook = parse(source)
    for cell in notebook.cells:
        if "nbgrader" not in cell.metadata:
            cell.source = without_solution(cell.source, allowed=False)
            continue
        is_answer = bool(cell.metadata["nbgrader"].get("solution"))
        cell.source = without_solution(cell.source, allowed=is_answer)
        cell.metadata["nbgrader"] = complete(cell.metadata["nbgrader"])
        cell.metadata["deletable"] = False
        if not is_answer:
            cell.metadata["editable"] = False
    return with_home_cells(notebook, _path(source, RELEASED))


def without_solution(text: str, *, allowed: bool) -> str:
    """A cell's text with each solution region replaced by the stub, at the indentation of its first line.

    ValueError for a region that is not closed, opened twice, or stands where none is `allowed`; and for none
    where it is: nbgrader would replace the whole cell.
    """
    lines: list[str] = []
    regions, inside = 0, False
    for line in text.split("\n"):
        if "BEGIN SOLUTION" in line:
            if inside:
                raise ValueError(f"a solution region inside another: {text!r}")
            regions, inside = regions + 1, True
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + stub for stub in STUB]
        elif "END SOLUTION" in line:
            if not inside:
                raise ValueError(f"a solution region ends that did not begin: {text!r}")
            inside = False
        elif not inside:
            lines.append(line)
    if inside:
        raise ValueError(f"a solution region without an end: {text!r}")
    if bool(regions) != allowed:
        raise ValueError(f"{'no' if allowed else 'a'} solution region in this cell: {text!r}")
    return "\n".join(lines)


def _path(source: Path, folder: str) -> str:
    """Where a notebook is in the repository, as in "exercises/04_block_table/04_block_table.ipynb"."""
    return f"{folder}/{source.stem}/{source.stem}.ipynb"


def targets_of(source: Path) -> tuple[Path, Path]:
    """The solved and the released notebook of solutions/src/NN_name.py."""
    root = source.parent.parent.parent
    return root / _path(source, FOLDER.name), root / _path(source, RELEASED)


def build(source: Path) -> Sequence[Path]:
    """Execute one source, solved and as handed out, and write both notebooks; returns where."""
    notebooks = solved_notebook(source), handed_out_notebook(source)
    return [run_and_write(*pair) for pair in zip(notebooks, targets_of(source), strict=True)]


def difference(source: Path) -> str | None:
    """What sets either stored notebook apart from its source, or None. Nothing is executed."""
    solved, released = targets_of(source)
    found = compare_cells(solved_notebook(source), solved)
    return found or compare_cells(handed_out_notebook(source), released)


def orphans(folder: Path) -> list[Path]:
    """Solved and released notebooks whose source is gone."""
    known = {source.stem for source in find_sources(folder)}
    stored = [path for name in (folder.name, RELEASED) for path in folder.parent.glob(f"{name}/*/*.ipynb")]
    return [path for path in sorted(stored) if path.stem == path.parent.name and path.stem not in known]


EXERCISES = Kind(FOLDER, build, difference, orphans)


if __name__ == "__main__":
    sys.exit(run([EXERCISES], __doc__))
