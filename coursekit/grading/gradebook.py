"""A class's submissions, marked: one item for each learner and task.

Every item starts as failed, with a reason, and passes only when its own task's result says so. Nothing in a
submission stops the marking of the others. The names of learners' folders are data, as what is in them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coursekit.grading.grade import TaskResult
from coursekit.grading.notebook import grade_file, tasks_of

NOT_HANDED_IN = "not handed in"
DEEPEST = 5  # folders inside one another in a learner's


@dataclass(frozen=True)
class Item:
    """The mark of one learner for one task. As made it is failed; see `marked`."""

    student: str
    exercise: str  # as in "04_block_table"
    task: str
    max_points: int
    reason: str
    points: int = 0
    verdict: str = "failed"
    text: str = ""  # what the checks say

    def marked(self, result: TaskResult) -> "Item":
        """This item with the result of its own task."""
        if result.task.name != self.task:
            raise ValueError(f"a result of {result.task.name} for the item {self.task}")
        points = self.max_points if result.passed else 0
        return replace(self, verdict=result.verdict, points=points, reason=result.reason, text=result.text())


@dataclass
class Marks:
    """All items of one learner, and what there is to say about their folder."""

    student: str
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(item.points for item in self.items)

    @property
    def max_points(self) -> int:
        return sum(item.max_points for item in self.items)


@dataclass
class Submission:
    """What one learner handed in: the file of each exercise, and what is left out and why."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # exercise -> why its file is not opened
    notes: list[str] = field(default_factory=list)

    @property
    def student(self) -> str:
        return self.folder.name


def find_submissions(folder: Path, names: Sequence[str]) -> list[Submission]:
    """One submission for each folder in `folder`, by name; `names` are those of the exercises.

    FOLDER/STUDENT/NAME/NAME.ipynb, as nbgrader has it, FOLDER/STUDENT/NAME.ipynb, or anywhere else in the
    learner's folder. FileNotFoundError when `folder` does not exist or holds no submission at all.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    folders = sorted(path for path in folder.iterdir() if path.is_dir() or path.is_symlink())
    submissions = [find_files(student, names) for student in folders if not is_debris(student.name)]
    if not any(submission.files or submission.refused for submission in submissions):
        example = f"{folder}/STUDENT/{names[0]}/{names[0]}.ipynb"
        raise FileNotFoundError(f"{folder} holds no submission; one looks like {example}")
    return submissions


def loose_files(folder: Path) -> list[Path]:
    """Notebooks beside the learners' folders: nobody is marked for them."""
    return sorted(path for path in folder.iterdir() if is_notebook(path.name) and not path.is_dir())


def find_files(student: Path, names: Sequence[str]) -> Submission:
    """The files of one learner. Links are not followed: they could lead to somebody else's answers."""
    found = Submission(student)
    if student.is_symlink():
        found.refused = dict.fromkeys(names, "the folder is a link")
        return found
    notebooks = notebooks_in(student)
    used = set()
    for name in names:
        places = sorted(
            (path for path in notebooks if name.lower() in path.stem.lower()),
            key=lambda path: (rank(path.relative_to(student), name), path),
        )
        if not places:
            continue
        path, *others = places
        used |= set(places)
        where = path.relative_to(student)
        if others:
            found.notes.append(
                f"{name}: graded was {where}, not {', '.join(str(o.relative_to(student)) for o in others)}"
            )
        elif rank(where, name) > 1:  # not where it was asked for
            found.notes.append(f"{name}: graded was {where}")
        if path.is_symlink() or path.parent.is_symlink():
            found.refused[name] = "the file is a link" if path.is_symlink() else "the folder is a link"
        else:
            found.files[name] = path
    others = [path for path in notebooks if path not in used]
    found.notes += [f"not graded, its name is no exercise's: {path.relative_to(student)}" for path in others]
    return found


def rank(path: Path, name: str) -> int:
    """How far a file is from where an exercise belongs: 0 nbgrader's place, 3 another name."""
    if path.parts in ((name, f"{name}.ipynb"), (f"{name}.ipynb",)):
        return len(path.parts) % 2
    return 2 if path.name.lower() == f"{name}.ipynb" else 3


def notebooks_in(student: Path) -> list[Path]:
    """Every notebook in a learner's folder and the folders in it. Links are named, not entered."""
    found = []
    for folder, inner, files in os.walk(student):
        here = Path(folder)
        links = [name for name in inner if (here / name).is_symlink()]
        for link in links:  # named as a link, not entered
            found += [path for path in (here / link).glob("*.ipynb") if is_notebook(path.name)]
        inner[:] = [name for name in inner if not is_debris(name) and name not in links]
        found += [here / name for name in [*files, *inner] if is_notebook(name)]
        if len(here.relative_to(student).parts) >= DEEPEST:
            inner.clear()
    return sorted(found)


def is_notebook(name: str) -> bool:
    return name.lower().endswith(".ipynb") and not is_debris(name)


def is_debris(name: str) -> bool:
    """Whether a name is what systems and tools leave behind: hidden, or of a Mac's archive."""
    return name.startswith(".") or name == "__MACOSX"


Grade = Callable[[Path, str], Iterator[TaskResult]]


def grade_class(
    submissions: Sequence[Submission],
    names: Sequence[str],
    done: Callable[[int], object],
    grade: Grade = grade_file,
) -> Iterator[Marks]:
    """Mark one learner after the other for the exercises in `names`; calls `done(1)` after each item.

    `grade` judges a file: judge.Judge().grade_file does so in another process.
    """
    for submission in submissions:
        marks = Marks(submission.student, notes=list(submission.notes))
        for name in names:
            for item in grade_exercise(submission, name, grade):
                marks.items.append(item)
                done(1)
        yield marks


def handed_in(submissions: Sequence[Submission], names: Sequence[str]) -> list[str]:
    """The exercises that at least one learner handed in: everybody is marked for these."""
    real = [submission for submission in submissions if not submission.folder.is_symlink()] or submissions
    return [name for name in names if any(name in s.files or name in s.refused for s in real)]


def grade_exercise(submission: Submission, name: str, grade: Grade = grade_file) -> Iterator[Item]:
    """An item for each task of the exercise `name`, in their order."""
    tasks = tasks_of(name[:2])
    items = [Item(submission.student, name, task.name, task.points, "no result") for task in tasks]
    if name in submission.refused:
        yield from (replace(item, reason=submission.refused[name]) for item in items)
    elif name not in submission.files:
        yield from (replace(item, verdict=NOT_HANDED_IN, reason="no file") for item in items)
    else:
        results = grade(submission.files[name], name[:2])
        yield from (item.marked(result) for item, result in zip(items, results, strict=True))
