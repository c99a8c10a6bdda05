"""The strings of a code cell that a reader sees, in another language; all other code stays as it is.

A string is named by its template: the text as Python reads it, adjacent pieces joined, with the places of an
f-string as `{expression:format}` the way `ast.unparse` writes them. Of a text in triple quotes the template
has single spaces for its line breaks. A translation has the same places, in any order.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping

PLACE = re.compile(r"\{[^{}]*\}")
WORDS = re.compile(r"[A-Za-z]{2,}.*\s.*[A-Za-z]{2,}", re.DOTALL)

String = ast.Constant | ast.JoinedStr


def strings(tree: ast.AST) -> Iterator[String]:
    """Every string of a tree in reading order; docstrings and what stands inside an f-string left out."""
    for field in ast.iter_child_nodes(tree):
        if isinstance(field, ast.JoinedStr) or (
            isinstance(field, ast.Constant) and isinstance(field.value, str)
        ):
            yield field
        elif not (isinstance(field, ast.Expr) and isinstance(field.value, ast.Constant)):
            yield from strings(field)


def places(node: String) -> list[str]:
    """The places of an f-string, each as it is written in its template."""
    if isinstance(node, ast.Constant):
        return []
    return [_place(part) for part in node.values if isinstance(part, ast.FormattedValue)]


def _place(part: ast.FormattedValue) -> str:
    conversion = "" if part.conversion < 0 else f"!{chr(part.conversion)}"
    layout = ""
    if isinstance(part.format_spec, ast.JoinedStr):
        layout = ":" + "".join(map(_piece, part.format_spec.values))
    return "{" + ast.unparse(part.value) + conversion + layout + "}"


def _piece(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return _place(part)
    assert isinstance(part, ast.Constant)
    return str(part.value).replace("{", "{{").replace("}", "}}")


def template(node: String, segment: str) -> str:
    """What a string is named by; `segment` is how it is written in the source."""
    text = str(node.value) if isinstance(node, ast.Constant) else "".join(map(_piece, node.values))
    return " ".join(text.split()) if '"""' in segment else text


def templates(source: str) -> list[str]:
    """The templates of all strings of a cell."""
    return [template(node, ast.get_source_segment(source, node) or "") for node in strings(ast.parse(source))]


def wanted(source: str, table: Mapping[str, str]) -> list[str]:
    """Templates of several words that `table` does not have; what shall stay English is listed as itself."""
    found = dict.fromkeys(templates(source))
    return [text for text in found if text not in table and WORDS.search(PLACE.sub(" {} ", text))]


def translated(source: str, table: Mapping[str, str]) -> str:
    """The cell with the strings of `table` (template -> translation) in place of its own.

    Raises ValueError for a translation whose places are not those of the English.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    result = source.encode()
    for node in reversed(list(strings(ast.parse(source)))):
        segment = ast.get_source_segment(source, node) or ""
        name = template(node, segment)
        text = table.get(name, name)
        if text == name:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        result = result[:begin] + _literal(text, node, segment, name).encode() + result[end:]
    return result.decode()


def _literal(text: str, node: String, segment: str, name: str) -> str:
    """A string literal for `text`, laid out as the one it replaces."""
    own = places(node)
    pattern = "|".join(re.escape(place) for place in sorted(set(own), key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if own else [text]
    if Counter(parts[1::2]) != Counter(own):
        raise ValueError(f"the translation {text!r} of {name!r} has places {parts[1::2]}, wanted {own}")
    for number in range(0, len(parts), 2):
        parts[number] = parts[number].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    body, prefix = "".join(parts), "f" if isinstance(node, ast.JoinedStr) else ""
    if '"""' in segment and "\n" in segment:
        before = re.search(r'"""(\s*)', segment)
        after = re.search(r'(\s*)"""$', segment)
        return f'{prefix}"""{before[1] if before else ""}{body}{after[1] if after else ""}"""'
    return f'{prefix}"{body}"'


def skeleton(source: str) -> str:
    """The code of a cell without the words of its strings: equal for a cell and its translation."""
    tree = ast.parse(source)
    for node in strings(tree):
        own: list[ast.expr] = [ast.Constant(place) for place in sorted(places(node))]
        if isinstance(node, ast.JoinedStr):
            node.values = own
        else:
            node.value = ""
    return ast.dump(tree)
