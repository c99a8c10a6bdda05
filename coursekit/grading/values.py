"""Comparing and showing what came back from a learner's process: plain values, arrays, tensors."""

import math
from typing import Any

WIDEST = 300  # characters of a value that are shown


def plain(value: Any) -> Any:
    """Arrays, tensors and tuples as lists, all the way down, so that equal contents compare equal."""
    if hasattr(value, "tolist"):
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
            return f"{show(have)} at {_place(index)} is not a number"
        error = 0.0 if have == want else abs(have - want)
        if math.isnan(error):
            return f"{have} at {_place(index)}, expected {want:g}"
        if error > worst:
            worst, place = error, index
    return f"off by {worst:.3g} at {_place(place)}, allowed {tolerance:g}" if worst > tolerance else ""


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
    return f"[{', '.join(map(str, index))}]" if index else "the number"


def show(value: Any) -> str:
    """A value as a learner reads it: short, arrays with their shape."""
    shape = getattr(value, "shape", None)
    value = plain(value)
    text = _text(value)
    if shape:
        text = f"{text}  (shape {tuple(shape)})"
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = [_text(item) for item in value[:40]] + (["…"] if len(value) > 40 else [])
        return "[" + ", ".join(shown) + "]"
    return repr(value)
