"""What a task is: a thing to write, and the checks that its behaviour must pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coursekit.grading.learner import Ended, Learner, Raised
from coursekit.grading.values import difference, first_difference, plain, show

WHOLE = "a whole number is asked for: // divides without leaving the ints, / makes a float"
HISTORY = 5  # calls that are shown before the one that raised


class Mismatch(Exception):
    """An answer is not what was expected; holds what a learner needs to see why."""

    def __init__(self, given: str, expected: str, got: str, hint: str = "") -> None:
        self.given, self.expected, self.got, self.hint = given, expected, got, hint
        super().__init__(f"{given}: expected {expected}, got {got}")


class Expect:
    """The comparisons of one check. A check that compares nothing does not pass.

    `hint`: what this very difference usually means, where the check's own hint would lead astray.
    """

    def __init__(self) -> None:
        self.count = 0

    def equal(self, got: Any, wanted: Any, given: str, *, hint: str = "") -> None:
        """`got` is `wanted`; lists, tuples, arrays and tensors with the same elements are equal."""
        self.count += 1
        if plain(got) != plain(wanted):
            place = first_difference(got, wanted)
            raise Mismatch(given, "" if place else show(wanted), place or show(got), hint)

    def whole(self, got: Any, wanted: int, given: str, *, hint: str = "") -> None:
        """`got` is the whole number `wanted`, and not a float that happens to be one."""
        self.equal(got, wanted, given, hint=hint)
        if type(got) is not int:
            raise Mismatch(given, f"{wanted}, an int", f"{got!r}, a {type(got).__name__}", WHOLE)

    def close(self, got: Any, wanted: Any, given: str, *, tolerance: float = 1e-5, hint: str = "") -> None:
        """Numbers or arrays of the same shape, no element further off than `tolerance`, none NaN."""
        self.count += 1
        problem = difference(got, wanted, tolerance)
        if problem:
            raise Mismatch(given, "", problem, hint)

    def true(self, condition: bool, given: str, expected: str, got: Any, *, hint: str = "") -> None:
        """For what is no comparison with one value."""
        self.count += 1
        if not condition:
            raise Mismatch(given, expected, got if isinstance(got, str) else show(got), hint)

    def raises(self, name: str, call: Callable[[], Any], given: str, *, hint: str = "") -> None:
        """`call()` lets the learner's code raise an exception of class `name`, or one derived from it."""
        self.count += 1
        try:
            got = call()
        except Raised as error:
            if name in error.types:
                return
            if "NotImplementedError" in error.types:
                raise
            raise Mismatch(given, f"a {name}", str(error), hint) from None
        raise Mismatch(given, f"a {name}", f"no exception, but {show(got)}", hint)


CheckFunction = Callable[[Learner, Expect], None]


@dataclass(frozen=True)
class Check:
    """One behaviour: what must hold (a sentence), how to see it, what a failure usually means.

    A check that `guards` the rest is cheap and stands before expensive ones, which do not run if it fails.
    """

    title: str
    function: CheckFunction
    hint: str
    seconds: float
    guards: bool


@dataclass(frozen=True)
class CheckResult:
    """`passed` only after comparisons were made and held. `message` shows input, expected, got and hint."""

    title: str
    passed: bool = False
    message: str = ""
    not_done: bool = False
    stub: str = ""  # the function that is not written yet


@dataclass(frozen=True)
class Task:
    """One thing to write. Its answer defines the names in `defines`.

    `needs`: tasks of the same exercise whose answers run first. `preamble`: imports that the notebook makes
    in a cell of its own, run before the answers.
    """

    name: str
    exercise: str  # two digits
    title: str
    points: int
    defines: Sequence[str]
    preamble: str = ""
    needs: Sequence[str] = ()
    prepare: Callable[[], Any] | None = None
    checks: list[Check] = field(default_factory=list)

    def check(
        self, title: str, *, hint: str, seconds: float = 10.0, guards: bool = False
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Decorator: add a check. `title` says what must hold, `hint` names the likely misconception."""

        def add(function: CheckFunction) -> CheckFunction:
            self.checks.append(Check(title, function, hint, seconds, guards))
            return function

        return add


def run_check(check: Check, learner: Learner) -> CheckResult:
    """Passed, or why not. LearnerError Ended goes through: the process is gone for the next check too."""
    expect = Expect()
    learner.calls.clear()
    try:
        with learner.time_limit(check.seconds):
            check.function(learner, expect)
    except Mismatch as error:
        rows = [
            ("input", error.given),
            ("expected", error.expected),
            ("got", error.got),
            ("hint", error.hint or check.hint),
        ]
        return CheckResult(check.title, message=lay_out([row for row in rows if row[1]]))
    except Raised as error:
        if "NotImplementedError" in error.types:
            return CheckResult(check.title, not_done=True, stub=error.function)
        rows = [("input", history(learner)), ("raised", str(error)), ("hint", check.hint)]
        return CheckResult(check.title, message=lay_out(rows))
    except Ended:
        raise
    except Exception:  # the check stumbled over what came back: a list too short, None, text
        got = f"{show(learner.last)}: not what was asked for, so nothing can be compared"
        rows = [("input", history(learner)), ("got", got), ("hint", check.hint)]
        return CheckResult(check.title, message=lay_out(rows))
    if not expect.count:
        raise AssertionError(f"the check {check.title!r} compared nothing")
    return CheckResult(check.title, passed=True)


def history(learner: Learner) -> str:
    """What was asked of the answer last, and the calls before it."""
    *before, last = learner.calls or ["the cell with your answer"]
    return last + (f"\nafter {', then '.join(before[-HISTORY:])}" if before else "")


def lay_out(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of a label and a text, whose further lines are indented under its first."""
    return "\n".join(f"{label:<9} {text.replace(chr(10), chr(10) + ' ' * 10)}" for label, text in rows)
