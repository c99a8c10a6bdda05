"""Two notebooks from one source: solved, and as handed out, which is what nbgrader would hand out."""

import nbformat
import pytest

from coursekit.grading.tasks import TASKS
from coursekit.publish import build, exercise_build

SOURCE = '''# %% [markdown]
# # 04 · Exercise: counting

# %%
START = 1

# %% nbgrader={"grade_id": "allocator", "solution": true}
class Counter:
    """Counts."""

    def next(self):
        ### BEGIN SOLUTION
        self.value = START + 1
        return self.value
        ### END SOLUTION

    def twice(self, n):
        if n:
            ### BEGIN SOLUTION
            return 2 * n
            ### END SOLUTION
        return 0

# %%
try:
    print(Counter().next())
except NotImplementedError:
    print("not done yet")

# %% nbgrader={"grade_id": "allocator-check", "grade": true}
print("checked")
'''
STUB = '''class Counter:
    """Counts."""

    def next(self):
        # YOUR CODE HERE
        raise NotImplementedError()

    def twice(self, n):
        if n:
            # YOUR CODE HERE
            raise NotImplementedError()
        return 0'''


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "solutions" / "src" / "04_counter.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return path


def store(source):
    """Both notebooks as a build would write them, without the seconds that two kernels take."""
    notebooks = exercise_build.solved_notebook(source), exercise_build.handed_out_notebook(source)
    for notebook, target in zip(notebooks, exercise_build.targets_of(source), strict=True):
        target.parent.mkdir(parents=True)
        nbformat.write(notebook, target)


def answers_and_tests(notebook):
    return [cell for cell in notebook.cells if "nbgrader" in cell.metadata]


def test_a_build_executes_both_and_gives_the_same_bytes_again(source):
    """Slow because two kernels start, twice."""
    targets = exercise_build.build(source)
    first = [target.read_bytes() for target in targets]
    root = source.parent.parent.parent
    assert [str(target.relative_to(root)) for target in targets] == [
        "solutions/04_counter/04_counter.ipynb",
        "exercises/04_counter/04_counter.ipynb",
    ]
    assert [target.read_bytes() for target in exercise_build.build(source)] == first
    solved, released = (nbformat.reads(data.decode(), as_version=4) for data in first)
    assert solved.cells[-2].outputs[0].text == "2\n"
    assert released.cells[-2].outputs[0].text == "not done yet\n"
    assert exercise_build.difference(source) is None


@pytest.mark.extra
def test_nbgrader_would_hand_out_the_same_cells(source):
    nbgrader = pytest.importorskip("nbgrader.preprocessors", reason="nbgrader is not installed: make teach")
    wanted = exercise_build.solved_notebook(source)
    for step in (nbgrader.LockCells(), nbgrader.ClearSolutions(), nbgrader.CheckCellMetadata()):
        wanted, _ = step.preprocess(wanted, {})
    released = exercise_build.handed_out_notebook(source)
    assert released.cells == wanted.cells
    assert answers_and_tests(released)[0].source == STUB


def test_metadata_is_filled_in_and_points_come_from_the_task(source):
    answer, test = answers_and_tests(exercise_build.solved_notebook(source))
    common = {"schema_version": 3, "task": False}
    assert answer.metadata.nbgrader == common | {
        "grade_id": "allocator", "solution": True, "grade": False, "locked": False,
    }  # fmt: skip
    assert test.metadata.nbgrader == common | {
        "grade_id": "allocator-check", "solution": False, "grade": True, "locked": True,
        "points": TASKS["allocator"].points,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "allowed", "complaint"),
    [
        ("### BEGIN SOLUTION\n1", True, "without an end"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", True, "inside another"),
        ("1\n### END SOLUTION", True, "did not begin"),
        ("x = 1", True, "no solution region"),
        ("### BEGIN SOLUTION\n1\n### END SOLUTION", False, "a solution region in this cell"),
    ],
)
def test_a_solution_that_would_be_handed_out_or_lost_is_refused(text, allowed, complaint):
    with pytest.raises(ValueError, match=complaint):
        exercise_build.without_solution(text, allowed=allowed)


def test_agreeing_files_pass_the_check(source, capsys):
    store(source)
    assert build.main(["04", "--check"]) == 0
    assert "1 sources agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("START = 1", "START = 2", "solutions/04_counter/04_counter.ipynb, cell 2: its source"),
        ("return self.value", "return 2", "solutions/04_counter/04_counter.ipynb, cell 3: its source"),
        ('"grade": true', '"grade": true, "tags": [1]', "04_counter.ipynb, cell 5: its metadata"),
    ],
)
def test_an_edited_source_fails_the_check(source, capsys, old, new, complaint):
    store(source)
    source.write_text(SOURCE.replace(old, new))
    assert build.main(["--check"]) == 1
    assert complaint in capsys.readouterr().out


def test_an_edited_exercise_fails_the_check(source, capsys):
    store(source)
    _, released = exercise_build.targets_of(source)
    released.write_text(released.read_text().replace("# YOUR CODE HERE", "# ### my code", 1))
    assert build.main(["--check"]) == 1
    assert "exercises/04_counter/04_counter.ipynb, cell 3: its source" in capsys.readouterr().out


def test_notebooks_without_a_source_fail_the_check(source, capsys):
    store(source)
    source.rename(source.with_name("05_other.py"))
    assert build.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "05_other.ipynb is missing" in said
    assert "exercises/04_counter/04_counter.ipynb has no source" in said
    assert "solutions/04_counter/04_counter.ipynb has no source" in said


def test_a_number_that_neither_a_lesson_nor_an_exercise_has_is_refused(source, capsys):
    assert build.main(["77", "--check"]) == 2
    assert "no source 77" in capsys.readouterr().err
