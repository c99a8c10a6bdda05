"""What a task is: a thing to write, and the checks that its behaviour must pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coursekit.grading.learner import Ended, Learner, Raised, Remote
from coursekit.grading.values import difference, first_difference, plain, shape_of, show

WHOLE = "a whole number is asked for: // divides without leaving the ints, / makes a float"
NOTHING = "(And None is what a function answers where no return is reached.)"
NO_PROPERTY = "it is read without brackets, as a value: write @property in the line above its def"
SHAPE = "compare with the shape that the contract asks for: an axis is missing, too many, or elsewhere"
NO_OBJECTS = "what is asked for are plain numbers, not objects of a class of yours"
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
            raise Mismatch(given, "" if place else show(wanted), place or show(got), hint or kind_hint(got))

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
            own = SHAPE if len(shape_of(plain(got))) != len(shape_of(plain(wanted))) else ""
            raise Mismatch(given, "", problem, hint or kind_hint(got) or own)

    def true(self, condition: bool, given: str, expected: str, got: Any, *, hint: str = "") -> None:
        """For what is no comparison with one value."""
        self.count += 1
        if not condition:
            raise Mismatch(given, expected, got if isinstance(got, str) else show(got), hint)

    def runs(self, call: Callable[[], Any], given: str, *, hint: str = "") -> Any:
        """What `call()` answers; it lets the learner's code do something that is allowed."""
        try:
            return call()
        except Raised as error:
            if "NotImplementedError" in error.types:
                raise
            raise Mismatch(given, "no exception", str(error), hint) from None

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
            ("hint", with_own(error.hint, check)),
        ]
        return CheckResult(check.title, message=lay_out([row for row in rows if row[1]]))
    except Raised as error:
        if "NotImplementedError" in error.types:
            return CheckResult(check.title, not_done=True, stub=error.function)
        rows = [
            ("input", history(learner)),
            ("raised", str(error)),
            ("hint", raised_hint(error) or check.hint),
        ]
        return CheckResult(check.title, message=lay_out(rows))
    except Ended:
        raise
    except Exception:  # the check stumbled over what came back: a list too short, None, text
        got = f"{show(learner.last)}: not what was asked for, so nothing can be compared"
        rows = [("input", history(learner)), ("got", got), ("hint", with_own(kind_hint(learner.last), check))]
        return CheckResult(check.title, message=lay_out(rows))
    if not expect.count:
        raise AssertionError(f"the check {check.title!r} compared nothing")
    return CheckResult(check.title, passed=True)


def with_own(hint: str, check: Check) -> str:
    """A failure's own hint, or that of the check where it has none; of None both, for it may mean either."""
    return f"{check.hint}. {NOTHING}" if hint == NOTHING else hint or check.hint


def kind_hint(got: Any) -> str:
    """What it usually means when something of this kind came back, whatever was asked; "" for most."""
    if got is None:
        return NOTHING
    if isinstance(got, Remote) and "@property" in repr(got):
        return NO_PROPERTY
    items = got if isinstance(got, list | tuple) else [got]
    return NO_OBJECTS if any(isinstance(item, Remote) for item in items) else ""


MIXED = "two kinds of numbers meet: everything here is float32 until you make it another"
RAISED_HINTS = {
    "NoneType": "something is None here: what a function answers without a return, or a pool that is short",
    "expected scalar type": MIXED,
    "must have the same dtype": MIXED,
    "object is not callable": "brackets after something that is a value: a property is read without them",
    "missing 1 required positional argument: 'self'": "a method is called on its class, not on an object",
}


def raised_hint(error: Raised) -> str:
    """What an exception usually means, whatever was asked; "" for most."""
    return next((hint for words, hint in RAISED_HINTS.items() if words in error.message), "")


def history(learner: Learner) -> str:
    """What was asked of the answer last, and before it of objects, which may have changed by it."""
    *before, last = learner.calls or ["the cell with your answer"]
    before = [call for call in before if "." in call] if "." in last else []
    return last + (f"\nafter {', then '.join(before[-HISTORY:])}" if before else "")


def lay_out(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of a label and a text, whose further lines are indented under its first."""
    return "\n".join(f"{label:<9} {text.replace(chr(10), chr(10) + ' ' * 10)}" for label, text in rows)
