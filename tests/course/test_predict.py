import pytest

from minipaged.course.predict import compare, number


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        (None, "Measured: **23 040 bytes**. You had written no guess."),
        (23040, "Measured: **23 040 bytes**. Your guess was exactly that."),
        (46080, "Measured: **23 040 bytes**. Your guess of 46 080 was 2 times too high."),
        (2304, "Measured: **23 040 bytes**. Your guess of 2 304 was 10 times too low."),
        (0, "Measured: **23 040 bytes**. Your guess was 0."),
    ],
)
def test_a_guess_is_put_beside_the_measurement(guess, words):
    assert compare(guess, 23040, "bytes").data.replace("\N{NARROW NO-BREAK SPACE}", " ") == words


def test_numbers_are_grouped_in_threes():
    assert number(1234567) == "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567"
    assert number(0.5) == "0.50"
