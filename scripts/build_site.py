"""Build the site, static pages for reading offline or on a server, into `site/`: what `make site` runs.

The documents are copied into `build/site` with the places they have in the repository, so that their links
to each other hold; `docs/site` has the rest: Sphinx's settings, the style, the templates of the reference.
The runs that the pages play are recorded first, into `build/recordings`, unless they were with this code.
"""

import pkgutil
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import npm

import minipaged
from coursekit.player import player_page
from coursekit.publish import tour
from coursekit.publish.recorded_runs import recorded_runs

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / "build/site"
PAGES = ROOT / "build/pages"
OUTPUT = ROOT / "site"
SETTINGS = ROOT / "docs/site"

# heading in the list of contents -> the documents below it, in this order
SECTIONS = {
    "The tour": ["docs/tour/*.md"],
    "The course": ["notebooks/[0-9]*.ipynb"],
    "Studies beside it": ["notebooks/extra/[0-9]*.ipynb"],
    "Exercises": ["exercises/*/*.ipynb"],
    "Guides": ["docs/*.md"],
    "Benchmarks": ["benchmarks/README.md", "benchmarks/results/cpu/*/README.md", "benchmarks/NOTES.md"],
    "中文": ["README.zh-CN.md", "notebooks/zh/[0-9]*.ipynb", "notebooks/zh/extra/[0-9]*.ipynb"],
    "Project": ["CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"],
}
START_PAGE = "README.md"
PICTURES = ["docs/images/*", "exercises/*/*.svg", "exercises/*/*.png", "benchmarks/results/cpu/*/*.svg"]


def stage(pattern: str) -> list[str]:
    """Copy the files of the repository that match; returns their names without suffix, sorted."""
    names = []
    for file in sorted(ROOT.glob(pattern)):
        name = file.relative_to(ROOT)
        if str(name) == START_PAGE:
            continue
        (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".ipynb":
            nbformat.write(with_texts_of_pictures(nbformat.read(file, as_version=4)), STAGE / name)
        else:
            shutil.copy2(file, STAGE / name)
        names.append(str(name.with_suffix("")))
    return names


def with_texts_of_pictures(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Put each picture's text where MyST-NB looks for it: at the cell, not at the output."""
    for cell in notebook.cells:
        stored = [output.get("metadata", {}).get("image/png", {}) for output in cell.get("outputs", [])]
        texts = [metadata["alt"] for metadata in stored if "alt" in metadata]
        if texts:
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(texts)}}
    return notebook


def write_players() -> None:
    """A page for each recorded run beside the others, and the tour with its numbers and players."""
    runs = recorded_runs(ROOT / "build/recordings")
    folder = STAGE / "players/player"
    folder.mkdir(parents=True)
    for name, run in runs.items():
        (folder / f"{name}.html").write_text(player_page(run.text), encoding="utf-8")
    for page in STAGE.glob("docs/tour/*.md"):
        page.write_text(tour.render(page.read_text(encoding="utf-8"), runs), encoding="utf-8")


def toctree(caption: str, names: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", *names, "```", ""])


def write_sources() -> None:
    """Fill `build/site`: the documents, the start page with the list of contents, the reference."""
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    contents = {caption: [n for p in patterns for n in stage(p)] for caption, patterns in SECTIONS.items()}
    for pattern in PICTURES:
        stage(pattern)
    contents["Reference"] = ["api"]
    trees = "".join(toctree(caption, names) for caption, names in contents.items() if names)
    (STAGE / "index.md").write_text((ROOT / START_PAGE).read_text() + trees)
    lists = {"names": public_names(), "modules": public_modules()}
    lines = {word: "\n   ".join(names) for word, names in lists.items()}
    (STAGE / "api.rst").write_text((SETTINGS / "api.rst").read_text().format(**lines))


def public_names() -> list[str]:
    """Where the names that `from minipaged import …` knows are defined."""
    objects = {name: getattr(minipaged, name) for name in minipaged.__all__ if name != "__version__"}
    return [f"~{value.__module__}.{name}" for name, value in objects.items()]


def public_modules() -> list[str]:
    """The modules and packages directly below `minipaged`."""
    names = sorted(module.name for module in pkgutil.iter_modules(minipaged.__path__))
    return [f"minipaged.{name}" for name in names if not name.startswith("_")]


def fetch_mathjax() -> None:
    """Lay MathJax beside the pages; where it is out of reach, formulas stay as they are typed."""
    try:
        npm.unpack(npm.MATHJAX, npm.fetch(npm.MATHJAX, ROOT / "build"), STAGE / "mathjax")
    except npm.NpmError as error:
        print(f"site: formulas will show as typed. {error}", file=sys.stderr)


def run_sphinx() -> int:
    """Sphinx over `build/site` into `build/pages`; every warning is an error. Returns its exit status."""
    shutil.rmtree(PAGES, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--quiet", "--fail-on-warning"]
    command += ["--keep-going", "--fresh-env", "--jobs", "2", "--conf-dir", str(SETTINGS)]
    command += ["--doctree-dir", str(ROOT / "build/doctrees"), str(STAGE), str(PAGES)]
    return subprocess.run(command, cwd=ROOT).returncode


def main() -> int:
    start = time.monotonic()
    write_sources()
    write_players()
    fetch_mathjax()
    status = run_sphinx()
    if status == 0:
        shutil.rmtree(OUTPUT, ignore_errors=True)
        PAGES.rename(OUTPUT)
        pages = sum(1 for _ in OUTPUT.rglob("*.html"))
        print(f"site: {pages} pages in {time.monotonic() - start:.0f} s; open {OUTPUT / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
