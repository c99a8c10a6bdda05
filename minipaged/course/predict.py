"""A reader commits to a number first; the lesson compares it with the measurement afterwards."""

from IPython.display import Markdown


def compare(guess: float | None, measured: float, unit: str) -> Markdown:
    """One sentence that puts the reader's guess beside the measurement.

    `guess` is None where the reader wrote none; the lesson then goes on with the measurement alone.
    """
    if guess is None:
        return Markdown(f"Measured: **{number(measured)} {unit}**. You had written no guess.")
    if guess == measured:
        return Markdown(f"Measured: **{number(measured)} {unit}**. Your guess was exactly that.")
    if guess <= 0 or measured <= 0:
        return Markdown(f"Measured: **{number(measured)} {unit}**. Your guess was {number(guess)}.")
    factor = max(guess / measured, measured / guess)
    side = "high" if guess > measured else "low"
    said = f"Your guess of {number(guess)} was {factor:.2g} times too {side}."
    return Markdown(f"Measured: **{number(measured)} {unit}**. {said}")


def number(value: float) -> str:
    """Digits in groups of three with thin spaces between, as the lessons write them."""
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return text.replace(",", "\N{NARROW NO-BREAK SPACE}")
