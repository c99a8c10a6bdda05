"""What a learner calls in a notebook."""

import builtins
from types import SimpleNamespace

import pytest

from coursekit import checks
from coursekit.checks import attempt, check, defined_names, find_source
from tests.exercises.test_04_block_table import ALLOCATOR


@pytest.fixture
def notebook(monkeypatch):
    """A notebook in which the given cells were run."""

    def run(*cells):
        shell = SimpleNamespace(user_ns={"In": ["", *cells]})
        monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
        space = {"__name__": "__main__"}
        for cell in cells:
            exec(cell, space)
        return space

    return run


def test_the_last_cell_that_defines_it_is_graded(notebook, capsys):
    space = notebook("class MyBlockPool:\n    pass", ALLOCATOR.second, "print(MyBlockPool)")
    check.allocator(space["MyBlockPool"])
    assert "allocator: passed" in capsys.readouterr().out


def test_a_cell_counts_that_was_run_without_being_kept_in_the_history(monkeypatch, capsys):
    hooks = {}
    shell = SimpleNamespace(user_ns={"In": [""]}, events=SimpleNamespace(register=hooks.__setitem__))
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(checks, "_seen", [])
    checks.watch_cells()
    hooks["pre_run_cell"](SimpleNamespace(raw_cell=ALLOCATOR.second))
    check.allocator(type("MyBlockPool", (), {}))
    assert "allocator: passed" in capsys.readouterr().out


def test_an_unsolved_one_says_so_and_raises_nothing(notebook, capsys):
    space = notebook(ALLOCATOR.stub())
    check.allocator(space["MyBlockPool"])
    assert capsys.readouterr().out == "allocator: not done yet\n"


def test_under_nbgrader_an_unsolved_one_raises(notebook, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    space = notebook(ALLOCATOR.stub())
    with pytest.raises(AssertionError, match="not done yet"):
        check.allocator(space["MyBlockPool"])


def test_something_else_than_the_answer_is_refused():
    with pytest.raises(TypeError, match=r"check\.allocator\(MyBlockPool\)"):
        check.allocator(int)


def test_an_unknown_check_names_the_known_ones():
    with pytest.raises(AttributeError, match="allocator, block_table"):
        check.nonsense(int)
    assert "block_table" in dir(check)


def test_outside_a_notebook_the_source_file_is_read():
    assert "def find_source" in find_source(["find_source"], [find_source])
    assert find_source(["x"], [3]) == ""


def test_names_are_those_at_the_top():
    assert defined_names("def f():\n    g = 1\nclass C: pass\na = b = 2\n") == ["f", "C", "a", "b"]
    assert defined_names("%%time\nx = (") == []


def test_attempt_hides_only_what_is_not_done(capsys):
    with attempt():
        raise NotImplementedError
    assert capsys.readouterr().out == "not done yet\n"
    with pytest.raises(ValueError, match="real"), attempt():
        raise ValueError("real")
