"""A Sphinx extension: our docstrings, which read like Markdown, as the reStructuredText that Sphinx wants."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

# Code in single backticks, with the letter behind it; or a sign that is markup there and not here.
INLINE = re.compile(r"(?<![`:\w])`([^`\n]+)`(?!`)(?=(\w?))|([*|]|_(?!\w))")
SECTION = re.compile(r"(Args|Attributes|Examples?|Notes?|Raises|Returns|Yields):")
LIST_ITEM = re.compile(r"([-*]|\d+[.)]) ")


def plain_line(line: str) -> str:
    """`code` becomes ``code``, with an escaped space before a letter; other markup is escaped."""

    def replace(found: re.Match[str]) -> str:
        code, letter, sign = found.groups()
        return f"\\{sign}" if sign else f"``{code}``" + ("\\ " if letter else "")

    return INLINE.sub(replace, line)


def with_blocks(lines: Sequence[str]) -> Iterator[str]:
    """Indented lines are a drawing or a command: they become a block that is shown as it is typed."""
    last = ""  # the last line that was not indented
    in_block = False
    for line in lines:
        indented = line[:1] == " "
        if indented and not in_block and not keeps_indent(last):
            in_block = True
            yield from ("", ".. code-block:: none", "")
        elif line and not indented:
            if in_block:
                yield ""
            in_block, last = False, line
        yield line if in_block else plain_line(line)


def keeps_indent(line: str) -> bool:
    """Whether indented lines after this one already mean something: a section, a list or a block."""
    return bool(SECTION.fullmatch(line) or LIST_ITEM.match(line) or line.endswith("::"))


# Napoleon takes "words: words" of an attribute for its type and description. Ours are sentences.
COLON = "\N{MODIFIER LETTER COLON}"


def before_napoleon(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Replace `lines`, on Sphinx's event `autodoc-process-docstring`."""
    lines[:] = list(with_blocks(lines))
    if what in {"attribute", "data", "property"}:
        lines[:] = [line.replace(":", COLON) for line in lines]


def after_napoleon(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
