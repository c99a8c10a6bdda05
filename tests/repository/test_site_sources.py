"""What the site is made with: docstrings turned into reStructuredText, MathJax fetched and checked."""

import importlib.util
import io
import tarfile
from types import ModuleType

import pytest
from checkout import ROOT


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docstrings = load("docs/site/docstrings.py")


@pytest.fixture
def mathjax(monkeypatch) -> ModuleType:
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    return load("scripts/mathjax.py")


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


def test_registry_is_the_one_that_npm_is_set_to(mathjax, monkeypatch, tmp_path):
    monkeypatch.setattr(mathjax.Path, "home", lambda: tmp_path)
    assert mathjax.registry() == "https://registry.npmjs.org"
    (tmp_path / ".npmrc").write_text("fund=false\nregistry=https://file.example/npm/\n")
    assert mathjax.registry() == "https://file.example/npm"
    monkeypatch.setenv("npm_config_registry", "https://environment.example/")
    assert mathjax.registry() == "https://environment.example"


def test_mathjax_out_of_reach_is_one_sentence_with_the_way_out(mathjax, monkeypatch, tmp_path):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    with pytest.raises(mathjax.MathJaxError, match=r"could not be fetched from http://127\.0\.0\.1:9.*\.tgz"):
        mathjax.package(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_package_than_the_tested_one_is_refused(mathjax, tmp_path):
    (tmp_path / f"mathjax-{mathjax.VERSION}.tgz").write_bytes(b"something else")
    with pytest.raises(mathjax.MathJaxError, match="not the tested MathJax"):
        mathjax.package(tmp_path)


def test_only_what_a_page_loads_is_unpacked(mathjax, tmp_path):
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
    mathjax.unpack(packed.getvalue(), tmp_path)
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert written == {"es5/tex-chtml.js", "es5/output/chtml/fonts/a.woff"}
