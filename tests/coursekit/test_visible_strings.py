"""Strings of a cell in another language: the words change, the code does not."""

import pytest

from coursekit.publish import visible_strings
from coursekit.publish.visible_strings import skeleton, translated

CELL = '''x = f(n)  # 数
def helper():
    """A text of help, left as it is."""
    return {"a key": 3}["a key"]
table(["tokens of a request", "room"], rows)
say(f"""
    At {x:.0f} % of
    {rows[0]} blocks.
""")
print("two pieces "
      f"and {x!r}\\n", "x")
'''


def test_templates_join_pieces_and_name_places():
    found = visible_strings.templates(CELL)
    assert found == [
        "a key", "a key", "tokens of a request", "room",
        "At {x:.0f} % of {rows[0]} blocks.", "two pieces and {x!r}\n", "x",
    ]  # fmt: skip


def test_only_strings_of_the_table_change_and_places_may_change_order():
    table = {
        "tokens of a request": "请求的词元数",
        "At {x:.0f} % of {rows[0]} blocks.": "{rows[0]} 块的 {x:.0f} %。",
        "two pieces and {x!r}\n": "两段“{x!r}”\n",
    }
    chinese = translated(CELL, table)
    assert chinese == CELL.replace("tokens of a request", "请求的词元数").replace(
        "At {x:.0f} % of\n    {rows[0]} blocks.", "{rows[0]} 块的 {x:.0f} %。"
    ).replace('"two pieces "\n      f"and {x!r}\\n"', 'f"两段“{x!r}”\\n"')
    assert skeleton(chinese) == skeleton(CELL)
    assert translated(CELL, {}) == CELL


def test_other_code_is_another_skeleton():
    assert skeleton(CELL) != skeleton(CELL.replace("f(n)", "f(m)"))
    assert skeleton(CELL) != skeleton(CELL.replace("{x:.0f}", "{x:.1f}"))


def test_a_translation_that_loses_or_repeats_a_place_is_refused():
    for text in ("两段\n", "{x!r}{x!r}\n"):
        with pytest.raises(ValueError, match="has places"):
            translated(CELL, {"two pieces and {x!r}\n": text})


def test_strings_of_several_words_are_wanted_until_the_table_has_them():
    table = {"tokens of a request": "tokens of a request"}
    assert visible_strings.wanted(CELL, table) == [
        "At {x:.0f} % of {rows[0]} blocks.", "two pieces and {x!r}\n",
    ]  # fmt: skip
