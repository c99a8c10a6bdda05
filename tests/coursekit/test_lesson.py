import pytest

from coursekit import lesson
from coursekit.lesson import changed_copy
from minipaged.memory import KVSpec, blocks_for


@pytest.fixture
def said(monkeypatch):
    """What a lesson would print, thin spaces as plain ones."""
    texts = []
    monkeypatch.setattr(
        lesson, "display", lambda shown: texts.append(shown.data.replace(lesson.THIN_SPACE, " "))
    )
    return texts


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        (None, "It is **23 040 bytes**. You wrote no guess."),
        (23040, "It is **23 040 bytes**. Your guess was exactly that."),
        (46080, "It is **23 040 bytes**. Your guess of 46 080 was 2 times too high."),
        (2304, "It is **23 040 bytes**. Your guess of 2 304 was 10 times too low."),
        (0, "It is **23 040 bytes**. Your guess was 0."),
    ],
)
def test_a_guess_is_put_beside_the_measurement(said, guess, words):
    lesson.compare(guess, 23040, "bytes")
    assert said == [words]


def test_a_wrong_guess_that_was_expected_is_answered(said):
    wrong = {11520: "that is the keys alone; a token also keeps a value"}
    lesson.compare(11520, 23040, "bytes", wrong)
    lesson.compare(11500, 23040, "bytes", wrong)
    lesson.compare(23040, 23040, "bytes", {23040: "never shown"})
    lesson.compare(46080, 23040, "bytes", wrong)
    assert said == [
        "It is **23 040 bytes**. Your guess was 11 520: that is the keys alone; a token also keeps a value.",
        "It is **23 040 bytes**. Your guess was 11 500: that is the keys alone; a token also keeps a value.",
        "It is **23 040 bytes**. Your guess was exactly that.",
        "It is **23 040 bytes**. Your guess of 46 080 was 2 times too high.",
    ]


def test_a_table_formats_its_numbers(said):
    lesson.table(["what", "bytes"], [["key", 1536], ["share", 0.5]])
    assert said == ["| what | bytes |\n|:--|--:|\n| key | 1 536 |\n| share | 0.50 |"]


def test_source_is_shown_under_its_file(said):
    lesson.show_source(blocks_for, KVSpec.bytes_per_token, lesson.number)
    assert [text.splitlines()[0] for text in said] == [
        "`minipaged/memory.py`",
        "`coursekit/lesson.py`",
    ]
    assert "def blocks_for(" in said[0] and "\n\n@property\ndef bytes_per_token(self)" in said[0]


def test_prose_in_a_cell_may_be_indented(said):
    lesson.say("""
        One line,
        and another.
    """)
    assert said == ["One line,\nand another."]


def test_a_changed_copy_differs_in_that_line_only_and_leaves_the_module_alone():
    copy = changed_copy(lesson, 'THIN_SPACE = "\\N{NARROW NO-BREAK SPACE}"', 'THIN_SPACE = "_"')
    assert copy.number(1000) == "1_000" and lesson.number(1000) != "1_000"


def test_a_changed_copy_of_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="0 times, not once"):
        changed_copy(lesson, "no such line", "")
