"""What holds for every exercise, read from its source and from its two stored notebooks."""

import json
import os
import re
import subprocess

import nbformat
import pytest
from checkout import ROOT

from coursekit.grading.notebook import CHECK
from coursekit.grading.tasks import TASKS
from coursekit.publish import exercise_build, home, notebooks
from coursekit.publish.exercise_text import task_texts

SOURCES = notebooks.find_sources(ROOT / exercise_build.FOLDER)
MOST_LINES = 25  # of a cell that is no answer
MOST_COLUMNS = 100
exercises = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
both = pytest.mark.parametrize("which", ["solved", "released"])


def stored(source, which):
    """A stored notebook. Skips an exercise that a learner has worked in; in CI nobody has."""
    solved, released = exercise_build.targets_of(source)
    if which == "released" and not os.environ.get("CI"):
        state = subprocess.run(["git", "status", "--porcelain", released], cwd=ROOT, capture_output=True)
        if state.stdout or exercise_build.difference(source):
            pytest.skip(f"exercises/{source.stem} is not as handed out: somebody works in it")
    return nbformat.read(solved if which == "solved" else released, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(source):
    return list(task_texts(exercise_build.solved_notebook(source)))


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def test_every_task_has_its_place_in_one_exercise():
    placed = [(task.name, source.name[:2]) for source in SOURCES for task in texts(source)]
    assert placed == [(task.name, task.exercise) for task in TASKS.values()]


@exercises
@both
def test_notebooks_agree_with_their_source(source, which):
    stored(source, which)
    assert exercise_build.difference(source) is None


def test_no_notebook_is_without_a_source():
    assert exercise_build.orphans(ROOT / exercise_build.FOLDER) == []


@exercises
@both
def test_every_code_cell_was_executed_in_order(source, which):
    cells = code_cells(stored(source, which))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@exercises
@both
def test_no_cell_shows_a_traceback_or_a_warning(source, which):
    outputs = [output for cell in code_cells(stored(source, which)) for output in cell.outputs]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    assert not any("Traceback" in output.get("text", "") for output in outputs)


@exercises
@both
def test_nothing_of_the_machine_is_stored(source, which):
    notebook = stored(source, which)
    text = nbformat.writes(notebook)
    assert not re.search(r"/(home|root|tmp|work|Users)/\w|0x[0-9a-f]{8}|seconds? ago", text)
    assert "version" not in notebook.metadata.language_info and "widgets" not in notebook.metadata


@exercises
def test_what_is_handed_out_says_not_done_yet_for_each_task(source):
    cells = {
        cell.metadata.get("nbgrader", {}).get("grade_id"): cell for cell in stored(source, "released").cells
    }
    for task in texts(source):
        assert printed(cells[task.name + CHECK]).startswith(f"{task.name}: not done yet\n")


@exercises
def test_the_solution_passes_every_task(source):
    cells = {
        cell.metadata.get("nbgrader", {}).get("grade_id"): cell for cell in stored(source, "solved").cells
    }
    for task in texts(source):
        assert printed(cells[task.name + CHECK]).startswith(f"{task.name}: passed")


@exercises
def test_no_line_of_a_solution_is_handed_out(source):
    """Neither in a cell nor in an output; short lines such as `return False` may occur by chance."""
    regions = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", source.read_text(), re.DOTALL)
    assert regions
    lines = {line.strip() for region in regions for line in region.splitlines()}
    released = nbformat.writes(exercise_build.handed_out_notebook(source))
    everything = released + nbformat.writes(stored(source, "released"))
    assert "BEGIN SOLUTION" not in everything
    assert [
        line for line in lines if len(line) > 30 and json.dumps(line, ensure_ascii=False)[1:-1] in everything
    ] == []


@exercises
def test_a_task_has_a_contract_an_example_and_three_hints(source):
    for number, task in enumerate(texts(source), start=1):
        assert task.number == number, task.title
        assert len(task.part("Contract").split()) >= 15, task.name
        assert len(re.findall(r"\d+", task.part("Example"))) >= 4, f"{task.name}: an example has numbers"
        hints = task.hints()
        assert len(hints) == 3 and all(len(hint.split()) >= 6 for hint in hints), task.name


@exercises
def test_a_task_is_worth_what_its_text_says(source):
    for task in texts(source):
        assert task.points == TASKS[task.name].points, task.name
        assert task.title == TASKS[task.name].title, task.name
        assert 5 <= task.minutes <= 120 and 1 <= task.lines <= 100


@exercises
def test_lines_to_write_are_about_those_of_the_solution(source):
    cells = {
        cell.metadata.get("nbgrader", {}).get("grade_id"): cell.source
        for cell in exercise_build.solved_notebook(source).cells
    }
    for task in texts(source):
        regions = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", cells[task.name], re.DOTALL)
        written = sum(bool(line.strip()) for region in regions for line in region.splitlines())
        assert written / 2 <= task.lines <= written * 2, (
            f"{task.name}: {written} lines, the text says {task.lines}"
        )


@exercises
def test_each_answer_has_one_test_that_checks_what_it_defines(source):
    marked = [cell for cell in exercise_build.solved_notebook(source).cells if "nbgrader" in cell.metadata]
    names = [cell.metadata.nbgrader["grade_id"] for cell in marked]
    tasks = [task for task in TASKS.values() if task.exercise == source.name[:2]]
    assert names == [name for task in tasks for name in (task.name, task.name + CHECK)]
    for task, test in zip(tasks, marked[1::2], strict=True):
        assert test.source == f"check.{task.name}({', '.join(task.defines)})"


@exercises
def test_the_first_cells_name_the_exercise_and_its_lesson(source):
    notebook = exercise_build.handed_out_notebook(source)
    first = notebook.cells[0].source
    number, place = source.name[:2], f"exercises/{source.stem}/{source.stem}.ipynb"
    assert first.startswith(f"# {number} · Exercise: ")
    assert re.search(rf"\]\(\.\./\.\./notebooks/{number}_\w+\.ipynb\)", first)
    assert first == home.with_badge(first, place, home.declared_repository())
    assert code_cells(notebook)[0].source == home.FIRST_CELL.read_text().rstrip()


@exercises
def test_code_cells_fit_a_screen(source):
    for cell in code_cells(exercise_build.solved_notebook(source)):
        lines = cell.source.splitlines()
        assert max(map(len, lines)) <= MOST_COLUMNS, cell.source
        is_answer = cell.metadata.get("nbgrader", {}).get("solution")
        assert is_answer or len(lines) <= MOST_LINES, cell.source
