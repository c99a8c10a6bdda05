"""nbgrader's own commands on exercise 04: the marks of `minipaged exercises grade`, item by item."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from checkout import ROOT

from coursekit.grading import gradebook, notebook
from coursekit.publish.exercise_build import handed_out_notebook

pytestmark = pytest.mark.extra
Gradebook = pytest.importorskip(
    "nbgrader.api", reason="nbgrader is not installed: make teach", exc_type=ImportError
).Gradebook
from coursekit.grading.nbgrader_plugin import well_formed  # noqa: E402  # it imports nbgrader

NAME = "04_block_table"
ANSWERS = ("allocator", "block_table")


def nbgrader(course, *arguments):
    """Run nbgrader in the course's folder, without any settings of the user's."""
    programs = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",  # nbgrader starts alembic by name
        "JUPYTER_CONFIG_DIR": str(course / "settings"),
        "JUPYTER_DATA_DIR": str(course / "settings"),
    }
    command = [sys.executable, "-m", "nbgrader", *arguments, NAME]
    return subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the course with one exercise and the submissions of a class, taken through nbgrader's steps.

    Slow because nbgrader is started three times and sets up its database.
    """
    course = tmp_path_factory.mktemp("course")
    shutil.copy(ROOT / "nbgrader_config.py", course)
    shutil.copytree(ROOT / "solutions" / NAME, course / "solutions" / NAME)
    for student, change in CLASS.items():
        handed_in = submission(change)
        path = course / "grading" / "submitted" / student / NAME / f"{NAME}.ipynb"
        path.parent.mkdir(parents=True)
        if change is stolen:
            path.symlink_to(course / "solutions" / NAME / f"{NAME}.ipynb")
        else:
            path.write_text(json.dumps(handed_in))
    for step in ("generate_assignment", "autograde", "generate_feedback"):
        done = nbgrader(course, step)
        assert done.returncode == 0, done.stderr
    return course


def submission(change):
    """The solved notebook after `change(its cells by grade_id, the notebook)`."""
    handed_in = json.loads((ROOT / "solutions" / NAME / f"{NAME}.ipynb").read_text())
    cells = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in handed_in["cells"]}
    change(cells, handed_in)
    return handed_in


def right(cells, handed_in):
    """Everything solved."""


def half(cells, handed_in):
    """The allocator right, the table wrong; a test is deleted and another edited."""
    source = "".join(cells["block_table"]["source"])
    assert "+ p % self.block_size" in source
    cells["block_table"]["source"] = source.replace("+ p % self.block_size", "+ p")
    cells["block_table-check"]["source"] = "pass"
    handed_in["cells"].remove(cells["allocator-check"])


def hostile(cells, handed_in):
    """Ends its kernel, gives itself points, turns a test into text and copies an answer and a test."""
    cells["allocator"]["source"] = "import os; os._exit(0)"
    cells["allocator-check"]["metadata"]["nbgrader"] |= {"points": 99, "schema_version": 2}
    cells["block_table-check"] |= {"cell_type": "markdown"}
    del cells["block_table-check"]["outputs"], cells["block_table-check"]["execution_count"]
    handed_in["cells"] += [
        dict(cells["allocator-check"], id="copy-1"),
        dict(cells["block_table"], id="copy-2"),
    ]


def as_text(cells, handed_in):
    """An answer turned into text, and one moved to a cell without a name."""
    cells["allocator"] |= {"cell_type": "markdown"}
    del cells["allocator"]["outputs"], cells["allocator"]["execution_count"]
    cells["block_table"]["metadata"] = {}


def stolen(cells, handed_in):
    """A link to the solution in place of a notebook."""


CLASS = {"anna": right, "bob": half, "eve": hostile, "sly": stolen, "tom": as_text}
WANTED = {"anna": [3, 4], "bob": [3, 0], "eve": [0, 4], "sly": [0, 0], "tom": [0, 4]}


@pytest.mark.slow
def test_marks_agree_with_exercises_grade_item_by_item(course):
    ours = {}
    submissions = gradebook.find_submissions(course / "grading" / "submitted", [NAME])
    for marks in gradebook.grade_class(submissions, [NAME], lambda _: None):
        ours |= {(marks.student, item.task): (item.points, item.max_points) for item in marks.items}
    with Gradebook(f"sqlite:///{course}/grading/gradebook.db") as book:
        theirs = {
            (submission.student.id, grade.cell.name.removesuffix("-check")): (grade.score, grade.max_score)
            for submission in book.assignment_submissions(NAME)
            for found in submission.notebooks
            for grade in found.grades
        }
        assert not any(submission.needs_manual_grade for submission in book.assignment_submissions(NAME))
    assert theirs == ours
    assert {who: [ours[who, task][0] for task in ANSWERS] for who in CLASS} == WANTED


@pytest.mark.slow
def test_feedback_shows_what_the_checks_say(course):
    page = (course / "grading" / "feedback" / "bob" / NAME / f"{NAME}.html").read_text()
    assert "allocator: passed" in page and "block_table: failed" in page
    assert len(list(course.glob(f"grading/feedback/*/{NAME}/*.html"))) == len(CLASS)


@pytest.mark.slow
def test_nbgrader_hands_out_the_cells_that_our_build_hands_out(course):
    theirs = nbformat.read(course / "exercises" / NAME / f"{NAME}.ipynb", as_version=4)
    ours = handed_out_notebook(ROOT / "solutions" / "src" / f"{NAME}.py")
    assert [cell.source for cell in theirs.cells] == [cell.source for cell in ours.cells]
    assert not any(cell.get("outputs") for cell in theirs.cells)


@pytest.mark.parametrize("change", CLASS.values(), ids=CLASS)
def test_what_nbgrader_sees_has_the_answers_that_we_grade(change):
    """RestoreCells sets metadata anew; the cells that count stay the same."""
    handed_in = submission(change)
    tasks = notebook.tasks_of("04")
    before = notebook.answers(handed_in, tasks)
    found = notebook.answer_cells(handed_in, tasks)
    cells = [well_formed(cell) for cell in handed_in["cells"]]
    for name, index in found.items():
        cells[index].metadata["nbgrader"] = {"grade_id": name, "solution": True}
    assert notebook.answers({"cells": cells}, tasks) == before
