"""The Chinese README says what the English one says: same parts, commands, links and rows."""

import re

import pytest
from checkout import ROOT

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def headings(text):
    return re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)


def blocks(text):
    """Fenced blocks as (language, lines), comments and spaces at the end left out."""
    return [
        (language, [re.sub(r"\s+#.*", "", line) for line in body.splitlines()])
        for language, body in FENCE.findall(text)
    ]


def links(text):
    """Targets in order, those that lead to the other language or to translated lessons left out.

    A picture with Chinese labels counts as the one with English labels.
    """
    found = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    found = [target for target in found if not target.startswith(("README", "notebooks/zh/"))]
    return [target.replace(".zh.svg", ".svg") for target in found]


def rows(text):
    """For each table row: the number of its cells and the links in its first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [(line.count("|"), links(line.split("|")[1])) for line in lines]


def quoted(text):
    """Names and commands in backticks."""
    return set(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


@pytest.mark.parametrize("part", [headings, blocks, rows, quoted])
def test_both_languages_have_the_same(part):
    assert part(CHINESE) == part(ENGLISH)


def test_both_languages_link_to_the_same_places():
    assert sorted(links(CHINESE)) == sorted(links(ENGLISH))


def test_each_language_links_to_the_other():
    assert "(README.zh-CN.md)" in ENGLISH and "(README.md)" in CHINESE


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("minipaged demo\n", "minipaged serve\n", blocks),
        ("## 使用\n", "### 使用\n", headings),
        ("| [memory.py](minipaged/memory.py) |", "| [memory.py](docs) |", rows),
        ("`make doctor`", "`make docter`", quoted),
    ],
)
def test_a_translation_that_drifts_is_found(old, new, part):
    assert old in CHINESE
    assert part(CHINESE.replace(old, new)) != part(ENGLISH)


def test_every_term_of_the_glossary_has_a_chinese_name():
    terms = re.findall(r"^### (.+)\n(.*)$", GLOSSARY, re.MULTILINE)
    assert len(terms) > 50
    named = re.compile(r"\*\*[^*,]*[\u4e00-\u9fff][^*,]*\.\*\* [A-Z]")  # Chinese commas between two names
    assert [term for term, entry in terms if not named.match(entry)] == []


def test_the_chinese_readme_uses_the_names_of_the_glossary():
    names = re.findall(r"^\*\*(.+?)\.\*\*", GLOSSARY, re.MULTILINE)
    core = {"词元", "块表", "预填充", "解码", "写时复制", "连续批处理", "分块预填充", "前缀缓存", "束搜索"}
    assert core <= set(names)
    assert [name for name in core if name not in CHINESE] == []
