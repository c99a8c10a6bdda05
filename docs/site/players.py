"""A Sphinx extension: lessons whose run was recorded show it, to play and step through, below "The picture".

The pictures that the notebook stores stay where they are: they are of the runs in its cells.
"""

import re
from typing import Any

from sphinx.application import Sphinx

from coursekit.publish.tour import LESSONS, player_frame, with_player


def add_player(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    lesson = re.fullmatch(r"notebooks/(\d\d)_\w+", page)
    if lesson and lesson[1] in LESSONS:
        context["body"] = with_player(context["body"], player_frame(lesson[1], "../", *LESSONS[lesson[1]]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", add_player)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
