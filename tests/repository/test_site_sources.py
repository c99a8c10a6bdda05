"""What the site is made with: docstrings turned into reStructuredText, MathJax fetched and checked."""

import importlib.util
import io
import re
import sys
import tarfile
from types import ModuleType

import nbformat
import pytest
from checkout import ROOT


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(ROOT / "scripts"))  # where the scripts find each other
docstrings = load("docs/site/docstrings.py")


@pytest.fixture
def npm(monkeypatch) -> ModuleType:
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    return load("scripts/npm.py")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("`n` blocks", "``n`` blocks"),
        ("two `block`s", "two ``block``\\ s"),
        ("``raw`` and :py:func:`x`", "``raw`` and :py:func:`x`"),
        ("`a * b` and 2 * 3", "``a * b`` and 2 \\* 3"),
        ("name_ of a_b", "name\\_ of a_b"),
    ],
)
def test_code_and_signs_of_a_docstring_show_as_typed(written, shown):
    assert docstrings.plain_line(written) == shown


def test_an_indented_drawing_keeps_its_shape():
    text = ["A table:", "    block  `7`", "    slot   28", "Then more."]
    expected = [
        "A table:",
        "",
        ".. code-block:: none",
        "",
        "    block  `7`",
        "    slot   28",
        "",
        "Then more.",
    ]
    assert list(docstrings.with_blocks(text)) == expected


@pytest.mark.parametrize("first", ["Args:", "- an item", "Shown as it is::"])
def test_indented_lines_that_mean_something_stay(first):
    assert list(docstrings.with_blocks([first, "  next"])) == [first, "  next"]


def test_registry_is_the_one_that_npm_is_set_to(npm, monkeypatch, tmp_path):
    monkeypatch.setattr(npm.Path, "home", lambda: tmp_path)
    assert npm.registry() == "https://registry.npmjs.org"
    (tmp_path / ".npmrc").write_text("fund=false\nregistry=https://file.example/npm/\n")
    assert npm.registry() == "https://file.example/npm"
    monkeypatch.setenv("npm_config_registry", "https://environment.example/")
    assert npm.registry() == "https://environment.example"


def test_mathjax_out_of_reach_is_one_sentence_with_the_way_out(npm, monkeypatch, tmp_path):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    with pytest.raises(npm.NpmError, match=r"could not be fetched from http://127\.0\.0\.1:9.*\.tgz"):
        npm.fetch(npm.MATHJAX, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_package_than_the_tested_one_is_refused(npm, tmp_path):
    (tmp_path / f"mathjax-{npm.MATHJAX.version}.tgz").write_bytes(b"something else")
    with pytest.raises(npm.NpmError, match="not the tested mathjax"):
        npm.fetch(npm.MATHJAX, tmp_path)


def test_only_what_a_page_loads_is_unpacked(npm, tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in (
            "es5/tex-chtml.js",
            "es5/tex-svg.js",
            "es5/output/chtml/fonts/a.woff",
            "es5/input/tex/extensions/../../x",
        ):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
    npm.unpack(npm.MATHJAX, packed.getvalue(), tmp_path)
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert written == {"es5/tex-chtml.js", "es5/output/chtml/fonts/a.woff"}


def test_a_picture_keeps_its_text_on_the_site():
    site = load("scripts/build_site.py")
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": "AAAA"}, metadata={"image/png": {"width": 3, "alt": "a rising line"}}
    )
    cells = [nbformat.v4.new_code_cell("show()", outputs=[picture]), nbformat.v4.new_code_cell("1 + 1")]
    shown, silent = site.with_texts_of_pictures(nbformat.v4.new_notebook(cells=cells)).cells
    assert shown.metadata["mystnb"]["image"]["alt"] == "a rising line"
    assert "mystnb" not in silent.metadata


slides = load("scripts/build_slides.py")


def lesson(*sources):
    cells = [
        nbformat.v4.new_code_cell(source[1:])
        if source.startswith("!")
        else nbformat.v4.new_markdown_cell(source)
        for source in sources
    ]
    return nbformat.v4.new_notebook(cells=cells)


def types(notebook):
    return [cell.metadata.slideshow.slide_type for cell in notebook.cells]


def test_a_section_is_a_column_of_slides_and_each_text_one_of_them():
    notebook = slides.with_slides(lesson("# 01 · A", "## Why", "Because.", "!1 + 1", "### More\n\nWords."))
    assert types(notebook) == ["slide", "slide", "subslide", "-", "subslide"]


def test_a_heading_in_the_middle_of_a_text_begins_a_slide_of_its_own():
    notebook = slides.with_slides(lesson("# 01 · A", "The end.\n\n## Next\n\nWords.\n\n### Third"))
    assert [cell.source.splitlines()[0] for cell in notebook.cells] == [
        "# 01 · A",
        "The end.",
        "## Next",
        "### Third",
    ]
    assert types(notebook) == ["slide", "subslide", "slide", "subslide"]


def test_imports_and_the_code_of_a_picture_are_left_out_of_slides():
    notebook = lesson("# 01 · A", "!import os", "!show(figure)", "!import os\nprint(1)")
    notebook.cells[2].outputs = [nbformat.v4.new_output("display_data", {"image/png": "AAAA"})]
    assert types(slides.with_slides(notebook)) == ["slide", "skip", "-", "-"]
    assert ["picture" in cell.metadata.get("tags", []) for cell in notebook.cells] == [
        False,
        False,
        True,
        False,
    ]


def test_slides_lead_to_slides_and_ask_no_other_machine():
    notebook = lesson("# 01 · A\n\n[next](02_b.ipynb) and $x$, [a term](../docs/glossary.md#x)", "!1 + 1")
    page = slides.page(notebook, "01_a")
    assert 'href="02_b.html"' in page and 'href="../docs/glossary.md#x"' in page
    loaded = re.findall(r"<(?:script|link|img)[^>]+?(?:src|href)=\"([^\"]+)\"", page)
    assert loaded and [address for address in loaded if ":" in address] == []
    assert "import mermaid" not in page
