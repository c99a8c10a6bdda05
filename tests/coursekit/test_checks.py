"""What a learner calls in a notebook."""

import builtins
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from coursekit import checks
from coursekit.checks import attempt, check, find_source
from tests.exercises.test_04_block_table import ALLOCATOR

RIGHT = ALLOCATOR.second
WRONG = RIGHT.replace("raise ValueError", "return ValueError")


@pytest.fixture
def notebook(monkeypatch, capsys):
    """Runs cells in a shell of IPython and returns what they printed."""
    shell = InteractiveShell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(checks, "_notebooks", [])
    checks.watch_cells()
    shell.push({"check": check, "attempt": attempt})

    def run(*cells):
        for cell in cells:
            shell.run_cell(cell, store_history=True)
        return capsys.readouterr().out

    yield run
    InteractiveShell.clear_instance()


def verdict(out):
    return next(line for line in out.splitlines() if line.startswith("allocator:"))


def indented(text):
    return "\n".join("    " + line for line in text.splitlines())


OTHER_WAYS = {
    "plain": "{}",
    "time": "%%time\n{}",
    "capture": "%%capture\n{}",
    "shell": "!true\n{}",
    "if": "if True:\n    {indented}",
    "try": "try:\n    {indented}\nfinally:\n    pass",
    "annotated": "{}\nOther = MyBlockPool\nMyBlockPool: type = Other",
}


@pytest.mark.parametrize("way", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_the_object_that_is_given_is_judged_and_not_an_older_cell(notebook, way):
    made = {text: way.format(text, indented=indented(text).lstrip()) for text in (RIGHT, WRONG)}
    assert verdict(notebook(RIGHT, made[WRONG], "check.allocator(MyBlockPool)")).startswith(
        "allocator: failed, 4 of 5"
    )
    assert verdict(notebook(WRONG, made[RIGHT], "check.allocator(MyBlockPool)")).startswith(
        "allocator: passed"
    )


def test_the_check_may_stand_in_the_same_cell(notebook):
    assert "failed, 4 of 5" in notebook(RIGHT, WRONG + "\ncheck.allocator(MyBlockPool)")


def test_an_older_object_that_is_given_is_judged_by_its_own_cell(notebook):
    assert "passed" in notebook(RIGHT, "Old = MyBlockPool", WRONG, "check.allocator(Old)")


@pytest.mark.parametrize("way", ["from mine_allocator import MyBlockPool", "%run mine_allocator.py"])
def test_an_answer_from_a_file_is_refused_with_the_reason(notebook, tmp_path, monkeypatch, way):
    (tmp_path / "mine_allocator.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_allocator", raising=False)
    assert "copy it into that cell" in verdict(notebook(RIGHT, way, "check.allocator(MyBlockPool)"))


def test_a_class_that_was_changed_after_its_cell_is_refused(notebook):
    out = notebook(RIGHT, "MyBlockPool.free = lambda self, blocks: None", "check.allocator(MyBlockPool)")
    assert "MyBlockPool.free was changed after" in out


def test_a_cell_that_was_not_seen_is_found_by_its_code(notebook):
    notebook(RIGHT)
    checks._notebooks[0].made.clear()
    assert "allocator: passed" in notebook("check.allocator(MyBlockPool)")


def test_an_unsolved_one_says_so_and_raises_nothing(notebook):
    out = notebook(ALLOCATOR.stub(), "check.allocator(MyBlockPool)")
    assert out == "allocator: not done yet\n  to be written: MyBlockPool.__init__\n"


def test_under_nbgrader_an_unsolved_one_raises(notebook, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    notebook(ALLOCATOR.stub())
    mine = checks._notebooks[0].get("MyBlockPool")
    with pytest.raises(AssertionError, match="not done yet"):
        check.allocator(mine)


def test_something_else_than_the_answer_is_refused():
    with pytest.raises(TypeError, match=r"check\.allocator\(MyBlockPool\)"):
        check.allocator(int)


def test_an_unknown_check_names_the_known_ones():
    with pytest.raises(AttributeError, match="allocator, block_table"):
        check.nonsense(int)
    assert "block_table" in dir(check)


def test_outside_a_notebook_the_source_file_is_read():
    assert "def find_source" in find_source([find_source])
    assert find_source([3]) == ""


def test_attempt_hides_only_what_is_not_done(capsys):
    with attempt():
        raise NotImplementedError
    assert capsys.readouterr().out == "not done yet\n"
    with pytest.raises(ValueError, match="real"), attempt():
        raise ValueError("real")
