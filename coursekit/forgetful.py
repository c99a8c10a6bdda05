"""The engine with one check left out, for the lesson on copy-on-write: its reader finds out which."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from minipaged.cache import BlockTable


def engine_with_a_fault() -> AbstractContextManager[Any]:
    """While it lasts, no table asks whether another one lists its last block too: nothing is ever copied."""
    return mock.patch.object(BlockTable, "tail_is_shared", False)
