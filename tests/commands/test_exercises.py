"""`minipaged exercises status`, `check`, `reset` and `grade`, on a copy of exercise 04."""

import json
import re
import shutil

import pytest
from checkout import ROOT

from coursekit.publish.notebooks import run_and_write
from coursekit.working_copy import bring_up_to_date
from minipaged import cli

NAME = "04_block_table"
SOURCE = f"solutions/src/{NAME}.py"
EXERCISE, SOLUTION = (f"{folder}/{NAME}/{NAME}.ipynb" for folder in ("exercises", "solutions"))


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with one exercise, as handed out, in the current folder."""
    from coursekit.publish.exercise_build import handed_out_notebook

    monkeypatch.chdir(tmp_path)
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    shutil.copy(ROOT / SOURCE, SOURCE)
    write(handed_out_notebook(tmp_path / SOURCE), tmp_path / EXERCISE)
    return tmp_path


def write(notebook, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook))


def solve(path, *, break_slots=False):
    """Put the solved notebook where a learner's is; with a mistake in its second task if wanted."""
    text = (ROOT / SOLUTION).read_text()
    assert "+ p % self.block_size" in text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("+ p % self.block_size", "+ p") if break_slots else text)


def test_status_of_an_untouched_exercise_says_what_is_first(course, capsys):
    assert cli.main(["exercises", "status"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("░" * 40 + "  0 of 2 tasks passed")
    assert "· 04 allocator             not done yet" in said
    assert f"Next: A block allocator, in {EXERCISE}" in said


def test_status_counts_what_passes_and_names_what_fails(course, capsys):
    solve(course / EXERCISE, break_slots=True)
    assert cli.main(["exercises", "status"]) == 0
    said = capsys.readouterr().out
    assert "█" * 20 + "░" * 20 + "  1 of 2 tasks passed" in said
    assert "✓ 04 allocator             passed" in said
    assert "✗ 04 block_table           failed: " in said
    assert "Next: A block table and its slots" in said
    solve(course / EXERCISE)
    cli.main(["exercises", "status"])
    assert "2 of 2 tasks passed" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["04", "4", NAME])
def test_check_prints_each_task_and_its_exit_code_is_the_verdict(course, capsys, number):
    assert cli.main(["exercises", "check", number]) == 1
    said = capsys.readouterr().out
    verdicts = re.findall(r"^\S.*", said, re.MULTILINE)
    assert verdicts == ["allocator: not done yet", "block_table: not done yet"]
    assert "to be written: MyBlockPool.__init__" in said
    solve(course / EXERCISE)
    assert cli.main(["exercises", "check", number]) == 0
    assert "allocator: passed" in capsys.readouterr().out


def test_check_shows_what_was_expected(course, capsys):
    solve(course / EXERCISE, break_slots=True)
    assert cli.main(["exercises", "check", "04"]) == 1
    said = capsys.readouterr().out
    assert "block_table: failed" in said and "expected" in said and "hint" in said


@pytest.mark.slow
def test_reset_gives_back_the_exercise_and_keeps_every_version_of_the_learner(course, capsys):
    """Slow because a kernel runs the exercise as handed out, twice."""
    for version in (1, 2):
        solve(course / EXERCISE, break_slots=version == 2)
        mine = (course / EXERCISE).read_bytes()
        assert cli.main(["exercises", "reset", "04"]) == 0
        backup = course / f"exercises/{NAME}/{NAME}.backup-{version}.ipynb"
        assert backup.name in capsys.readouterr().out
        assert backup.read_bytes() == mine
        assert (course / EXERCISE).read_bytes() == (ROOT / EXERCISE).read_bytes()


def test_reset_brings_back_a_notebook_that_was_deleted(course, capsys):
    """Slow because a kernel runs the exercise as handed out."""
    (course / EXERCISE).unlink()
    assert cli.main(["exercises", "check", "04"]) == 1
    assert "No such file" in capsys.readouterr().out
    assert cli.main(["exercises", "reset", "04"]) == 0
    assert capsys.readouterr().out == f"{EXERCISE} has been reset\n"
    assert (course / EXERCISE).read_bytes() == (ROOT / EXERCISE).read_bytes()


@pytest.mark.parametrize("broken", [b"", b"{", b"<<<<<<< HEAD\n{}\n>>>>>>> theirs\n", b"[]"])
def test_reset_mends_a_notebook_that_is_broken_and_keeps_it(course, capfd, monkeypatch, broken):
    monkeypatch.setattr("coursekit.publish.notebooks.execute", lambda notebook, folder: notebook)
    (course / EXERCISE).write_bytes(broken)
    assert cli.main(["exercises", "reset", "04"]) == 0
    assert (course / f"exercises/{NAME}/{NAME}.backup-1.ipynb").read_bytes() == broken
    assert json.loads((course / EXERCISE).read_text())["cells"]
    assert "WARNING" not in capfd.readouterr().err


def test_reset_refuses_when_there_is_nothing_to_reset(course, capsys):
    assert cli.main(["exercises", "reset", "04"]) == 1
    assert "nothing to reset" in capsys.readouterr().err
    assert [path.name for path in (course / EXERCISE).parent.iterdir()] == [f"{NAME}.ipynb"]


def test_a_reset_that_fails_leaves_the_learners_file(course, monkeypatch):
    solve(course / EXERCISE)
    mine = (course / EXERCISE).read_bytes()

    def fail(notebook, target):
        raise RuntimeError("no kernel")

    monkeypatch.setattr("coursekit.publish.notebooks.run_and_write", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        cli.main(["exercises", "reset", "04"])
    assert (course / EXERCISE).read_bytes() == mine
    assert run_and_write is not fail


@pytest.mark.parametrize("place", [".", "work", "work/exercises/.."])
def test_in_a_working_copy_the_learners_answers_count_and_the_courses_file_stays(
    course, capsys, monkeypatch, place
):
    original = (course / EXERCISE).read_bytes()
    bring_up_to_date(course, update=False)
    solve(course / "work" / EXERCISE)
    monkeypatch.chdir(course / place)
    assert cli.main(["exercises", "check", "04"]) == 0
    assert cli.main(["exercises", "reset", "04"]) == 0
    assert "04_block_table.backup-1.ipynb" in capsys.readouterr().out
    assert (course / "work" / EXERCISE).read_bytes() == original == (course / EXERCISE).read_bytes()
    solved = course / "work" / EXERCISE.replace(".ipynb", ".backup-1.ipynb")
    assert solved.read_bytes() == (ROOT / SOLUTION).read_bytes()
    assert cli.main(["exercises", "reset", "04"]) == 1
    assert "nothing to reset" in capsys.readouterr().err
    assert cli.main(["exercises", "status"]) == 0
    assert "0 of 2 tasks passed" in capsys.readouterr().out


def test_a_reset_in_a_working_copy_needs_no_solutions(course):
    bring_up_to_date(course, update=False)
    shutil.rmtree(course / "solutions")
    solve(course / "work" / EXERCISE)
    assert cli.main(["exercises", "reset", "04"]) == 0
    assert (course / "work" / EXERCISE).read_bytes() == (course / EXERCISE).read_bytes()


def test_grade_writes_a_table_and_reports_and_ends_with_0(course, capsys):
    solve(course / "class/anna/04_block_table/04_block_table.ipynb")
    solve(course / "class/=bob/04_block_table.ipynb", break_slots=True)
    (course / "class/carl").mkdir()
    assert cli.main(["exercises", "grade", "class", "--out", "marks"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["learner", "04", "all"]
    assert [line.split() for line in said[1:4]] == [
        ["=bob", "3/7", "3/7"],
        ["anna", "7/7", "7/7"],
        ["carl", "-", "0/7"],
    ]
    rows = (course / "marks/grades.csv").read_text().splitlines()
    assert "'=bob,04_block_table,allocator,3,3,passed," in rows
    assert len(rows) == 1 + 3 * 2
    assert "**7 of 7 points**" in (course / "marks/reports/anna.md").read_text()
    assert len(list((course / "marks/reports").iterdir())) == 3


def test_grade_as_json_has_every_item(course, capsys):
    solve(course / "class/anna/04_block_table.ipynb")
    assert cli.main(["exercises", "grade", "class", "--json"]) == 0
    (anna,) = json.loads(capsys.readouterr().out)
    assert [(item["task"], item["points"]) for item in anna["items"]] == [
        ("allocator", 3),
        ("block_table", 4),
    ]
    assert (course / "grading/marks/grades.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["grade", "gone"], "gone is not a folder"),
        (["grade", "solutions"], "holds no submission"),
        (["check", "17"], "there is no exercise '17'; there are 04"),
        (["reset", "17"], "there is no exercise '17'"),
    ],
)
def test_what_is_not_there_is_one_sentence(course, capsys, arguments, complaint):
    assert cli.main(["exercises", *arguments]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["status"], ["check", "04"], ["reset", "04"], ["grade", "."]])
def test_outside_the_repository_one_sentence_says_so(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["exercises", *arguments]) == 1
    assert "run this in the repository's folder" in capsys.readouterr().err
