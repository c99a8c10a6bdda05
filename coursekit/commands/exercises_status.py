"""Show how far you are: checks every task of your exercises and says what comes next.

Yours are those in work/, the copy that `make lab` opens, or those in exercises/ as long as there is no copy.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from minipaged.commands import CommandError

if TYPE_CHECKING:
    from coursekit.exercises import Exercise
    from coursekit.grading.grade import TaskResult

BAR = 40  # characters
SIGNS = {"passed": "✓", "failed": "✗", "not done yet": "·"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`status` takes none."""


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from coursekit.exercises import find_exercises
    from coursekit.grading.notebook import grade_file, tasks_of

    try:
        exercises = find_exercises()
    except FileNotFoundError as error:
        raise CommandError(str(error)) from None
    results = []
    total = sum(len(tasks_of(exercise.number)) for exercise in exercises)
    with tqdm(total=total, unit="task", disable=None, leave=False) as bar:
        for exercise in exercises:
            for result in grade_file(exercise.path, exercise.number):
                results.append((exercise, result))
                bar.update()
    print("\n".join(summary(results)))
    return 0


def summary(results: "Sequence[tuple[Exercise, TaskResult]]") -> Iterator[str]:
    """The bar over all tasks, a line for each, and the first one that is not passed."""
    passed = sum(result.passed for _, result in results)
    filled = BAR * passed // len(results)
    yield f"{'█' * filled}{'░' * (BAR - filled)}  {passed} of {len(results)} tasks passed"
    for exercise, result in results:
        why = f": {result.reason}" if result.verdict == "failed" else ""
        name = f"{exercise.number} {result.task.name}"
        yield f"  {SIGNS[result.verdict]} {name:<24} {result.verdict}{why}"
    for exercise, result in results:
        if not result.passed:
            yield f"\nNext: {result.task.title}, in {exercise.path}"
            yield f"`minipaged exercises check {exercise.number}` says what it passes and what it does not."
            return
    yield "\nAll done."
