"""nbgrader with the marks of `minipaged exercises grade`; nbgrader_config.py puts these two steps in place.

Left to itself nbgrader runs a submission in one kernel, tests included, where the learner's code can change
what a test sees, and takes a test without an error for a passed one. Here no kernel runs: the marks come from
the function that `minipaged exercises grade` calls, and are written under the tests for nbgrader to read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbformat import NotebookNode, v4
from nbgrader.api import Gradebook
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade

from coursekit.grading.gradebook import Item, find_files, grade_exercise
from coursekit.grading.judge import Judge
from coursekit.grading.notebook import CHECK, answer_cells, code_of, marks_of, tasks_of


class RestoreCells(NbGraderPreprocessor):
    """First step of sanitising: give nbgrader a notebook that it can handle, whatever was handed in.

    The cells stay where they are. nbgrader's metadata is set anew: on the answers that we would grade, and on
    one test cell a task, which is added at the end where it is missing. nbgrader itself stops at metadata
    that was edited, and has no mark for a test that was deleted.
    """

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        where = resources["nbgrader"]
        answers = {index: name for name, index in answer_cells(nb, tasks_of(where["assignment"][:2])).items()}
        ids = [marks_of(cell).get("grade_id") for cell in nb.cells]
        nb.cells = [well_formed(cell) for cell in nb.cells]
        for index, name in answers.items():
            nb.cells[index].metadata["nbgrader"] = marks(name, solution=True, locked=False)
        rest = [(name, cell) for name, cell in zip(ids, nb.cells, strict=True) if not cell.metadata]
        tests = {name: cell for name, cell in rest if cell.cell_type == "code"}
        with Gradebook(where["db_url"]) as gradebook:
            ours = gradebook.find_notebook(where["notebook"], where["assignment"])
            sources = {cell.name: cell.source for cell in ours.source_cells}
            for test in ours.grade_cells:
                if test.name not in tests:
                    tests[test.name] = v4.new_code_cell()
                    nb.cells.append(tests[test.name])
                tests[test.name].source = sources[test.name]
                its_marks = marks(test.name, grade=True, locked=True, points=test.max_score)
                tests[test.name].metadata["nbgrader"] = its_marks
        return nb, resources


def well_formed(cell: Any) -> NotebookNode:
    """A cell with the same text and without marks, of a shape that every tool accepts."""
    code = code_of(cell)
    if code is not None:
        return v4.new_code_cell(code)
    text = cell.get("source") if isinstance(cell, Mapping) else None
    return v4.new_markdown_cell(text if isinstance(text, str) else "")


def marks(grade_id: str, **given: Any) -> NotebookNode:
    """nbgrader's metadata of a cell."""
    plain = {"schema_version": 3, "grade": False, "solution": False, "task": False}
    return NotebookNode(plain | given | {"grade_id": grade_id})


class Grade(NbGraderPreprocessor):
    """Takes the place of nbgrader's Execute: writes what became of each task under its test cell."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        where = resources["nbgrader"]
        course = self.parent.parent.coursedir  # of the exporter's converter
        folder = Path(course.format_path(course.submitted_directory, where["student"], where["assignment"]))
        for cell in nb.cells:
            if is_grade(cell):
                cell.outputs = [failure("no result")]
        submission = find_files(folder.parent, [where["assignment"]])
        with Judge() as judge:
            graded = grade_exercise(submission, where["assignment"], judge.grade_file)
            items = {item.task + CHECK: item for item in graded}
        for cell in nb.cells:
            if is_grade(cell) and cell.metadata.nbgrader.grade_id in items:
                cell.outputs = [output_of(items[cell.metadata.nbgrader.grade_id])]
        return nb, resources


def output_of(item: Item) -> NotebookNode:
    """What nbgrader takes for full points or, an error, for none."""
    if item.verdict == "passed" and item.points == item.max_points:
        return v4.new_output("stream", name="stdout", text=item.text)
    return failure(item.reason, item.text)


def failure(reason: str, text: str = "") -> NotebookNode:
    return v4.new_output("error", ename="Failed", evalue=reason, traceback=[text or reason])
