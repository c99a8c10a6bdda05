"""How values travel between the grader and a learner's process: length-prefixed JSON, never pickle.

Plain values, numpy arrays and torch tensors are copied. Anything else stays where it is and travels as a
reference, a number that stands for it.
"""

import base64
import json
import math
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

LARGEST_FRAME = 16 * 2**20  # bytes
# What a frame may describe is counted before it is built: a list of an empty list is two bytes here, and 50
# times as many as an object.
MOST_ITEMS = 300_000  # of all lists in a frame together
MOST_KEYS = 500  # of a set or dictionary: keys that collide take as many steps as the square of their number
MOST_ELEMENTS = 2**22  # of an array; an axis of length 0 counts as 1, since its lists are built all the same
_LENGTH = struct.Struct("<Q")


class Readable(Protocol):
    """What a message is read from."""

    def read(self, size: int, /) -> bytes: ...


class WireError(Exception):
    """The other end sent something that is not a frame, or a frame that is too long."""


def send(stream: BinaryIO, message: Any) -> None:
    """Write one message, a value that JSON has."""
    data = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: Readable, most_items: int | None = None) -> Any:
    """Read one message. EOFError when the stream has ended, WireError when it makes no sense.

    `most_items`: how many items its lists may have together; a message with more is a WireError.
    """
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError("the stream has ended")
    (length,) = _LENGTH.unpack(header)
    if length > LARGEST_FRAME:
        raise WireError(f"a frame of {length} bytes, the limit is {LARGEST_FRAME}")
    data = stream.read(length)
    if len(data) < length:
        raise EOFError(f"the stream has ended {length - len(data)} bytes early")
    if most_items is not None and sum(map(data.count, (b",", b"[", b"{"))) > most_items:
        raise WireError(f"a frame with more than {most_items} items")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON: {error}") from None


def encode(value: Any, reference: Callable[[Any], int]) -> Any:
    """`value` as something JSON has; `reference` gives the number of an object that cannot be copied.

    A reference also carries the name of the object's type, for messages.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
        return {kind: [encode(item, reference) for item in value]}
    if type(value) is dict:
        return {"dict": [[encode(key, reference), encode(item, reference)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    copied = _encode_array(value)
    if copied is not None:
        return copied
    return {"reference": [reference(value), str(type(value).__name__)[:60]]}


def _encode_array(value: Any) -> Any:
    """An array, a tensor or a number of numpy; None for anything else."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item() if isinstance(value.item(), bool | int | float) else None
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
        return {"array": [value.dtype.str, list(value.shape), _text(numpy.ascontiguousarray(value))]}
    if torch is not None and isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(raw)]}
    return None


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def decode(value: Any, dereference: Callable[[int, str], Any]) -> Any:
    """The value that `encode` described. WireError when it describes none, or one that is too large."""
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind in ("set", "dict") and len(content) > MOST_KEYS:
            raise ValueError(f"a {kind} of {len(content)} items, the limit is {MOST_KEYS}")
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode(item, dereference) for item in content)
        if kind == "dict":
            return {decode(key, dereference): decode(item, dereference) for key, item in content}
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "reference":
            number, name = content
            return dereference(int(number), str(name))
        return _decode_array(kind, *content)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise WireError(f"a value that makes no sense: {error}") from None


_SEQUENCES: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set}


def _decode_array(kind: str, dtype: str, shape: list[int], text: str) -> Any:
    import numpy

    elements = math.prod(max(1, size) for size in shape)
    if min(shape, default=0) < 0 or elements > MOST_ELEMENTS:
        raise ValueError(f"an array of shape {tuple(shape[:8])}, the limit is {MOST_ELEMENTS} elements")
    data = bytearray(base64.b64decode(text))
    if kind == "array":
        return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()
    if kind == "tensor":
        import torch

        if not data:
            return torch.empty(0, dtype=getattr(torch, dtype)).reshape(shape)
        return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape).clone()
    raise ValueError(f"unknown kind {kind!r}")
