"""Values that somebody gives: what is taken, and what is refused with its name, the value, and the limit."""

from types import SimpleNamespace
from typing import Any

import pytest

from minipaged.checks import parse_bytes, require_at_least, require_flags, require_one_of, require_share


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (64, 64),
        ("64", 64),
        ("64MiB", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("2kb", 2000),
        ("1 GB", 10**9),
        ("1TiB", 1 << 40),
    ],
)
def test_memory_is_given_in_bytes_or_as_text(text: int | str, expected: int) -> None:
    assert parse_bytes(text, "kv_memory") == expected


@pytest.mark.parametrize("text", ["", "64 apples", "-1MiB", 0, -5, 1.5, True, None])
def test_other_memory_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="kv_memory is"):
        parse_bytes(text, "kv_memory")


@pytest.mark.parametrize(
    ("value", "says"), [(0, "the least allowed is 1"), (True, "a whole"), (1.0, "a whole")]
)
def test_a_count_is_a_whole_number_of_at_least_the_least(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"size is {value}, {says}"):
        require_at_least(SimpleNamespace(size=value), 1, "size")
    require_at_least(SimpleNamespace(size=1), 1, "size")


def test_none_is_a_count_only_where_that_is_allowed() -> None:
    require_at_least(SimpleNamespace(size=None), 1, "size", allow_none=True)
    with pytest.raises(ValueError, match="size is None, a whole number is needed"):
        require_at_least(SimpleNamespace(size=None), 1, "size")


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_only_true_and_false_are_flags(value: Any) -> None:
    with pytest.raises(ValueError, match=f"on is {value!r}, True or False is needed"):
        require_flags(SimpleNamespace(on=value), "on")


def test_a_share_is_a_number_in_its_interval() -> None:
    for interval, good, bad in (("[0, 1)", (0, 0.99), (-0.1, 1)), ("(0, 1]", (0.01, 1), (0, 1.1))):
        for value in good:
            require_share(SimpleNamespace(part=value), "part", interval)
        for value in (*bad, True, False, None, "1%", float("nan")):
            with pytest.raises(ValueError, match=r"part is .*, a share in [\[(]0, 1[\])] is needed"):
                require_share(SimpleNamespace(part=value), "part", interval)


@pytest.mark.parametrize("value", ["c", None, ["a"]])
def test_a_word_that_is_not_known_is_refused_with_those_that_are(value: Any) -> None:
    with pytest.raises(ValueError, match=r"way is .*, supported are 'a', 'b'"):
        require_one_of(SimpleNamespace(way=value), "way", ("a", "b"))
