"""Build the lessons: each `notebooks/src/NN_name.py` is executed into `notebooks/NN_name.ipynb`.

    python -m minipaged.course.build             build all
    python -m minipaged.course.build 02 04       build lessons 02 and 04
    python -m minipaged.course.build --check     which notebooks differ from their source? executes nothing

Run it from the root of the repository. The same source gives the same bytes: cell ids come from the name of
the lesson, and neither times, versions nor widget state are stored.
"""

import argparse
import os
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat
from nbformat import NotebookNode

FOLDER = Path("notebooks")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
TIMEOUT_S = 300

KERNEL_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",  # else a bar stuck at 0 % is what the stored notebook shows
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def read_source(source: Path) -> NotebookNode:
    """The notebook that a text source describes, not executed, with the ids it always gets."""
    notebook = jupytext.read(source)
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    }
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"{source.stem}-{index:03d}"[:64]
        cell.metadata.pop("lines_to_next_cell", None)
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run every cell in `folder` with a fresh kernel; an exception in a cell raises here."""
    os.environ.update(KERNEL_ENVIRONMENT)
    nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return tidy(notebook)


def tidy(notebook: NotebookNode) -> NotebookNode:
    """Drop what changes from run to run or machine to machine."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data.pop(WIDGET_VIEW, None)  # its model is not stored; the picture stands for it
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def target_of(source: Path) -> Path:
    """notebooks/src/02_name.py -> notebooks/02_name.ipynb."""
    return source.parent.parent / f"{source.stem}.ipynb"


def build(source: Path) -> Path:
    """Execute one source and write its notebook."""
    target = target_of(source)
    notebook = execute(read_source(source), target.parent)
    nbformat.validate(notebook)
    nbformat.write(notebook, target)
    return target


def difference(source: Path) -> str | None:
    """What sets the stored notebook apart from its source, or None. Nothing is executed."""
    target = target_of(source)
    if not target.exists():
        return f"{target} is missing"
    wanted, stored = read_source(source).cells, nbformat.read(target, as_version=4).cells
    if len(wanted) != len(stored):
        return f"{target} has {len(stored)} cells, its source has {len(wanted)}"
    for index, (want, have) in enumerate(zip(wanted, stored, strict=True)):
        for field in ("cell_type", "id", "source"):
            if want[field] != have[field]:
                return f"{target}, cell {index}: its {field} is not what the source says"
        if want.metadata.get("tags", []) != have.metadata.get("tags", []):
            return f"{target}, cell {index}: its tags are not what the source says"
    return None


def find_sources(folder: Path, numbers: list[str]) -> list[Path]:
    """The text sources of the lessons asked for, all when none is named."""
    sources = sorted((folder / "src").glob("[0-9][0-9]_*.py"))
    if not sources:
        raise FileNotFoundError(f"no {folder}/src/NN_name.py here: run this from the root of the repository")
    unknown = set(numbers) - {source.name[:2] for source in sources}
    if unknown:
        raise FileNotFoundError(f"no lesson {', '.join(sorted(unknown))} in {folder}/src")
    return [source for source in sources if not numbers or source.name[:2] in numbers]


def orphans(folder: Path) -> list[Path]:
    """Notebooks whose source is gone."""
    return [
        path for path in sorted(folder.glob("*.ipynb")) if not (folder / "src" / f"{path.stem}.py").exists()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minipaged.course.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lessons", nargs="*", metavar="NN", help="two digits; all lessons when none is given")
    parser.add_argument("--check", action="store_true", help="compare sources and notebooks, execute nothing")
    options = parser.parse_args(arguments)
    try:
        sources = find_sources(FOLDER, options.lessons)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        found = [text for source in sources if (text := difference(source))]
        found += [f"{path} has no source" for path in orphans(FOLDER)]
        print("\n".join(found) or f"{len(sources)} notebooks agree with their sources")
        return 1 if found else 0
    for source in sources:
        print(build(source), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
