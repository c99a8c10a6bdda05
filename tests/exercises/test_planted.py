"""How much is planted, and that answers find what the first cell of their exercise imports."""

import ast

import jupytext
import pytest

from coursekit.grading.learner import Learner
from coursekit.grading.tasks import TASKS
from tests.exercises.kill_rate import proofs
from tests.exercises.proof import SOURCES

pytest.importorskip("triton")
AROUND = {"load_answers"}  # what exercise 12 loads with it is given to its answers, under the same names


def test_every_task_has_three_right_answers_and_four_wrong_ones():
    assert {proof.task for proof in proofs()} == set(TASKS)
    assert all(len(proof.right()) >= 3 and len(proof.all_wrong()) >= 4 for proof in proofs())
    assert sum(len(proof.all_wrong()) for proof in proofs()) >= 240
    for proof in proofs():
        names = [wrong.name for wrong in proof.all_wrong()]
        assert len(names) == len(set(names)), proof.task


def test_every_edit_of_a_solution_fits_once():
    for proof in proofs():
        assert all(proof.source_of(wrong) for wrong in proof.all_wrong())


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_what_the_first_cells_import_is_there(task):
    (source,) = SOURCES.glob(f"{task.exercise}_*.py")
    names = set()
    for cell in jupytext.read(source).cells:
        if "nbgrader" in cell.metadata:
            break
        if cell.cell_type == "code":
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    with Learner({"uses them": "\n".join(sorted(names - AROUND))}, preamble=task.preamble):
        pass
