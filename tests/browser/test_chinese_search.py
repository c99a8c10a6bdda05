"""The search of the site finds Chinese words inside sentences, and English ones as before; in Chromium."""

import re
import subprocess
import sys

import pytest
from checkout import ROOT

pytestmark = pytest.mark.browser
pytest.importorskip("jieba")
CHINESE = "引擎通过块表找到显存中的每一块，相同的前缀只保存一份。写时复制让分叉很便宜。"


@pytest.fixture(scope="module")
def small_site(tmp_path_factory):
    """Two pages with the search settings of the site."""
    folder = tmp_path_factory.mktemp("search")
    settings = (ROOT / "docs/site/conf.py").read_text(encoding="utf-8")
    settings = settings.replace(
        "Path(__file__).resolve().parent\n", f"Path({str(ROOT / 'docs/site')!r})\n", 1
    )
    settings += '\nextensions = ["languages"]\nhtml_static_path = []\nhtml_css_files = []\n'
    (folder / "conf.py").write_text(settings, encoding="utf-8")
    (folder / "index.rst").write_text(
        "Start\n=====\n\nThe watermark of the scheduler.\n\n.. toctree::\n\n   b.zh-CN\n"
    )
    (folder / "b.zh-CN.rst").write_text(f"分页\n====\n\n{CHINESE}\n", encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "--quiet", str(folder), str(folder / "out")]
    subprocess.run(command, check=True)
    return folder / "out"


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("块表", "b.zh-CN"),
        ("显存", "b.zh-CN"),
        ("前缀", "b.zh-CN"),
        ("写时复制", "b.zh-CN"),
        ("watermark", "index"),
    ],
)
def test_a_word_is_found(chromium, small_site, word, page):
    tab = chromium.new_page()
    tab.goto(f"{(small_site / 'search.html').as_uri()}?q={word}")
    result = tab.locator("#search-results li a").first
    result.wait_for(timeout=60_000)
    assert re.search(rf"/{re.escape(page)}\.html", result.evaluate("link => link.href"))
    tab.close()
