"""Make slides of the lessons, to be shown in a class, in `slides/`: what `make slides` runs.

    python scripts/build_slides.py [NN ...]      all lessons when none is named

Slides come from the stored notebooks; nothing is executed. Sections lie side by side (arrow right), the texts
of a section below each other (arrow down), each with the code and outputs that follow it. The pages need no
network: reveal.js and MathJax lie beside them.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
import npm
from nbconvert.exporters import SlidesExporter
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "slides"
TEMPLATES = ROOT / "docs/slides"
PACKAGES = {npm.REVEAL: "reveal", npm.MATHJAX: "mathjax"}  # where each lies beside the pages
HEADING = re.compile(r"^(?=#{1,3} )", re.MULTILINE)


def parts(cell: NotebookNode) -> Iterator[NotebookNode]:
    """A text cell cut before each of its headings; any other cell as it is."""
    if cell.cell_type != "markdown":
        yield cell
        return
    for text in HEADING.split(cell.source):
        if text.strip():
            yield nbformat.v4.new_markdown_cell(text.strip(), metadata=cell.metadata)


def only_imports(source: str) -> bool:
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(source).body)


def slide_type(cell: NotebookNode) -> str:
    """Where a cell stands, in nbconvert's words: a slide, one below it, on the same one, or nowhere."""
    if cell.cell_type == "markdown":
        return "slide" if re.match(r"##? ", cell.source) else "subslide"
    installs = "remove-cell" in cell.metadata.get("tags", [])
    return "skip" if installs or only_imports(cell.source) else "-"


def with_slides(notebook: NotebookNode) -> NotebookNode:
    """Mark which cells begin a slide, and the cells whose picture says more than the code that draws it."""
    notebook.cells = [part for cell in notebook.cells for part in parts(cell)]
    for cell in notebook.cells:
        cell.metadata = NotebookNode(cell.metadata)
        cell.metadata["slideshow"] = NotebookNode(slide_type=slide_type(cell))
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "picture"]
    return notebook


def page(notebook: NotebookNode, name: str) -> str:
    """The slides of a lesson as one page of HTML."""
    exporter = SlidesExporter(
        template_name="lesson",
        extra_template_basedirs=[str(TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    exporter.register_preprocessor("nbconvert.preprocessors.TagRemovePreprocessor", enabled=True)
    for preprocessor in exporter._preprocessors:
        if type(preprocessor).__name__ == "TagRemovePreprocessor":
            preprocessor.remove_input_tags = {"picture"}
            preprocessor.enabled = True
    text, _ = exporter.from_notebook_node(with_slides(notebook), resources={"metadata": {"name": name}})
    return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', str(text))


def main(arguments: Sequence[str]) -> int:
    lessons = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    chosen = [path for path in lessons if not arguments or path.name[:2] in arguments]
    if not chosen:
        print(f"slides: there is no lesson {', '.join(arguments)} in notebooks/", file=sys.stderr)
        return 2
    OUTPUT.mkdir(exist_ok=True)
    try:
        for package, folder in PACKAGES.items():
            npm.unpack(package, npm.fetch(package, ROOT / "build"), OUTPUT / folder)
    except npm.NpmError as error:
        print(f"slides: {error}", file=sys.stderr)
        return 1
    for path in chosen:
        target = OUTPUT / f"{path.stem}.html"
        target.write_text(page(nbformat.read(path, as_version=4), path.stem), encoding="utf-8")
    print(f"slides: {len(chosen)} lessons; open {OUTPUT / chosen[0].stem}.html, arrow keys turn the pages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
