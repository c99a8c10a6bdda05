"""The learner's copy of the course: what is copied, what an update replaces, and what it keeps."""

import json
import subprocess

import pytest

from coursekit import working_copy
from coursekit.working_copy import bring_up_to_date

LESSON = "notebooks/04_block_tables.ipynb"
EXERCISE = "exercises/04_block_table/04_block_table.ipynb"


def notebook(text, output="", version="3.11"):
    cell = {"cell_type": "code", "source": [text], "outputs": [output], "metadata": {}}
    return json.dumps({"cells": [cell], "metadata": {"language_info": {"version": version}}})


@pytest.fixture
def course(tmp_path):
    """A course of one lesson and one exercise, with a source that belongs to nobody's copy."""
    for name in (LESSON, EXERCISE, "notebooks/src/04_block_tables.py", "docs/glossary.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(notebook("first"))
    (tmp_path / "exercises/04_block_table/04_block_table.backup-1.ipynb").write_text("{}")
    return tmp_path


def test_lessons_and_exercises_are_copied_and_their_links_lead_somewhere(course):
    assert bring_up_to_date(course, update=False).added == [LESSON, EXERCISE]
    work = course / "work"
    copied = sorted(path.relative_to(work).as_posix() for path in work.rglob("*.ipynb"))
    assert copied == [EXERCISE, LESSON]
    assert (work / "notebooks/../docs/glossary.md").read_text() == (course / "docs/glossary.md").read_text()


def test_a_second_call_changes_nothing_and_brings_back_what_was_deleted(course):
    bring_up_to_date(course, update=False)
    (course / "work" / LESSON).write_text(notebook("mine"))
    assert bring_up_to_date(course, update=False) == working_copy.Changes()
    assert (course / "work" / LESSON).read_text() == notebook("mine")
    (course / "work" / LESSON).unlink()
    assert bring_up_to_date(course, update=False).added == [LESSON]


def test_without_an_update_newer_lessons_wait_and_are_named(course):
    bring_up_to_date(course, update=False)
    (course / LESSON).write_text(notebook("second"))
    changes = bring_up_to_date(course, update=False)
    assert changes.waiting == [LESSON]
    assert "make update" in working_copy.told(changes)[0] and LESSON in working_copy.told(changes)[0]
    assert (course / "work" / LESSON).read_text() == notebook("first")


@pytest.mark.parametrize(
    "mine", [notebook("first"), notebook("first", "printed", "3.12"), notebook("second")]
)
def test_an_update_replaces_a_lesson_that_was_only_run(course, mine):
    bring_up_to_date(course, update=False)
    (course / LESSON).write_text(notebook("second"))
    (course / "work" / LESSON).write_text(mine)
    changes = bring_up_to_date(course, update=True)
    assert changes.kept == {}
    assert working_copy.fingerprint(course / "work" / LESSON) == working_copy.fingerprint(course / LESSON)
    assert bring_up_to_date(course, update=True) == working_copy.Changes()


@pytest.mark.parametrize("mine", [notebook("mine"), "", "<<<<<<< HEAD", "[]", '{"cells": 3}'])
def test_an_update_keeps_what_was_changed_and_puts_each_new_version_beside_it(course, mine):
    bring_up_to_date(course, update=False)
    (course / "work" / EXERCISE).write_text(mine)
    for version, beside in (("second", "04_block_table.new.ipynb"), ("third", "04_block_table.new-2.ipynb")):
        (course / EXERCISE).write_text(notebook(version))
        changes = bring_up_to_date(course, update=True)
        assert changes.kept == {EXERCISE: f"exercises/04_block_table/{beside}"}
        assert beside in "".join(working_copy.told(changes))
        assert (course / "work" / EXERCISE).read_text() == mine
        assert (course / "work/exercises/04_block_table" / beside).read_text() == notebook(version)
        assert bring_up_to_date(course, update=True) == working_copy.Changes()


def test_a_copy_whose_record_is_lost_counts_as_changed(course):
    bring_up_to_date(course, update=False)
    (course / "work" / working_copy.RECORD).unlink()
    (course / LESSON).write_text(notebook("second"))
    assert list(bring_up_to_date(course, update=True).kept) == [LESSON]


def git(folder, *arguments):
    settings = ["-c", "user.name=x", "-c", "user.email=x@y.z", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *settings, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_learner_runs_a_lesson_and_gets_the_next_version_with_one_command(course, tmp_path_factory, capsys):
    """With git: the copy is no change of the course, and what is pulled arrives in it."""
    (course / ".gitignore").write_text("/work\n*.backup-*\n")
    git(course, "init", "--quiet")
    git(course, "add", ".")
    git(course, "commit", "--quiet", "-m", "first")
    learner = tmp_path_factory.mktemp("learner") / "course"
    git(course, "clone", "--quiet", str(course), str(learner))
    assert working_copy.main([], learner) == 0
    assert "your copy of the course is work/" in capsys.readouterr().out
    (learner / "work" / LESSON).write_text(notebook("first", "printed by the learner"))
    (learner / "work" / EXERCISE).write_text(notebook("the learner's answer"))
    assert git(learner, "status", "--porcelain") == ""
    for name in (LESSON, EXERCISE):
        (course / name).write_text(notebook("second"))
    git(course, "commit", "--quiet", "-a", "-m", "second")
    assert working_copy.main(["--update"], learner) == 0
    said = capsys.readouterr().out
    assert f"newer version: {LESSON}" in said and f"kept, since you changed it: {EXERCISE}" in said
    assert (learner / "work" / EXERCISE).read_text() == notebook("the learner's answer")
    (learner / EXERCISE).write_text("changed in the course's own folder")
    (course / EXERCISE).write_text(notebook("third"))
    git(course, "commit", "--quiet", "-a", "-m", "third")
    assert working_copy.main(["--update"], learner) == 1
    assert "git pull did not go through" in capsys.readouterr().err


def test_without_a_repository_to_pull_from_an_update_takes_what_lies_here(course, capsys):
    bring_up_to_date(course, update=False)
    (course / LESSON).write_text(notebook("second"))
    assert working_copy.main(["--update"], course) == 0
    said = capsys.readouterr()
    assert "unpack the newest handout" in said.err and f"newer version: {LESSON}" in said.out


def test_outside_the_repository_one_sentence_says_so(tmp_path, capsys):
    assert working_copy.main([], tmp_path) == 1
    assert "run this in the repository's folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
