"""Checks of values that somebody gives: each names the field, the value found, and what is allowed.

`require_…` looks at fields of a dataclass, `check_…` at one value. All raise ValueError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Literal, TypeGuard

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
BYTE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 10**3), ("IB", 2**10))
    for power, prefix in enumerate("KMGT", 1)
}


def is_whole(value: object) -> TypeGuard[int]:
    """An int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """An int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_at_least(config: object, minimum: int, *names: str, allow_none: bool = False) -> None:
    """Each named field is a whole number of at least `minimum`, or None where that is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is None and allow_none:
            continue
        if not is_whole(value):
            raise ValueError(f"{name} is {value!r}, a whole number is needed")
        if value < minimum:
            raise ValueError(f"{name} is {value}, the least allowed is {minimum}")


def require_flags(config: object, *names: str) -> None:
    """Each named field is True or False."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, True or False is needed")


def require_positive_number(config: object, *names: str) -> None:
    """Each named field is a finite number above zero."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value):
            raise ValueError(f"{name} is {value!r}, a number is needed")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}, must be above 0 and finite")


def require_one_of(config: object, name: str, allowed: Collection[str]) -> None:
    """The field is one of a few words."""
    value = getattr(config, name)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}, supported are {', '.join(map(repr, allowed))}")


def require_share(config: object, name: str, interval: Literal["[0, 1)", "(0, 1]"]) -> None:
    """The field is a number in the interval."""
    value = getattr(config, name)
    if not is_number(value) or not (0 <= value < 1 if interval == "[0, 1)" else 0 < value <= 1):
        raise ValueError(f"{name} is {value!r}, a share in {interval} is needed")


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """The value is an integer of at least `low` and, if given, at most `high`."""
    if not is_whole(value):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {limit}, got {value}")


def check_seed(name: str, value: object) -> None:
    """The value is what `torch.Generator.manual_seed` takes."""
    check_whole(name, value, SEED_MIN, SEED_MAX)


def check_real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """The value is a finite number in [low, high], or in (low, high] with `open_low`."""
    if not is_number(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not (low < value if open_low else low <= value) or value > high:
        bracket = "(" if open_low else "["
        end = f"{high:g}]" if math.isfinite(high) else "inf)"
        raise ValueError(f"{name} must be in {bracket}{low:g}, {end}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """The value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def parse_bytes(amount: object, name: str) -> int:
    """Bytes in 67108864, "64MiB" or "0.5 GB"; at least 1."""
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", amount)
        if match is None or match[2].upper() not in BYTE_UNITS:
            raise ValueError(f"{name} is {amount!r}, give bytes or a text such as '64MiB' or '2GB'")
        amount = int(float(match[1]) * BYTE_UNITS[match[2].upper()])
    if not is_whole(amount) or amount < 1:
        raise ValueError(f"{name} is {amount!r}, at least 1 byte is needed")
    return amount
