"""Build the lessons, their studies and the exercises: execute their sources into notebooks.

    python -m coursekit.publish.build             build all
    python -m coursekit.publish.build 02 04       build what has the numbers 02 and 04
    python -m coursekit.publish.build --check     which notebooks differ from their source? executes nothing

`notebooks/src/NN_name.py` becomes `notebooks/NN_name.ipynb`. A study, `notebooks/src/extra/NN_name.py`,
becomes `notebooks/extra/NN_name.ipynb`; its number is that of the lesson that links to it. exercise_build.py
says what becomes of those in `solutions/src`, and builds those only. Run it from the root of the repository.
The same source gives the same bytes: cell ids come from its name, and neither times, versions nor widget
state are stored.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

from coursekit.publish.exercise_build import EXERCISES
from coursekit.publish.notebooks import Kind, compare_cells, parse, run, run_and_write, with_home_cells

FOLDER = Path("notebooks")
EXTRA = "extra"


def read_source(source: Path) -> NotebookNode:
    """The notebook that a lesson's or a study's source describes, not executed."""
    target = target_of(source)
    place = f"{EXTRA}/" if target.parent.name == EXTRA else ""
    return with_home_cells(parse(source), f"{FOLDER}/{place}{target.name}")


def target_of(source: Path) -> Path:
    """notebooks/src/02_name.py -> notebooks/02_name.ipynb; of src/extra, into notebooks/extra."""
    if source.parent.name == EXTRA:
        return source.parents[2] / EXTRA / f"{source.stem}.ipynb"
    return source.parents[1] / f"{source.stem}.ipynb"


def build(source: Path) -> Path:
    """Execute one source and write its notebook; returns where."""
    return run_and_write(read_source(source), target_of(source))


def difference(source: Path) -> str | None:
    """What sets the stored notebook apart from its source, or None. Nothing is executed."""
    return compare_cells(read_source(source), target_of(source))


def orphans(folder: Path, below: str = "") -> list[Path]:
    """Notebooks whose source is gone."""
    stored = sorted((folder / below).glob("*.ipynb"))
    return [path for path in stored if not (folder / "src" / below / f"{path.stem}.py").exists()]


LESSONS = Kind(FOLDER, lambda source: [build(source)], difference, orphans)
STUDIES = Kind(
    FOLDER, lambda source: [build(source)], difference, lambda folder: orphans(folder, EXTRA), below=EXTRA
)


def main(arguments: Sequence[str] | None = None) -> int:
    return run([LESSONS, STUDIES, EXERCISES], __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
