"""Which cell is the answer, in notebooks that people and tools have been at."""

import json
import os

import nbformat
import pytest

from coursekit.grading import notebook as module
from coursekit.grading.notebook import Unreadable, answers, grade_file, read_notebook, tasks_of

TASKS = tasks_of("04")
FIRST, SECOND = "class MyBlockPool:\n    a = 1", "class MyBlockPool:\n    a = 2"
ANSWER = {"grade_id": "allocator", "solution": True, "grade": False, "locked": False}
TEST = {"grade_id": "allocator-check", "solution": False, "grade": True, "locked": True}


def cell(source, marks=None, kind="code"):
    return {"cell_type": kind, "source": source, "metadata": {"nbgrader": marks} if marks is not None else {}}


def allocator_in(*cells):
    """The answer to the task `allocator` in a notebook of these cells, None when there is none."""
    return answers({"cells": list(cells)}, TASKS).get("allocator")


def test_the_answer_is_the_cell_with_the_tasks_name():
    assert allocator_in(cell("x = 1"), cell(FIRST, ANSWER), cell("check()", TEST)) == FIRST
    assert allocator_in(cell(FIRST, ANSWER), cell(SECOND)) == FIRST


def test_of_two_cells_with_one_name_the_last_counts():
    assert allocator_in(cell(FIRST, ANSWER), cell(SECOND, ANSWER)) == SECOND


@pytest.mark.extra
def test_copies_are_resolved_as_nbgrader_resolves_them():
    preprocessors = pytest.importorskip(
        "nbgrader.preprocessors", reason="nbgrader is not installed: make teach"
    )
    kinds = [{"solution": True}, {"grade": True}, {"locked": True}, {}]
    for first in kinds:
        for second in kinds:
            cells = [
                cell(text, {"grade_id": "allocator", **marks})
                for text, marks in [(FIRST, first), (SECOND, second), ("class Other: pass", {})]
            ]
            theirs = nbformat.from_dict({"cells": json.loads(json.dumps(cells)), "metadata": {}})
            preprocessors.DeduplicateIds().preprocess(theirs, {})
            kept = [c.source for c in theirs.cells if c.metadata.nbgrader and any(
                c.metadata.nbgrader.get(kind) for kind in ("solution", "grade", "locked"))]  # fmt: skip
            assert allocator_in(*cells) == (kept[0] if kept else SECOND), (first, second)


@pytest.mark.parametrize(
    "marks", [None, {}, {"grade_id": 7}, [], "x", {"grade_id": "other", "solution": True}]
)
def test_without_its_name_the_last_cell_that_defines_the_answer_counts(marks):
    assert allocator_in(cell(FIRST, marks), cell(SECOND, marks), cell("y = 2", marks)) == SECOND


def test_a_cell_turned_into_text_is_no_answer():
    assert allocator_in(cell(FIRST, ANSWER, kind="markdown")) is None
    assert allocator_in(cell(FIRST), cell(SECOND, ANSWER, kind="markdown")) == FIRST


def test_an_answer_written_elsewhere_counts_when_its_own_cell_defines_something_else():
    assert allocator_in(cell("# see below", ANSWER), cell(SECOND)) == SECOND
    assert allocator_in(cell("# nothing", ANSWER)) == "# nothing"


@pytest.mark.parametrize(
    "definition",
    ["def MyBlockPool(n): ...", "@decorated\nclass MyBlockPool(Base):\n  ...", "MyBlockPool = make()",
     "async def MyBlockPool(): ...", "MyBlockPool: type = make()"],
)  # fmt: skip
def test_definitions_are_seen_in_every_form(definition):
    assert allocator_in(cell(definition)) == definition


@pytest.mark.parametrize(
    "other",
    ["def f():\n    MyBlockPool = 1", "MyBlockPool == 1", "class MyBlockPool2: ...", "# class MyBlockPool:"],
)
def test_what_defines_nothing_at_the_top_is_no_answer(other):
    assert allocator_in(cell(other)) is None


def test_a_source_in_lines_is_joined():
    assert allocator_in(cell(["class MyBlockPool:\n", "    a = 1"])) == FIRST


@pytest.mark.parametrize(
    "broken",
    [None, 3, "text", [], {}, {"cell_type": "code", "source": 5}, {"cell_type": "code", "source": [1]}],
)
def test_cells_that_are_none_do_no_harm(broken):
    assert allocator_in(broken, cell(FIRST, ANSWER), broken) == FIRST


def write(folder, data):
    path = folder / "04_block_table.ipynb"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a notebook"),
        (b"not json", "not a notebook"),
        (b"\xff\xfe\x00\xd8", "not a notebook"),
        (b"[" * 100_000, "not a notebook"),
        (b"[]", "no list of cells"),
        (b'{"worksheets": []}', "no list of cells"),
        (b'{"cells": {}}', "no list of cells"),
    ],
)
def test_files_that_are_no_notebooks_say_so_and_pass_nothing(tmp_path, data, complaint):
    path = write(tmp_path, data)
    with pytest.raises(Unreadable, match=complaint):
        read_notebook(path)
    results = list(grade_file(path, "04"))
    assert [result.task for result in results] == TASKS
    assert not any(result.passed for result in results)
    assert all(complaint in result.reason for result in results)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_FILE", 100)
    with pytest.raises(Unreadable, match="has 101 bytes, the limit is 100"):
        read_notebook(write(tmp_path, b" " * 101))


def test_links_pipes_folders_and_nothing_are_not_read(tmp_path):
    real = write(tmp_path, b'{"cells": []}')
    assert read_notebook(real) == {"cells": []}
    link, pipe, folder = tmp_path / "link", tmp_path / "pipe", tmp_path / "folder"
    link.symlink_to(real)
    os.mkfifo(pipe)
    folder.mkdir()
    for path, complaint in [(link, "is a link"), (pipe, "not a file"), (folder, "cannot be read|not a file"),
                            (tmp_path / "gone", "No such file")]:  # fmt: skip
        with pytest.raises(Unreadable, match=complaint):
            read_notebook(path)


def test_a_check_that_stumbles_over_an_answer_does_not_pass_it(monkeypatch):
    def stumble(task, sources):
        raise KeyError("no such thing")

    monkeypatch.setattr(module, "grade_answer", stumble)
    (result, _) = module.grade_notebook({"cells": [cell(FIRST, ANSWER)]}, "04")
    assert not result.passed and "cannot judge this answer: KeyError" in result.reason
