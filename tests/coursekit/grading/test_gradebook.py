"""Marks of a class, with graders that say what the test wants: the real ones are tested elsewhere."""

import csv
import json

import pytest

from coursekit.grading import gradebook, notebook, report
from coursekit.grading.grade import TaskResult
from coursekit.grading.gradebook import Item, find_submissions, grade_class, handed_in, loose_files
from coursekit.grading.notebook import tasks_of
from coursekit.grading.task import CheckResult

NAMES = ["04_block_table", "06_write_kv"]
ITEMS_OF_04 = [(task.name, task.points) for task in tasks_of("04")]


@pytest.fixture(autouse=True)
def graders(monkeypatch):
    """Graders that pass an answer with the word "right", and stumble over one with the word "trap"."""

    def grade(task, sources):
        source = sources.get(task.name, "")
        if "trap" in source:
            raise ZeroDivisionError("a defect of the check")
        checks = [CheckResult(check.title, passed="right" in source) for check in task.checks]
        return TaskResult(task, checks)

    monkeypatch.setattr(notebook, "grade_answer", grade)


def write(path, **answers):
    cells = [
        {"cell_type": "code", "source": text, "metadata": {"nbgrader": {"grade_id": name, "solution": True}}}
        for name, text in answers.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells}))


def marks_of(folder):
    submissions = find_submissions(folder, NAMES)
    return {
        marks.student: marks
        for marks in grade_class(submissions, handed_in(submissions, NAMES), lambda _: None)
    }


def test_nbgraders_layout_and_a_plain_one_are_both_found(tmp_path):
    write(
        tmp_path / "anna" / "04_block_table" / "04_block_table.ipynb", allocator="right", block_table="right"
    )
    write(tmp_path / "bob" / "04_block_table.ipynb", allocator="right", block_table="wrong")
    found = marks_of(tmp_path)
    assert [(item.task, item.points) for item in found["anna"].items] == ITEMS_OF_04
    assert (found["anna"].points, found["anna"].max_points) == (7, 7)
    assert [(item.task, item.verdict) for item in found["bob"].items] == [
        ("allocator", "passed"), ("block_table", "failed"),
    ]  # fmt: skip


def test_an_item_is_failed_until_a_result_of_its_own_task_passes_it():
    allocator, block_table = tasks_of("04")
    item = Item("anna", "04_block_table", "allocator", 3, "no result")
    assert (item.points, item.verdict) == (0, "failed")
    passed = TaskResult(allocator, [CheckResult(check.title, passed=True) for check in allocator.checks])
    assert (item.marked(passed).points, item.marked(passed).verdict) == (3, "passed")
    half = TaskResult(allocator, passed.checks[:-1])
    assert (item.marked(half).points, item.marked(half).verdict) == (0, "failed")
    with pytest.raises(ValueError, match="a result of block_table for the item allocator"):
        item.marked(TaskResult(block_table, []))


def test_everybody_is_marked_for_what_anybody_handed_in(tmp_path):
    write(tmp_path / "anna" / "04_block_table.ipynb", allocator="right", block_table="right")
    (tmp_path / "bob").mkdir()
    found = marks_of(tmp_path)
    assert [item.exercise for item in found["anna"].items] == ["04_block_table"] * 2
    assert [(item.points, item.verdict) for item in found["bob"].items] == [(0, "not handed in")] * 2


def test_nothing_that_is_handed_in_stops_the_rest(tmp_path):
    write(tmp_path / "a-trap" / "04_block_table.ipynb", allocator="trap", block_table="right")
    (tmp_path / "b-garbage").mkdir()
    (tmp_path / "b-garbage" / "04_block_table.ipynb").write_bytes(b"\x00garbage")
    (tmp_path / "c-folder" / "04_block_table.ipynb").mkdir(parents=True)
    write(tmp_path / "d" / "04_block_table.ipynb", allocator="right", block_table="right")
    found = marks_of(tmp_path)
    assert {student: marks.points for student, marks in found.items()} == {
        "a-trap": 4, "b-garbage": 0, "c-folder": 0, "d": 7,
    }  # fmt: skip
    assert "ZeroDivisionError" in found["a-trap"].items[0].reason
    assert "not a notebook" in found["b-garbage"].items[0].reason
    assert "cannot be read" in found["c-folder"].items[0].reason


def test_links_to_somebody_elses_answers_are_not_followed(tmp_path):
    solved = tmp_path / "outside" / "04_block_table.ipynb"
    write(solved, allocator="right", block_table="right")
    classroom = tmp_path / "class"
    write(classroom / "anna" / "04_block_table.ipynb", allocator="right", block_table="right")
    (classroom / "bob").symlink_to(classroom / "anna")
    (classroom / "carl").mkdir()
    (classroom / "carl" / "04_block_table.ipynb").symlink_to(solved)
    (classroom / "dora").mkdir()
    (classroom / "dora" / "04_block_table").symlink_to(solved.parent)
    (classroom / "emil").symlink_to(tmp_path / "nowhere")
    found = marks_of(classroom)
    assert {student: marks.points for student, marks in found.items()} == {
        "anna": 7, "bob": 0, "carl": 0, "dora": 0, "emil": 0,
    }  # fmt: skip
    reasons = {student: marks.items[0].reason for student, marks in found.items()}
    assert reasons["bob"] == reasons["dora"] == reasons["emil"] == "the folder is a link"
    assert reasons["carl"] == "the file is a link"


def test_what_is_not_graded_is_named(tmp_path):
    write(
        tmp_path / "anna" / "04_block_table" / "04_block_table.ipynb", allocator="right", block_table="right"
    )
    write(tmp_path / "anna" / "04_block_table.ipynb", allocator="wrong", block_table="wrong")
    write(tmp_path / "anna" / "04_block_table (1).ipynb")
    write(tmp_path / "anna" / "notes.ipynb")
    marks = marks_of(tmp_path)["anna"]
    assert marks.points == 7
    assert marks.notes == [
        "04_block_table: graded was 04_block_table/04_block_table.ipynb, "
        "not 04_block_table.ipynb, 04_block_table (1).ipynb",
        "not graded, its name is no exercise's: notes.ipynb",
    ]


@pytest.mark.parametrize(
    "place",
    ["week4/04_block_table.ipynb", "04_BLOCK_TABLE.ipynb", "04_block_table.IPYNB", "04_block_table (1).ipynb",
     "Copy of 04_block_table.ipynb", "exercises/04_block_table/04_block_table.ipynb"],
)  # fmt: skip
def test_an_exercise_at_another_place_or_of_another_name_is_marked_and_named(tmp_path, place):
    write(tmp_path / "anna" / place, allocator="right", block_table="right")
    write(tmp_path / "__MACOSX" / "anna" / "._04_block_table.ipynb")
    write(tmp_path / "anna" / ".ipynb_checkpoints" / "04_block_table-checkpoint.ipynb")
    write(tmp_path / "anna" / "._04_block_table.ipynb")
    found = marks_of(tmp_path)
    assert {student: marks.points for student, marks in found.items()} == {"anna": 7}
    assert found["anna"].notes == [f"04_block_table: graded was {place}"]


def test_a_file_with_two_versions_says_so(tmp_path):
    write(tmp_path / "anna" / "04_block_table.ipynb", allocator="right", block_table="right")
    path = tmp_path / "anna" / "04_block_table.ipynb"
    path.write_text("<<<<<<< HEAD\n" + path.read_text() + "\n=======\n>>>>>>> theirs\n")
    assert "git left its marks" in marks_of(tmp_path)["anna"].items[0].reason


def test_notebooks_in_no_learners_folder_are_named(tmp_path):
    write(tmp_path / "anna" / "04_block_table.ipynb", allocator="right", block_table="right")
    write(tmp_path / "04_block_table.ipynb")
    assert [path.name for path in loose_files(tmp_path)] == ["04_block_table.ipynb"]


@pytest.mark.parametrize("inside", ["", "anna/", "anna/notes.txt"])
def test_a_folder_without_submissions_says_what_one_looks_like(tmp_path, inside):
    classroom = tmp_path / "class"
    (classroom / inside).mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=r"holds no submission; one looks like .*/STUDENT/04_block_table/"
    ):
        find_submissions(classroom, NAMES)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        find_submissions(tmp_path / "gone", NAMES)


STRANGE = [
    "=HYPERLINK(\"http://x\")", "+1", "@x", "-2", "a\x1b[31mred", "a\nb", "ü ñ", "`|*[x](y)", "..", "A", "a",
    "\udcff\udc80", "x" * 200, ".hidden", "a/b"[:1] + " b ", "‮evil",
]  # fmt: skip


def test_names_are_data_in_every_file(tmp_path):
    items = [Item(name, "04_block_table", "allocator", 3, f"{name}: no") for name in STRANGE]
    everybody = [gradebook.Marks(item.student, [item], [f"note of {item.student}"]) for item in items]
    with report.files_in(tmp_path) as add:
        for marks in everybody:
            add(marks)
    rows = list(csv.reader((tmp_path / "grades.csv").open(newline="", encoding="utf-8")))
    assert rows[0] == ["student", "exercise", "task", "points", "max_points", "verdict", "reason"]
    assert len(rows) == 1 + len(STRANGE)
    for name, row in zip(STRANGE, rows[1:], strict=True):
        assert not row[0].startswith(("=", "+", "-", "@")) and row[0].isprintable()
        assert row[0].lstrip("'") == report.printable(name)
        assert row[3:6] == ["0", "3", "failed"]
    files = sorted((tmp_path / "reports").iterdir())
    assert len({file.name.casefold() for file in files}) == len(STRANGE)
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert "\x1b" not in text and "](y)" not in text and "\udcff" not in text
    assert all(line.isprintable() for line in report.table(everybody, NAMES))


def test_no_text_of_a_check_ends_its_code_block():
    text = "failed\n```\n# You passed\n````\x1b[2J"
    block = report.code_block(text)
    assert block.splitlines()[0] == "`````text" and block.splitlines()[-1] == "`````"
    assert "\x1b" not in block and "# You passed" in block


def test_what_was_written_stays_when_a_later_learner_breaks_the_run(tmp_path):
    def interrupted():
        with report.files_in(tmp_path) as add:
            add(gradebook.Marks("anna", [Item("anna", "04_block_table", "allocator", 3, "no")]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "anna,04_block_table,allocator,0,3,failed,no" in (tmp_path / "grades.csv").read_text()
    assert (tmp_path / "reports" / "anna.md").exists()


def test_a_report_shows_points_reasons_and_what_the_checks_said(tmp_path):
    write(tmp_path / "anna" / "04_block_table.ipynb", allocator="right", block_table="wrong")
    text = report.learner_report(marks_of(tmp_path)["anna"])
    assert "**3 of 7 points**" in text
    assert "| 04\\_block\\_table | allocator | 3 of 3 | passed |  |" in text
    assert "block_table: failed, 0 of" in text
