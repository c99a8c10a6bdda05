"""The structures that the C++ kernels are called with, field by field those of `csrc/arguments.h`.

ctypes takes this file's word for where a field lies. If the two differed, a kernel would read through a wrong
pointer; so the library brings its own layout, and `require_same_layout` compares the two when it is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LANES, LARGEST_HEAD = 16, 256  # as in lanes.h and decode.cpp


class After(IntEnum):
    """`enum After`: what follows a product while its sums, float32, are still at hand."""

    ROUND = 0  # to the dtype of the weight
    KEEP_FLOAT32 = 1
    ADD = 2  # to what stands in the output, then round
    GATE = 3  # silu(gate) * up, then round: half as many columns
    ARGMAX = 4  # nothing is kept but the column of each row's largest sum


class Decodes(ctypes.Structure):
    """Sequences with one query token each."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "seqs", "rows", "lens", "tables")),
        *((name, c_int64) for name in ("num_seqs", "table_stride", "block_size", "query_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size", "kv_together")),
        ("scale", c_float),
    ]


class Prompts(ctypes.Structure):
    """Sequences with several query tokens each."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "tasks", "tables")),
        *((name, c_int64) for name in ("num_tasks", "table_stride", "block_size", "query_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size")),
        ("scale", c_float),
    ]


class Product(ctypes.Structure):
    """Rows times a weight."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "norm", "weight", "out")),
        *((name, c_int64) for name in ("rows", "words", "panels")),
        ("eps", c_float),
        ("after", c_int32),
    ]


class Layer(ctypes.Structure):
    """The four products of a layer."""

    _fields_ = [(name, Product) for name in ("qkv", "attended", "gate_up", "down")]


class Layers(ctypes.Structure):
    """A step of all layers of a model."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "heads", "attended", "gated", "cos", "sin", "slots")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("rows", "num_slots", "layer_stride", "num_layers")),
        ("layers", ctypes.POINTER(Layer)),
        ("decodes", Decodes),
        ("prompts", Prompts),
    ]


class Functions(ctypes.Structure):
    """The functions for one dtype that are called with plain arguments (layers.cpp)."""

    _fields_ = [
        ("norm", ctypes.CFUNCTYPE(None, *[c_void_p] * 3, c_int64, c_int64, c_float)),
        ("turn", ctypes.CFUNCTYPE(None, *[c_void_p] * 3, *[c_int64] * 4)),
        ("store", ctypes.CFUNCTYPE(c_int64, *[c_void_p] * 5, *[c_int64] * 4)),
    ]


STRUCTURES: tuple[type[ctypes.Structure], ...] = (Decodes, Prompts, Product, Layer, Layers, Functions)


class Field(ctypes.Structure):
    """`struct Field`: a name and where in its structure it begins; the last one has no name, but the size."""

    _fields_ = [("name", c_char_p), ("offset", c_int64)]


class LayoutError(RuntimeError):
    """A structure of the library is not the one of this file."""


def require_same_layout(
    library: ctypes.CDLL, structures: Iterable[type[ctypes.Structure]] | None = None
) -> None:
    """Raise LayoutError, naming the first field that differs, unless library and file agree on every byte."""
    for structure in STRUCTURES if structures is None else structures:
        name = structure.__name__
        ours = {field[0]: getattr(structure, field[0]).offset for field in structure._fields_}
        ours["its end"] = ctypes.sizeof(structure)
        theirs = _layout_in(library, name)
        for field in {**ours, **theirs}:
            if ours.get(field) != theirs.get(field):
                raise LayoutError(
                    f"struct {name}: {field} is at byte {theirs.get(field)} of the library's, "
                    f"at {ours.get(field)} of abi.py's"
                )


def _layout_in(library: ctypes.CDLL, name: str) -> dict[str, int]:
    """Where each field of the library's structure begins, and under "its end" its size."""
    try:
        address = ctypes.addressof(Field.in_dll(library, f"layout_{name}"))
    except ValueError as error:
        raise LayoutError(f"the library does not tell the layout of struct {name}") from error
    layout: dict[str, int] = {}
    while "its end" not in layout:
        field = Field.from_address(address)
        layout["its end" if field.name is None else field.name.decode()] = field.offset
        address += ctypes.sizeof(Field)
    return layout
