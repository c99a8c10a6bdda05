"""The Chinese README says what the English one says: same parts, commands, links and rows."""

import re

import pytest
from repository import ROOT

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
    """Targets in order, the links from one language to the other left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    return [target for target in found if not target.startswith("README")]


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
        ("| [tests/](tests) |", "| [tests/](docs) |", rows),
        ("`make doctor`", "`make docter`", quoted),
    ],
)
def test_a_translation_that_drifts_is_found(old, new, part):
    assert old in CHINESE
    assert part(CHINESE.replace(old, new)) != part(ENGLISH)
