"""Build the lessons and the exercises: execute their sources into notebooks.

    python -m coursekit.publish.build             build all
    python -m coursekit.publish.build 02 04       build lessons and exercises 02 and 04
    python -m coursekit.publish.build --check     which notebooks differ from their source? executes nothing

`notebooks/src/NN_name.py` becomes `notebooks/NN_name.ipynb`; exercise_build.py says what becomes of those in
`solutions/src`, and builds those only. Run it from the root of the repository. The same source gives the same
bytes: cell ids come from its name, and neither times, versions nor widget state are stored.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

from coursekit.publish.exercise_build import EXERCISES
from coursekit.publish.notebooks import Kind, compare_cells, parse, run, run_and_write, with_home_cells

FOLDER = Path("notebooks")


def read_source(source: Path) -> NotebookNode:
    """The notebook that a lesson's source describes, not executed."""
    return with_home_cells(parse(source), f"{source.parent.parent.name}/{source.stem}.ipynb")


def target_of(source: Path) -> Path:
    """notebooks/src/02_name.py -> notebooks/02_name.ipynb."""
    return source.parent.parent / f"{source.stem}.ipynb"


def build(source: Path) -> Path:
    """Execute one source and write its notebook; returns where."""
    return run_and_write(read_source(source), target_of(source))


def difference(source: Path) -> str | None:
    """What sets the stored notebook apart from its source, or None. Nothing is executed."""
    return compare_cells(read_source(source), target_of(source))


def orphans(folder: Path) -> list[Path]:
    """Notebooks whose source is gone."""
    return [
        path for path in sorted(folder.glob("*.ipynb")) if not (folder / "src" / f"{path.stem}.py").exists()
    ]


LESSONS = Kind(FOLDER, lambda source: [build(source)], difference, orphans)


def main(arguments: Sequence[str] | None = None) -> int:
    return run([LESSONS, EXERCISES], __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
