"""Checks, results and texts, on a task made up for it."""

import math

import pytest
import torch

from coursekit.grading.grade import TaskResult, grade_answer
from coursekit.grading.task import Expect, Mismatch, Task
from coursekit.grading.tasks import TASKS
from coursekit.grading.values import difference, show


def doubling(*, compares=True):
    task = Task(name="double", exercise="99", title="Doubling", points=2, defines=("double",))

    @task.check("doubles a number", hint="twice, not squared")
    def numbers(learner, expect):
        for n in (2, 3) if compares else ():
            expect.equal(learner.double(n), 2 * n, f"double({n})")

    @task.check("doubles a list's last item", hint="lists too")
    def lists(learner, expect):
        expect.equal(learner.double([5])[-1], 10, "double([5])[-1]")

    return task


def grade(source):
    return grade_answer(doubling(), {"double": source})


def test_a_right_answer_gets_the_points():
    result = grade("def double(n):\n    return [2 * n[-1]] if isinstance(n, list) else n + n")
    assert (result.verdict, result.points, result.reason) == ("passed", 2, "")
    assert result.text().splitlines()[0] == "double: passed, all 2 checks"


def test_a_wrong_answer_is_shown_what_went_in_and_what_came_out():
    result = grade("def double(n):\n    return [n[0] * 2] if isinstance(n, list) else n * n")
    assert (result.verdict, result.points, result.reason) == ("failed", 0, "doubles a number")
    text = result.text()
    for words in (
        "double(3)",
        "expected  6",
        "got       9",
        "twice, not squared",
        "✓ doubles a list's last item",
    ):
        assert words in text
    assert "double: failed, 1 of 2 checks passed" in text


def test_a_check_that_stumbles_over_an_answer_fails_it_and_the_rest_goes_on():
    result = grade("def double(n):\n    return 2 * n if isinstance(n, int) else None")
    assert result.verdict == "failed"
    assert [check.passed for check in result.checks] == [True, False]
    assert "input     double([5])\n" in result.text() and "got       None" in result.text()
    assert "TypeError" not in result.text()


def test_a_stub_is_not_done_yet():
    result = grade("def double(n):\n    raise NotImplementedError()")
    assert (result.verdict, result.reason, result.text()) == (
        "not done yet",
        "not done yet",
        "double: not done yet",
    )


def test_half_done_says_how_far():
    result = grade(
        "def double(n):\n    if isinstance(n, list):\n        raise NotImplementedError()\n    return 2 * n"
    )
    assert result.verdict == "not done yet"
    assert "1 of 2 checks passed" in result.text()


def test_the_first_failure_is_told_in_full_and_the_others_by_name():
    text = grade("def double(n):\n    return [0] if isinstance(n, list) else 0").text()
    assert text.count("hint") == 1 and "✗ doubles a list's last item" in text
    assert "double: failed, 0 of 2 checks passed" in text


def test_what_an_answer_raises_comes_with_its_line_the_input_and_the_hint():
    text = grade("def double(n):\n    return {}[n]").text()
    for words in (
        "input     double(2)",
        "raised    KeyError: 2",
        "at line 2: return {}[n]",
        "hint      twice",
    ):
        assert words in text


def test_a_stubbed_method_is_named_and_the_rest_is_checked():
    task = Task(name="pair", exercise="99", title="", points=1, defines=("Pair",))

    @task.check("one", hint="h")
    def one(learner, expect):
        expect.equal(learner.Pair().one(), 1, "one()")

    @task.check("two", hint="h")
    def two(learner, expect):
        expect.equal(learner.Pair().two(), 2, "two()")

    source = "class Pair:\n    def one(self):\n        raise NotImplementedError()\n"
    source += "    def two(self):\n        return 2"
    result = grade_answer(task, {"pair": source})
    assert result.verdict == "not done yet"
    assert [check.passed for check in result.checks] == [False, True]
    assert "to be written: Pair.one" in result.text()


def test_behind_a_first_check_that_guards_no_count_is_shown():
    task = Task(name="double", exercise="99", title="", points=1, defines=("double",))
    for title in ("first", "second", "third"):
        task.check(title, hint="h", guards=True)(
            lambda learner, expect: expect.equal(learner.double(1), 2, "double(1)")
        )
    text = grade_answer(task, {"double": "def double(n):\n    return n"}).text()
    assert "failed at check 1 of 3; the rest was not run" in text and "0 of 3" not in text


def test_a_second_task_says_that_the_first_comes_first():
    answers = {
        "chunk_mask": "def my_chunk_mask(a, b):\n    torch.ones(a, b)",
        "chunked_prefill": "def my_chunked_prefill(*args):\n    return my_chunk_mask(1, 1).float()",
    }
    assert grade_answer(TASKS["chunked_prefill"], answers).reason.startswith("task 1 first: my_chunk_mask")


def test_where_two_long_lists_differ_is_shown_with_both_values():
    with pytest.raises(Mismatch, match=r"7 at \[3\], expected 3"):
        Expect().equal([0, 1, 2, 7, *range(4, 40)], list(range(40)), "x")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "no answer found for double"),
        ("def triple(n): pass", "the answer does not define 'double'"),
        ("def double(n", "the answer does not run: SyntaxError"),
        ("import os; os._exit(0)", "your code ended its process (exit code 0)"),
        ("def double(n):\n    import os\n    os._exit(0)", "your code ended its process (exit code 0)"),
        ("def double(n):\n    open('/srv/solution')", "refused: it opens '/srv/solution'"),
        (
            "class Yes:\n    def __eq__(self, other):\n        return True\ndef double(n):\n    return Yes()",
            "doubles a number",
        ),
    ],
)
def test_everything_else_fails_and_says_why(source, reason):
    result = grade(source)
    assert (result.verdict, result.points) == ("failed", 0)
    assert result.reason.startswith(reason)


def test_a_check_that_compares_nothing_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="compared nothing"):
        grade_answer(doubling(compares=False), {"double": "def double(n):\n    return 2 * n"})


def test_behind_a_guard_that_failed_nothing_runs():
    task = Task(name="double", exercise="99", title="Doubling", points=2, defines=("double",))
    reached = []

    @task.check("doubles 1", hint="twice", guards=True)
    def cheap(learner, expect):
        expect.equal(learner.double(1), 2, "double(1)")

    @task.check("doubles 2", hint="twice")
    def expensive(learner, expect):
        reached.append(True)
        expect.equal(learner.double(2), 4, "double(2)")

    assert grade_answer(task, {"double": "def double(n):\n    return n"}).reason == "doubles 1"
    assert not reached
    assert grade_answer(task, {"double": "def double(n):\n    return 2 * n"}).passed


def test_no_result_is_no_pass():
    assert TaskResult(doubling(), []).verdict == "failed"
    assert TaskResult(Task("t", "99", "", 1, ()), [], "problem").verdict == "failed"


def test_equal_does_not_care_how_a_list_is_made():
    Expect().equal((1, torch.tensor([2, 3])), [1, [2, 3]], "x")
    with pytest.raises(Mismatch):
        Expect().equal([1, 2], [1, 3], "x")


@pytest.mark.parametrize(
    ("got", "wanted", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), ""),
        (torch.ones(2, 3) + 1e-7, torch.ones(2, 3), ""),
        (1.0, 1, ""),
        (torch.ones(3, 2), torch.ones(2, 3), "shape (3, 2), expected (2, 3)"),
        (torch.tensor([1.0, 1.1]), torch.ones(2), "1.1 at [1], expected 1: off by 0.1"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), "nan at [1], expected 1"),
        (math.inf, 1.0, "off by inf"),
        (None, 1.0, "not a number"),
        ([1.0, "a"], [1.0, 2.0], "not a number"),
        ([[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0, 4.0]], "[3] at [1] is not a number"),
    ],
)
def test_difference_names_the_worst_place(got, wanted, words):
    text = difference(got, wanted, 1e-5)
    assert words in text
    assert bool(text) == bool(words)


def test_show_is_short():
    assert show(0.1 + 0.2) == "0.3"
    assert show(torch.ones(2, 2)) == "[[1, 1], [1, 1]]  (shape (2, 2))"
    assert len(show(list(range(10_000)))) <= 300


def test_every_task_loads_under_its_name_and_has_checks():
    for name, task in TASKS.items():
        assert task.name == name
        assert len(task.checks) >= 2
        titles = [check.title for check in task.checks]
        assert len(set(titles)) == len(titles)
        assert task.points > 0
        assert all(needed in TASKS for needed in task.needs)
