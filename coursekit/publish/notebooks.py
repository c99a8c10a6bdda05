"""From a text source to an executed notebook: what lessons and exercises share. build.py has the command."""

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbclient
import nbformat
from nbformat import NotebookNode

from coursekit.publish.home import FIRST_CELL, declared_repository, with_badge

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
TIMEOUT_S = 300
# Folded in JupyterLab and in Colab, left out of the site.
FIRST_CELL_METADATA = {"tags": ["remove-cell"], "jupyter": {"source_hidden": True}, "cellView": "form"}

KERNEL_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",  # else a bar stuck at 0 % is what the stored notebook shows
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Kind:
    """What is built from the sources in `folder`/src/`below`, and how."""

    folder: Path
    build: Callable[[Path], Sequence[Path]]
    difference: Callable[[Path], str | None]
    orphans: Callable[[Path], list[Path]]
    below: str = ""


def parse(source: Path) -> NotebookNode:
    """The cells of a text source with the ids they always get."""
    notebook = jupytext.read(source)
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    }
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"{source.stem}-{index:03d}"[:64]
        cell.metadata.pop("lines_to_next_cell", None)
    return notebook


def with_home_cells(notebook: NotebookNode, path: str) -> NotebookNode:
    """Add what every notebook opens with: the cell that installs on Colab, and a badge under its title.

    The badge comes with the first address that is set (home.py).
    `path` is where the notebook is stored in the repository, as in "notebooks/02_kv_growth.ipynb". A notebook
    that does not begin with Markdown gets the cell only. Ids of the other cells stay as they are.
    """
    cells = notebook.cells
    has_title = bool(cells) and cells[0].cell_type == "markdown"
    if has_title:
        cells[0].source = with_badge(cells[0].source, path, declared_repository())
    home = nbformat.v4.new_code_cell(FIRST_CELL.read_text(encoding="utf-8").rstrip())
    home["id"] = f"{Path(path).stem}-home"[-64:]
    home.metadata.update(copy.deepcopy(FIRST_CELL_METADATA))
    cells.insert(int(has_title), home)
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run every cell in `folder` with a fresh kernel; an exception in a cell raises here."""
    os.environ.update(KERNEL_ENVIRONMENT)
    nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors only: its warnings frighten learners
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


def run_and_write(notebook: NotebookNode, target: Path) -> Path:
    """Execute a notebook in the folder of `target`, then write it there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    notebook = execute(notebook, target.parent)
    nbformat.validate(notebook)
    nbformat.write(notebook, target)
    return target


def compare_cells(wanted: NotebookNode, target: Path) -> str | None:
    """What sets the cells of the notebook stored at `target` apart from those of `wanted`, or None."""
    if not target.exists():
        return f"{target} is missing"
    stored = nbformat.read(target, as_version=4).cells
    if len(wanted.cells) != len(stored):
        return f"{target} has {len(stored)} cells, its source has {len(wanted.cells)}"
    for index, (want, have) in enumerate(zip(wanted.cells, stored, strict=True)):
        for field in ("cell_type", "id", "source", "metadata"):
            if want[field] != have[field]:
                return f"{target}, cell {index}: its {field} is not what the source says"
    return None


def find_sources(folder: Path, numbers: Sequence[str] = (), below: str = "") -> list[Path]:
    """The text sources in `folder`/src/`below` whose number is asked for, all when none is named."""
    sources = sorted((folder / "src" / below).glob("[0-9][0-9]_*.py"))
    return [source for source in sources if not numbers or source.name[:2] in numbers]


def run(kinds: Sequence[Kind], description: str | None, arguments: Sequence[str] | None = None) -> int:
    """The command line of a build; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m coursekit.publish.build",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("numbers", nargs="*", metavar="NN", help="two digits; everything when none is given")
    parser.add_argument("--check", action="store_true", help="compare sources and notebooks, execute nothing")
    options = parser.parse_args(arguments)
    chosen = [
        (kind, source) for kind in kinds for source in find_sources(kind.folder, options.numbers, kind.below)
    ]
    unknown = set(options.numbers) - {source.name[:2] for _, source in chosen}
    if unknown or not chosen:
        places = " or ".join(f"{kind.folder}/src" for kind in kinds)
        what = f"no source {', '.join(sorted(unknown))}" if unknown else "no NN_name.py"
        print(f"{what} in {places}: run this from the root of the repository", file=sys.stderr)
        return 2
    if options.check:
        found = [text for kind, source in chosen if (text := kind.difference(source))]
        found += [f"{path} has no source" for kind in kinds for path in kind.orphans(kind.folder)]
        print("\n".join(found) or f"{len(chosen)} sources agree with their notebooks")
        return 1 if found else 0
    for kind, source in chosen:
        for target in kind.build(source):
            print(target, flush=True)
    return 0
