"""Proof that a grader grades: right answers pass, the stub is not done, mistakes fail for their reason."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jupytext

from coursekit.grading.grade import TaskResult, grade_answer
from coursekit.grading.tasks import TASKS
from coursekit.publish.exercise_build import without_solution
from tests.exercises.right_answers import RIGHT
from tests.exercises.wrong_answers import WRONG

SOURCES = Path(__file__).parent.parent.parent / "solutions" / "src"


@dataclass(frozen=True)
class Wrong:
    """A mistake that a grader must find: an edit of the solution, or a whole answer.

    `fails`: words of the title of the first check that must fail, or of the reason when no check can run.
    """

    name: str
    fails: str
    replace: tuple[str, str] | None = None
    source: str | None = None


@dataclass(frozen=True)
class Proof:
    """What is planted for one task: a second right answer in another style, and at least four wrong ones."""

    task: str
    second: str
    wrong: Sequence[Wrong]

    def right(self) -> list[str]:
        """Right answers in other styles: at least three a task."""
        return [self.second, *RIGHT[self.task]]

    def all_wrong(self) -> list[Wrong]:
        """The mistakes planted here, and those of reviewers."""
        return [*self.wrong, *(Wrong(name, fails, *how) for name, fails, *how in WRONG.get(self.task, ()))]

    def solution(self, name: str = "") -> str:
        return answers()[name or self.task]

    def source_of(self, wrong: Wrong) -> str:
        """The whole text of a wrong answer; AssertionError when its edit does not fit the solution once."""
        if wrong.source is not None:
            return wrong.source
        assert wrong.replace is not None, f"{wrong.name} has neither an edit nor a source"
        old, new = wrong.replace
        count = self.solution().count(old)
        assert count == 1, f"{wrong.name}: {old!r} stands {count} times in the solution"
        return self.solution().replace(old, new)

    def grade(self, answer: str) -> TaskResult:
        """Grade an answer; the tasks that it needs are answered by their solutions."""
        task = TASKS[self.task]
        needed = {name: self.solution(name) for name in task.needs}
        return grade_answer(task, {**needed, self.task: answer})

    def stub(self) -> str:
        return without_solution(self.solution(), allowed=True)

    def is_caught(self, wrong: Wrong) -> bool:
        """Whether a wrong answer fails, and for the stated reason."""
        result = self.grade(self.source_of(wrong))
        return result.verdict == "failed" and is_reason(wrong.fails, result.reason)

    def check(self) -> None:
        """AssertionError naming what the grader gets wrong: of the solution, the stub and the first mistake.

        The other right answers and the other mistakes take longer: test_kill_rate.py has them.
        """
        names = [wrong.name for wrong in self.all_wrong()]
        assert len(names) == len(set(names)) >= 4, (
            f"{self.task}: at least four wrong answers, each with a name"
        )
        solution = self.grade(self.solution())
        assert solution.passed, f"the solution fails\n{solution.text()}"
        stub = self.grade(self.stub())
        assert stub.verdict == "not done yet", f"the stub is {stub.verdict}\n{stub.text()}"
        self.check_wrong(self.all_wrong()[0])

    def check_right(self, answer: str) -> None:
        """AssertionError when a right answer in another style does not pass."""
        result = self.grade(answer)
        assert result.passed, f"a right answer in another style fails\n{result.text()}"

    def check_wrong(self, wrong: Wrong) -> None:
        """AssertionError when a mistake is not found, or not for the stated reason."""
        result = self.grade(self.source_of(wrong))
        assert result.verdict == "failed", f"{wrong.name} is {result.verdict}\n{result.text()}"
        assert is_reason(wrong.fails, result.reason), (
            f"{wrong.name} should fail in {wrong.fails!r}, fails in {result.reason!r}\n{result.text()}"
        )


def answers() -> dict[str, str]:
    """The solution of every task, by its name, read from solutions/src."""
    found = {}
    for path in sorted(SOURCES.glob("[0-9][0-9]_*.py")):
        for cell in jupytext.read(path).cells:
            mark = cell.metadata.get("nbgrader", {})
            if mark.get("solution"):
                found[mark["grade_id"]] = re.sub(r"\n*\Z", "\n", cell.source)
    return found


def is_reason(words: str, reason: str) -> bool:
    """Whether a reason has the words, or one of the texts that a | separates."""
    return any(each in reason for each in words.split("|"))
