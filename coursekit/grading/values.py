"""Comparing and showing what came back from a learner's process: plain values, arrays, tensors."""

import math
from typing import Any

WIDEST = 300  # characters of a value that are shown
LONG = 12  # values from which on a list is shown by the first place that differs


def plain(value: Any) -> Any:
    """Arrays, tensors and tuples as lists, all the way down, so that equal contents compare equal."""
    if hasattr(type(value), "tolist"):  # of the type: an object of the learner's is asked nothing
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain_key(key): plain(item) for key, item in value.items()}
    return value


def plain_key(key: Any) -> Any:
    """A key stays hashable."""
    return tuple(map(plain_key, key)) if isinstance(key, list | tuple) else key


def shape_of(value: Any) -> list[int]:
    """The shape of nested lists; [] for a number."""
    return [len(value), *(shape_of(value[0]) if value else [])] if isinstance(value, list) else []


def difference(got: Any, wanted: Any, tolerance: float) -> str:
    """In one sentence how numbers or arrays differ by more than `tolerance`; "" when they do not."""
    got, wanted = plain(got), plain(wanted)
    if shape_of(got) != shape_of(wanted):
        return f"shape {tuple(shape_of(got))}, expected {tuple(shape_of(wanted))}"
    worst, place = 0.0, ()
    for index, (have, want) in _pairs(got, wanted, ()):
        if isinstance(have, bool) or not isinstance(have, int | float):
            return f"{show(have)}{_place(index)} is not a number"
        error = 0.0 if have == want else abs(have - want)
        if math.isnan(error):
            return f"{have}{_place(index)}, expected {want:.6g}"
        if error > worst:
            worst, place = error, index
    if worst <= tolerance:
        return ""
    have, want = at(got, place), at(wanted, place)
    return f"{have:.6g}{_place(place)}, expected {want:.6g}: off by {worst:.3g}, allowed {tolerance:g}"


def at(value: Any, place: tuple[int, ...]) -> Any:
    """The number at a place of nested lists."""
    for index in place:
        value = value[index]
    return value


def count(value: Any) -> int:
    """How many values nested lists hold."""
    return sum(map(count, value)) if isinstance(value, list) else 1


def first_difference(got: Any, wanted: Any) -> str:
    """Where two long lists differ first, with both values; "" for short ones and other shapes."""
    got, wanted = plain(got), plain(wanted)
    if count(wanted) < LONG or shape_of(got) != shape_of(wanted):
        return ""
    for index, (have, want) in _pairs(got, wanted, ()):
        if have != want:
            return f"{show(have)}{_place(index)}, expected {show(want)}"
    return ""


def several(number: int, thing: str) -> str:
    """A number of things in words, as in "1 head", "3 heads"."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _pairs(got: Any, wanted: Any, index: tuple[int, ...]) -> Any:
    if not isinstance(wanted, list):
        yield index, (got, wanted)
        return
    if not isinstance(got, list) or len(got) != len(wanted):
        yield index, (got, math.nan)  # ragged where it should not be
        return
    for i, (have, want) in enumerate(zip(got, wanted, strict=True)):
        yield from _pairs(have, want, (*index, i))


def _place(index: tuple[int, ...]) -> str:
    return f" at [{', '.join(map(str, index))}]" if index else ""


def show(value: Any) -> str:
    """A value as a learner reads it: short, arrays with their shape."""
    shape = value.shape if hasattr(type(value), "shape") else None
    text = _text(value)
    if shape:
        text = f"{text}  (shape {tuple(shape)})"
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(type(value), "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        shown = [_text(item) for item in value[:40]] + (["…"] if len(value) > 40 else [])
        inside = ", ".join(shown)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    return repr(value)
