"""A Sphinx extension: Chinese pages say that they are, and a page in two languages links to the other.

A Chinese page is one below notebooks/zh, or has a name that ends in `.zh-CN`. Its English page is the one
without either.
"""

from collections.abc import Collection
from typing import Any

import sphinx.search
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese

CHINESE = "zh-CN"
START = {"README.zh-CN": "index"}  # the English README is the start page


class SearchBoth(SearchChinese):
    """Words cut by jieba; English ones stemmed in the page as in the index.

    Sphinx 9.0 names the stemmer of its Chinese search after a script that it does not lay beside the pages.
    """

    language_name = "English"


def is_chinese(page: str) -> bool:
    return page.startswith("notebooks/zh/") or page.endswith(f".{CHINESE}")


def counterpart(page: str, pages: Collection[str]) -> str | None:
    """The same page in the other language, if there is one."""
    if is_chinese(page):
        other = START.get(page, page.replace("notebooks/zh/", "notebooks/").removesuffix(f".{CHINESE}"))
    elif page in START.values():
        other = next(chinese for chinese, english in START.items() if english == page)
    elif page.startswith("notebooks/"):
        other = page.replace("notebooks/", "notebooks/zh/", 1)
    else:
        other = f"{page}.{CHINESE}"
    return other if other in pages else None


def add_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if is_chinese(page):
        context["language"] = CHINESE
    other = counterpart(page, app.env.found_docs)
    if other and "body" in context:
        language, name = ("en", "English") if is_chinese(page) else (CHINESE, "中文")
        link = f'<a href="{context["pathto"](other)}" lang="{language}" hreflang="{language}">{name}</a>'
        context["body"] = f'<p class="other-language">{link}</p>\n{context["body"]}'


def setup(app: Sphinx) -> dict[str, bool]:
    sphinx.search.languages["zh"] = SearchBoth
    app.connect("html-page-context", add_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
