"""The one error that loading a model raises, and the habit of naming the file at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ModelLoadError(ValueError):
    """A model cannot be loaded. The message names the file or model and the reason."""


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up. Its exception is no `Exception`, but says no more than one."""
    return type(error).__name__ == "PanicException"


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Turn any failure inside into a ModelLoadError that starts with `path`.

    Files come from strangers, and the parsers beneath raise whatever they like on a damaged one.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        # A ValueError speaks for itself; "'<' not supported" or "5" need to say what they are.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ModelLoadError(f"{path}: {kind}{error}") from error
