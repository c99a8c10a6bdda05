"""Lessons in another language: prose from a text file, code and outputs from the executed lesson.

    python -m coursekit.publish.translate             write notebooks/zh/*.ipynb (and of other languages)
    python -m coursekit.publish.translate --check     say what is out of date, write nothing

`notebooks/src/zh/00_start_here.md` holds the Chinese prose of lesson 00. Before the text of each cell stands

    <!-- 1916f909: ## Your machine -->

with a fingerprint of the English text and, for the eye, its first line. A cell that has no translation, or
whose English has changed since, keeps its English text, so that a translation may lag but never says
something else; `--check` prints the marks that are wanted. Links are written as in the lesson. Nothing is
executed: both languages have the very same code and outputs.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from coursekit.publish import build, notebooks

MARK = re.compile(r"^<!-- ([0-9a-f]{8}): .* -->\n", re.MULTILINE)


def mark(english: str) -> str:
    """What stands before the translation of a text: its fingerprint and its first line."""
    return f"<!-- {hashlib.sha256(english.encode()).hexdigest()[:8]}: {english.splitlines()[0]} -->"


def read_translation(path: Path) -> dict[str, str]:
    """Fingerprint of the English -> translated text."""
    _, *parts = MARK.split(path.read_text(encoding="utf-8"))
    texts = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    if not parts or len(texts) < len(parts) // 2:
        raise ValueError(f"{path} has no mark, or the same one twice")
    return texts


def moved(text: str, translated: set[str]) -> str:
    """`text` with its relative links as seen from one folder below, except to lessons that are translated."""

    def target(match: re.Match[str]) -> str:
        return match[0] if match[1] in translated else f"](../{match[1]}"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)", target, text)


def translate(path: Path) -> tuple[NotebookNode, list[str]]:
    """The notebook of a translation, and the marks of the cells that are still in English."""
    source, language = path.parents[1] / f"{path.stem}.py", path.parent.name
    texts, wanted = read_translation(path), []
    translated = {f"{other.stem}.ipynb" for other in path.parent.glob("*.md")}
    notebook = notebooks.parse(source)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            line = mark(cell.source)
            fingerprint = line.split()[1].rstrip(":")
            wanted += [] if fingerprint in texts else [line]
            cell.source = moved(texts.get(fingerprint, cell.source), translated)
    notebooks.with_home_cells(notebook, f"{build.FOLDER}/{language}/{source.stem}.ipynb")
    stored = nbformat.read(build.target_of(source), as_version=4)
    executed = {cell.id: cell for cell in stored.cells}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = executed[cell.id].outputs, executed[cell.id].execution_count
    notebook.metadata, notebook.nbformat_minor = stored.metadata, stored.nbformat_minor
    return notebook, wanted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coursekit.publish.translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="say what is out of date, write nothing")
    options = parser.parse_args(arguments)
    behind = False
    for path in sorted((build.FOLDER / "src").glob("*/*.md")):
        notebook, wanted = translate(path)
        target = build.FOLDER / path.parent.name / f"{path.stem}.ipynb"
        if not options.check:
            target.parent.mkdir(exist_ok=True)
            nbformat.write(notebook, target)
        stale = not target.exists() or nbformat.read(target, as_version=4) != notebook
        print(target, "differs from its sources" if stale else "agrees with its sources")
        print("".join(f"  wanted: {line}\n" for line in wanted), end="")
        behind |= stale or bool(wanted)
    return int(options.check and behind)


if __name__ == "__main__":
    sys.exit(main())
