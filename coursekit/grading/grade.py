"""One answer in, one result out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from coursekit.grading.learner import Ended, Learner, Raised
from coursekit.grading.task import CheckResult, Task, run_check
from coursekit.grading.tasks import TASKS

Verdict = Literal["passed", "failed", "not done yet"]


@dataclass(frozen=True)
class TaskResult:
    """What became of one task; `passed` needs a passed result of every check of the task."""

    task: Task
    checks: list[CheckResult]
    problem: str = ""  # why no check could run

    @property
    def verdict(self) -> Verdict:
        if (
            not self.problem
            and len(self.checks) == len(self.task.checks)
            and all(c.passed for c in self.checks)
        ):
            return "passed"
        return "not done yet" if any(check.not_done for check in self.checks) else "failed"

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    @property
    def points(self) -> int:
        return self.task.points if self.passed else 0

    @property
    def reason(self) -> str:
        """One line: why the task is not passed; empty when it is."""
        if self.passed:
            return ""
        failed = next((check for check in self.checks if not check.passed), None)
        if self.problem or failed is None:
            return " ".join(self.problem.split()) or "no check ran"
        return failed.title if self.verdict == "failed" else self.verdict

    def text(self) -> str:
        """What the learner reads; the same answer always gives the same text, wherever it ran.

        Of several checks that failed the first is told in full: the others usually follow from it.
        """
        name, total = self.task.name, len(self.task.checks)
        if self.passed:
            return f"{name}: passed, all {total} checks\n" + self._list()
        if self.problem:
            return f"{name}: failed, {self.problem}" + ("\n" + self._list() if self.checks else "")
        done = sum(check.passed for check in self.checks)
        stubs = list(dict.fromkeys(check.stub for check in self.checks if check.stub))
        if not done and all(check.not_done for check in self.checks):
            methods = [stub for stub in stubs if stub not in self.task.defines]
            return f"{name}: not done yet" + (f"\n  to be written: {', '.join(methods)}" if methods else "")
        said = f"{name}: {self.verdict}, {done} of {total} checks passed"
        if len(self.checks) < total:
            said = f"{name}: {self.verdict} at check {len(self.checks)} of {total}; the rest was not run"
        if stubs:
            said += f"\n  to be written: {', '.join(stubs)}"
        return said + "\n" + self._list()

    def _list(self) -> str:
        lines, told = [], False
        for check in self.checks:
            lines.append(f"  {'✓' if check.passed else '·' if check.not_done else '✗'} {check.title}")
            if check.message and not told:
                told = True
                lines += [f"      {line}" for line in check.message.splitlines()]
        return "\n".join(lines)


def grade_answer(task: Task, sources: Mapping[str, str]) -> TaskResult:
    """Run `task`'s checks on an answer. Never raises for anything that the answer does.

    `sources`: the text of the answer cells by task name, those of the tasks in `task.needs` among them. Where
    one of those does not pass its own checks, the result says so and no more.
    """
    result = _grade(task, sources)
    if result.passed or result.verdict == "not done yet":
        return result
    for needed in task.needs:
        if sources.get(needed, "").strip() and not grade_answer(TASKS[needed], sources).passed:
            number = [name for name in TASKS if TASKS[name].exercise == task.exercise].index(needed) + 1
            why = f"task {number} first: {', '.join(TASKS[needed].defines)} does not pass its own check yet"
            return TaskResult(task, [], f"{why}, and this task uses it")
    return result


def _grade(task: Task, sources: Mapping[str, str]) -> TaskResult:
    wanted = [*task.needs, task.name]
    missing = [name for name in wanted if not sources.get(name, "").strip()]
    if missing:
        return TaskResult(task, [], f"no answer found for {' and '.join(missing)}")
    if task.prepare:
        task.prepare()
    results: list[CheckResult] = []
    try:
        with Learner({name: sources[name] for name in wanted}, preamble=task.preamble) as learner:
            for name in task.defines:
                getattr(learner, name)
            for check in task.checks:
                results.append(CheckResult(check.title))  # failed until it has passed
                results[-1] = run_check(check, learner)
                if results[-1].stub in task.defines or (check.guards and not results[-1].passed):
                    break  # a function that is a stub passes nothing; behind a guard all is expensive
    except Raised as error:
        return TaskResult(task, results, _why_it_does_not_run(error))
    except Ended as error:
        return TaskResult(task, results, str(error))
    return TaskResult(task, results)


def _why_it_does_not_run(error: Raised) -> str:
    if error.types[0] == "KeyError" and not error.line:
        return f"the answer does not define {error.message}"
    return f"the answer does not run: {error}"
