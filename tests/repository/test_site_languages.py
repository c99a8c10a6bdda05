"""Pages of the site in two languages, built by Sphinx from a few words: their mark, and the link between."""

import re
import subprocess
import sys

import pytest
from checkout import ROOT

pytest.importorskip("sphinx_book_theme")

SETTINGS = f"""
import sys
sys.path.insert(0, {str(ROOT / "docs/site")!r})
extensions = ["languages"]
root_doc = "index"
html_theme = "sphinx_book_theme"
html_static_path = [{str(ROOT / "docs/site/static")!r}]
html_css_files = ["site.css"]
"""
LESSONS = ("00_a", "01_b", "zh/00_a", "extra/00_c", "zh/extra/00_c")
PAGES = ("index", "README.zh-CN", *(f"notebooks/{lesson}" for lesson in LESSONS))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Page -> its HTML."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "conf.py").write_text(SETTINGS)
    for page in PAGES:
        path = folder / f"{page}.rst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Title\n=====\n\n*word*\n")
    with open(folder / "index.rst", "a") as index:
        index.write("\n.. toctree::\n\n   " + "\n   ".join(PAGES[1:]) + "\n")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        str(folder),
        str(folder / "out"),
    ]
    subprocess.run(command, check=True)
    return {page: (folder / "out" / f"{page}.html").read_text() for page in PAGES}


def language(html):
    return re.search(r'<html[^>]* lang="([^"]+)"', html)[1]


def other(html):
    found = re.search(r'<p class="other-language"><a href="([^"]+)" lang="([^"]+)"', html)
    return found and found.groups()


def test_only_chinese_pages_say_that_they_are_chinese(built):
    chinese = {page for page, html in built.items() if language(html) == "zh-CN"}
    assert chinese == {"README.zh-CN", "notebooks/zh/00_a", "notebooks/zh/extra/00_c"}
    assert {language(html) for page, html in built.items() if page not in chinese} == {"en"}


def test_a_page_that_exists_twice_links_to_the_other_language(built):
    assert other(built["index"]) == ("README.zh-CN.html", "zh-CN")
    assert other(built["README.zh-CN"]) == ("index.html", "en")
    assert other(built["notebooks/00_a"]) == ("zh/00_a.html", "zh-CN")
    assert other(built["notebooks/zh/00_a"]) == ("../00_a.html", "en")
    assert other(built["notebooks/extra/00_c"]) == ("../zh/extra/00_c.html", "zh-CN")
    assert other(built["notebooks/zh/extra/00_c"]) == ("../../extra/00_c.html", "en")


def test_a_page_of_one_language_has_no_link(built):
    assert other(built["notebooks/01_b"]) is None
