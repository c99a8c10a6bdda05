"""The learner's own exercises: where they are, and how one becomes again what was handed out.

They lie in the working copy that `make lab` opens (coursekit/working_copy.py), or in the course's own folder
as long as there is no copy.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from coursekit import working_copy

FOLDER = Path("exercises")


def folder_of_the_learner() -> Path:
    """work/exercises where there is a working copy, else exercises, below the current folder."""
    copy = Path(working_copy.NAME) / FOLDER
    return copy if copy.is_dir() else FOLDER


@dataclass(frozen=True)
class Exercise:
    """One exercise of the folder `exercises`, as in number "04", name "04_block_table"."""

    name: str
    folder: Path = FOLDER

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def path(self) -> Path:
        return self.folder / self.name / f"{self.name}.ipynb"

    @property
    def source(self) -> Path:
        return self.folder.parent / "solutions" / "src" / f"{self.name}.py"

    @property
    def original(self) -> Path | None:
        """The course's file, for an exercise in a working copy; None for one that is the course's own."""
        above = self.folder.absolute().parent
        if above.name != working_copy.NAME:
            return None
        return above.parent / FOLDER / self.path.relative_to(self.folder)


def find_exercises(folder: Path | None = None) -> list[Exercise]:
    """Every exercise in `folder`, by default the learner's. FileNotFoundError when there is none."""
    folder = folder or folder_of_the_learner()
    found = [Exercise(path.name, folder) for path in sorted(folder.glob("[0-9][0-9]_*")) if path.is_dir()]
    if not found:
        raise FileNotFoundError(
            f"no {folder}/NN_name/NN_name.ipynb here: run this in the repository's folder"
        )
    return found


def find_exercise(number: str, folder: Path | None = None) -> Exercise:
    """The exercise "04", also named as "4" or "04_block_table". FileNotFoundError when there is none."""
    exercises = find_exercises(folder)
    for exercise in exercises:
        if number in (exercise.number, exercise.number.lstrip("0"), exercise.name):
            return exercise
    known = ", ".join(exercise.number for exercise in exercises)
    raise FileNotFoundError(f"there is no exercise {number!r}; there are {known}")


def is_as_handed_out(exercise: Exercise) -> bool:
    """Whether its cells are those that were handed out; what they have printed does not count."""
    from coursekit.publish.exercise_build import handed_out_notebook
    from coursekit.publish.notebooks import compare_cells

    try:
        if exercise.original:
            return working_copy.fingerprint(exercise.original) == working_copy.fingerprint(exercise.path)
        return compare_cells(handed_out_notebook(exercise.source), exercise.path) is None
    except Exception:  # whatever nbformat makes of a file that is cut, or has two versions in it
        return False


def reset(exercise: Exercise) -> Path | None:
    """Make the exercise again what was handed out; returns where the file of the learner went, if any."""
    from coursekit.publish.exercise_build import handed_out_notebook
    from coursekit.publish.notebooks import run_and_write

    def write() -> None:
        if exercise.original:
            shutil.copyfile(exercise.original, exercise.path)
        else:
            run_and_write(handed_out_notebook(exercise.source), exercise.path)

    if not exercise.path.exists():
        write()
        return None
    backup = next_backup(exercise)
    exercise.path.rename(backup)
    try:
        write()
    except BaseException:
        backup.replace(exercise.path)
        raise
    return backup


def next_backup(exercise: Exercise) -> Path:
    """A name beside the exercise's that no earlier backup has."""
    taken = [re.fullmatch(r".*\.backup-(\d+)", path.stem) for path in exercise.path.parent.glob("*.ipynb")]
    last = max((int(match[1]) for match in taken if match), default=0)
    return exercise.path.with_name(f"{exercise.name}.backup-{last + 1}.ipynb")
