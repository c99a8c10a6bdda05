"""The judging process: its crash, its hang and what it is sent cost one learner's marks."""

import json
import os
import signal
import time

import pytest
from checkout import ROOT

from coursekit.grading import judge as module
from coursekit.grading.judge import Judge
from coursekit.grading.learner import Ended, Learner
from tests.exercises.test_04_block_table import ALLOCATOR, BLOCK_TABLE

pytestmark = pytest.mark.slow  # each starts a process that imports torch


@pytest.fixture
def judge():
    with Judge() as judge:
        yield judge


def notebook(folder, allocator, block_table=BLOCK_TABLE.second):
    cells = [
        {"cell_type": "code", "source": text, "metadata": {"nbgrader": {"grade_id": name, "solution": True}}}
        for name, text in (("allocator", allocator), ("block_table", block_table))
    ]
    path = folder / "04_block_table.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_it_gives_the_results_of_this_process(tmp_path, judge):
    wrong = ALLOCATOR.second.replace("raise ValueError", "return ValueError")
    results = list(judge.grade_file(notebook(tmp_path, wrong), "04"))
    assert [result.passed for result in results] == [False, True]
    assert results[0].text() == ALLOCATOR.grade(wrong).text()


def test_after_a_crash_the_next_answer_is_judged(tmp_path, judge):
    path = notebook(tmp_path, ALLOCATOR.second)
    assert all(result.passed for result in judge.grade_file(path, "04"))
    os.kill(judge._process.pid, signal.SIGSTOP)  # so that it dies while it is asked
    results = judge.grade_file(path, "04")
    os.kill(judge._process.pid, signal.SIGKILL)
    first = next(results)
    assert not first.passed and "SIGKILL" in first.reason
    assert next(results).passed


def test_a_hang_ends(tmp_path, judge, monkeypatch):
    path = notebook(tmp_path, ALLOCATOR.second)
    list(judge.grade_file(path, "04"))
    monkeypatch.setattr(module, "SPARE_SECONDS", -45.0)
    os.kill(judge._process.pid, signal.SIGSTOP)
    assert "was not done after 5 seconds" in next(judge.grade_file(path, "04")).reason


HOSTILE = {
    "colliding": "class S(set):\n    def __iter__(self):\n"
    "        return (k * (2**61 - 1) for k in range(150_000))\n"
    "class MyBlockPool:\n    def __init__(self, n):\n        self.num_free = S([1])\n",
    "no elements": "import numpy\nclass MyBlockPool:\n    def __init__(self, n):\n"
    "        self.num_free = numpy.empty((60_000_000, 0))\n",
    "many lists": "class MyBlockPool:\n    def __init__(self, n):\n"
    "        self.num_free = [[]] * 3_000_000\n",
    "deep": "x = []\nfor _ in range(900):\n    x = [x]\nclass MyBlockPool:\n    def __init__(self, n):\n"
    "        self.num_free = x\n",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_what_comes_back_is_bounded_before_it_is_built(source):
    started = time.monotonic()
    result = ALLOCATOR.grade(source + "    def allocate(self, n):\n        return [0]\n")
    assert not result.passed
    assert time.monotonic() - started < 60, "it should be at once"


LEAVES_A_CHILD = """
import os, time
child = os.fork()
if not child:  # it has both pipes to the grader, and a session of its own
    os.setsid()
    time.sleep(20)
    open({over!r}, "w").close()
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_outlives_its_parent_is_not_waited_for(tmp_path):
    """The child is made before the door closes, as a person could who takes the hook out of the way."""
    over = tmp_path / "over"
    source = {"loop": "import time\ndef loop():\n    time.sleep(600)"}
    with Learner(source, preamble=LEAVES_A_CHILD.format(over=str(over))) as learner:
        child = learner.child
        try:
            with pytest.raises(Ended, match="not done after"), learner.time_limit(0.2):
                learner.loop()
            assert not over.exists(), "its pipe was read until the child ended"
        finally:
            os.kill(child, signal.SIGKILL)


def test_solutions_are_forbidden_wherever_the_repository_lies(tmp_path):
    from coursekit.grading.learner import forbidden_folders

    assert str(ROOT / "solutions") in forbidden_folders()
    assert str(ROOT / "tests") in forbidden_folders()
