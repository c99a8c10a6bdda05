"""Every relative link and picture in the documents and in the notebooks' text leads somewhere."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from checkout import ROOT, tracked_files

# [text](target), ![picture](target "title"), <img src="target">, <a href="target">
MARKDOWN_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HTML_LINK = re.compile(r"<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
CODE = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]*`", re.DOTALL)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")


def links(text: str) -> list[str]:
    """Link targets in a Markdown text; code is left out."""
    text = CODE.sub("", text)
    return [*MARKDOWN_LINK.findall(text), *HTML_LINK.findall(text)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes from the headings of a Markdown text, and those given by hand."""
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(
        r"^#{1,6} +(.*?) *#*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        found.add(f"{slug}-{number}" if number else slug)
    return found


def prose(file: Path) -> str:
    """A document's text; of a notebook, that of its Markdown cells."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def broken_links(file: Path, text: str) -> list[str]:
    """Relative targets in `text`, as if it stood in `file`, that lead nowhere."""
    broken = []
    for link in links(text):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (ROOT / path.lstrip("/") if path.startswith("/") else file.parent / path) if path else file
        is_broken = not target.exists() or ROOT not in [target.resolve(), *target.resolve().parents]
        if not is_broken and anchor and target.suffix in {".md", ".ipynb"}:
            is_broken = anchor.lower() not in anchors(prose(target))
        if is_broken:
            broken.append(link)
    return broken


def test_links_of_all_documents_resolve():
    found = {}
    for file in tracked_files():
        if "src" in file.relative_to(ROOT).parts:
            continue  # the text of a notebook: its links are checked where the notebook is
        if file.suffix in {".md", ".ipynb"} and (broken := broken_links(file, prose(file))):
            found[str(file.relative_to(ROOT))] = broken
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "[a](missing.md)",
        "![a](docs/missing.svg)",
        '<img src="missing.png">',
        "[a](README.md#no-such-heading)",
    ],
)
def test_broken_link_is_found(text):
    assert len(broken_links(ROOT / "README.md", text)) == 1


@pytest.mark.parametrize(
    "text",
    ["[a](https://example.org/x)", "[a](LICENSE)", "`[a](missing.md)`", "[a](#minipaged)", "[a](tests/)"],
)
def test_good_link_is_accepted(text):
    assert broken_links(ROOT / "README.md", text) == []


def test_anchors_are_those_of_github():
    assert anchors("# One `two`, three\n## Same\n## Same\n") == {"one-two-three", "same", "same-1"}
