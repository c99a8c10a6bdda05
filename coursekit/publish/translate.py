"""Lessons in another language: prose and visible strings from text files, all else from the lesson.

    python -m coursekit.publish.translate [NN]          write notebooks/zh/*.ipynb (and of other languages)
    python -m coursekit.publish.translate --check       the same, written nothing: 1 if one is out of date
    python -m coursekit.publish.translate --drift       list what has to be translated (again)
    python -m coursekit.publish.translate --draft 01    print what is wanted in full, ready to be translated

`notebooks/src/zh/00_start_here.md` holds the Chinese prose of lesson 00. Before the text of each cell stands

    <!-- 1916f909: ## Your machine -->

with a fingerprint of the English text and, for the eye, its first line. Links are written as in the lesson.
`00_start_here.toml` beside it, if there is one, holds the strings of the code that a reader sees, one a line,
`"English" = "中文"` (visible_strings.py says how they are named); one that stays English is given as itself.
Texts of studies are in `zh/extra/`.

A lesson is first written when it is whole. When the English changes later, the cell or string is English
again, so that a translation may lag but never says something else. Where a string of the code changes, the
translation is executed; else it takes the lesson's outputs, as both have the very same code. Either way the
numbers of the outputs are those of the lesson's, cell by cell, or nothing is written.
"""

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from coursekit.publish import build, notebooks, visible_strings

NUMBER = re.compile(r"\d+(?:[.,\u202f]\d+)*")
MARK = re.compile(r"^<!-- ([0-9a-f]{8}): .* -->\n", re.MULTILINE)


def fingerprint_of(english: str) -> str:
    return hashlib.sha256(english.encode()).hexdigest()[:8]


def mark(english: str) -> str:
    """What stands before the translation of a text: its fingerprint and its first line."""
    return f"<!-- {fingerprint_of(english)}: {english.splitlines()[0]} -->"


def read_translation(path: Path) -> dict[str, str]:
    """Fingerprint of the English -> translated text."""
    _, *parts = MARK.split(path.read_text(encoding="utf-8"))
    texts = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    if not parts or len(texts) < len(parts) // 2:
        raise ValueError(f"{path} has no mark, or the same one twice")
    return texts


def read_strings(path: Path) -> dict[str, str]:
    """Template of a string -> its translation; nothing where there is no such file."""
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def moved(text: str, translated: set[str]) -> str:
    """`text` with its relative links as seen from one folder below, except to lessons that are translated."""

    def target(match: re.Match[str]) -> str:
        return match[0] if match[1] in translated else f"](../{match[1]}"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)", target, text)


@dataclass
class Translation:
    """One lesson in one language, not executed yet where `changed`."""

    notebook: NotebookNode
    english: NotebookNode  # as stored, executed
    target: Path
    prose: list[str] = field(default_factory=list)  # English of the cells that are still wanted
    strings: list[str] = field(default_factory=list)  # templates that are still wanted
    unused: list[str] = field(default_factory=list)  # marks and templates that the lesson no longer has
    changed: bool = False  # whether a string of the code is translated

    @property
    def whole(self) -> bool:
        return not self.prose and not self.strings


def target_of(path: Path) -> Path:
    """notebooks/src/zh/02_name.md -> notebooks/zh/02_name.ipynb; of zh/extra, into notebooks/zh/extra."""
    below = _below(path)
    return path.parents[len(below.parts)] / below.with_suffix(".ipynb")


def _below(path: Path) -> Path:
    """The part of a path below notebooks/src."""
    root = next(parent for parent in path.parents if parent.name == "src")
    return path.relative_to(root)


def published(target: Path) -> set[str]:
    """The stored translations, as links from `target` name them; itself included."""
    studies = target.parent.name == build.EXTRA
    lessons = target.parent.parent if studies else target.parent
    below = {
        f"{'' if studies else build.EXTRA + '/'}{other.name}"
        for other in (lessons / build.EXTRA).glob("*.ipynb")
    }
    beside = {f"{'../' if studies else ''}{other.name}" for other in lessons.glob("*.ipynb")}
    return below | beside | {target.name}


def translate(path: Path) -> Translation:
    """The notebook of a translation, with outputs where none has to be executed."""
    target = target_of(path)
    studies = path.parent.name == build.EXTRA
    folder = path.parent.parent if studies else path.parent  # notebooks/src/zh
    source = folder.parent / (build.EXTRA if studies else "") / f"{path.stem}.py"
    texts, table = read_translation(path), read_strings(path.with_suffix(".toml"))
    notebook = notebooks.parse(source)
    english = nbformat.read(build.target_of(source), as_version=4)
    result = Translation(notebook, english, target)
    marks, names = set(), set()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            fingerprint = fingerprint_of(cell.source)
            marks.add(fingerprint)
            if fingerprint not in texts:
                result.prose.append(cell.source)
            cell.source = moved(texts.get(fingerprint, cell.source), published(target))
        else:
            names.update(visible_strings.templates(cell.source))
            result.strings += visible_strings.wanted(cell.source, table)
            code = visible_strings.translated(cell.source, table)
            result.changed |= code != cell.source
            cell.source = code
    result.strings = list(dict.fromkeys(result.strings))
    result.unused = [mark for mark in texts if mark not in marks] + [
        text for text in table if text not in names
    ]
    place = "/".join([build.FOLDER.name, *_below(path).with_suffix(".ipynb").parts])
    notebooks.with_home_cells(notebook, place)
    notebook.metadata, notebook.nbformat_minor = english.metadata, english.nbformat_minor
    executed = english
    if result.changed and target.exists():
        executed = nbformat.read(target, as_version=4)
    take_outputs(notebook, executed)
    return result


def take_outputs(notebook: NotebookNode, executed: NotebookNode) -> None:
    """Give the code cells the outputs of those in `executed` with the same id."""
    cells = {cell.id: cell for cell in executed.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id in cells:
            cell.outputs = cells[cell.id].outputs
            cell.execution_count = cells[cell.id].execution_count


def numbers_of(cell: NotebookNode) -> list[str]:
    """The numbers that a cell's outputs print, sorted, as another language may put them in another order."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts.append(output.get("text") or data.get("text/markdown") or "")
        if not data.get("text/markdown") and "image/png" not in data:
            texts.append(data.get("text/plain", ""))
    return sorted(NUMBER.findall(" ".join(texts)))


def disagreements(notebook: NotebookNode, english: NotebookNode) -> list[str]:
    """Cells whose code is not the lesson's but for words, or whose outputs print other numbers.

    What a cell tagged `nbval-ignore-output` prints depends on the machine and is not compared.
    """
    found, other = [], {cell.id: cell for cell in english.cells}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if cell.id not in other:
            found.append(f"{cell.id}: the stored lesson has no such cell")
            continue
        stored = other[cell.id]
        if cell.source != stored.source and (
            visible_strings.skeleton(cell.source) != visible_strings.skeleton(stored.source)
        ):
            found.append(f"{cell.id}: its code is not the lesson's")
        machine = "nbval-ignore-output" in cell.metadata.get("tags", [])
        if not machine and numbers_of(cell) != numbers_of(stored):
            found.append(f"{cell.id}: prints {numbers_of(cell)}, the lesson {numbers_of(stored)}")
    return found


def difference(translation: Translation) -> str | None:
    """What sets the stored notebook apart from its sources, or None. Nothing is executed."""
    if not translation.target.exists():
        return "is missing" if translation.whole else None
    stored = nbformat.read(translation.target, as_version=4)
    if stored != translation.notebook:
        return "differs from its sources"
    return "; ".join(disagreements(stored, translation.english)) or None


def _new_code(translation: Translation) -> bool:
    """Whether what is stored was made of other code, or nothing is stored."""
    if not translation.target.exists():
        return True
    stored = nbformat.read(translation.target, as_version=4)
    have = [cell.source for cell in stored.cells if cell.cell_type == "code"]
    return have != [cell.source for cell in translation.notebook.cells if cell.cell_type == "code"]


def write_notebook(translation: Translation) -> None:
    """Store the notebook, executed first where its code is new or its numbers are no longer the lesson's.

    Raises ValueError where it then disagrees with the lesson.
    """
    target = translation.target
    target.parent.mkdir(parents=True, exist_ok=True)
    if translation.changed and (
        _new_code(translation) or disagreements(translation.notebook, translation.english)
    ):
        for cell in translation.notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        notebooks.execute(translation.notebook, target.parent)
    if found := disagreements(translation.notebook, translation.english):
        raise ValueError(f"{target} disagrees with the lesson: " + "; ".join(found))
    nbformat.write(translation.notebook, target)


def sources(numbers: Sequence[str] = ()) -> list[Path]:
    """The texts of translations, of all languages, whose number is asked for."""
    src = build.FOLDER / "src"
    found = [*src.glob("*/[0-9]*.md"), *src.glob(f"*/{build.EXTRA}/[0-9]*.md")]
    return sorted(path for path in found if not numbers or path.name[:2] in numbers)


def drift(translation: Translation) -> str:
    """One line for each paragraph and string that is wanted, or has none it translates any more."""
    lines = [f"  wanted: {mark(text)}" for text in translation.prose]
    lines += [f"  wanted: {json.dumps(text, ensure_ascii=False)}" for text in translation.strings]
    lines += [f"  translates nothing: {text}" for text in translation.unused]
    return "".join(f"{line}\n" for line in lines)


def draft(number: str, language: str = "zh") -> str:
    """All that a lesson or study still wants, in full: cells under their marks, then lines of its TOML."""
    parts = []
    for kind in (build.LESSONS, build.STUDIES):
        for source in notebooks.find_sources(build.FOLDER, [number], kind.below):
            path = build.FOLDER / "src" / language / kind.below / f"{source.stem}.md"
            texts = read_translation(path) if path.exists() else {}
            table = read_strings(path.with_suffix(".toml"))
            cells = notebooks.parse(source).cells
            prose = [c.source for c in cells if c.cell_type == "markdown"]
            code = [
                text
                for c in cells
                if c.cell_type == "code"
                for text in visible_strings.wanted(c.source, table)
            ]
            wanted = [text for text in prose if fingerprint_of(text) not in texts]
            parts.append(f"==> {path}\n" + "\n\n".join(f"{mark(text)}\n{text}" for text in wanted))
            names = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(code))
            parts.append(f"==> {path.with_suffix('.toml')}\n" + "\n".join(f'{name} = ""' for name in names))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coursekit.publish.translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "numbers", nargs="*", metavar="NN", help="two digits; every translation when none is given"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="say what is out of date, write nothing")
    only.add_argument("--drift", action="store_true", help="list what has to be translated (again)")
    only.add_argument("--draft", metavar="NN", help="print what this lesson wants, in full")
    options = parser.parse_args(arguments)
    if options.draft:
        print(draft(options.draft))
        return 0
    if not (options.check or options.drift):
        for path in sources(options.numbers):
            translation = translate(path)
            if translation.whole or translation.target.exists():
                write_notebook(translation)
    behind = False
    for path in sources(options.numbers):
        translation = translate(path)
        if options.drift:
            print(
                f"{path}: {len(translation.prose)} paragraphs and {len(translation.strings)} strings wanted"
            )
            print(drift(translation), end="")
            continue
        if not options.check and translation.target.exists():
            write_notebook(translation)  # again: a lesson stored after this one may be linked to now
        wrong = difference(translation)
        print(
            translation.target, wrong or ("agrees with its sources" if translation.whole else "is not whole")
        )
        print(drift(translation), end="")
        behind |= bool(wrong) or not translation.whole
    return int(options.check and behind)


if __name__ == "__main__":
    sys.exit(main())
