"""What the C++ kernels of `kernels/*_cpu.cpp` are called with: their structures, in the same order of fields.

A call takes a microsecond or two: at one row a layer's kernels are shorter than that, so what does not change
from layer to layer is put together once for each step.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minipaged.attention.batch import AttentionBatch

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LANES, LARGEST_HEAD = 16, 256  # as in lanes.h and decode_cpu.cpp
TASK_ROWS = 64  # query tokens for which the keys of a prompt are laid out once


class Arguments(ctypes.Structure):
    """`struct Batch` of decode_cpu.cpp: pointers, integers and one float, in the same order."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "seqs", "rows", "lens", "tables")),
        *((name, c_int64) for name in ("num_seqs", "table_stride", "block_size", "query_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size", "kv_together")),
        ("scale", c_float),
    ]


class Functions(ctypes.Structure):
    """`struct Functions` of elementwise_cpu.cpp."""

    _fields_ = [
        ("norm", ctypes.CFUNCTYPE(None, *[c_void_p] * 3, c_int64, c_int64, c_float)),
        ("turn", ctypes.CFUNCTYPE(None, *[c_void_p] * 3, *[c_int64] * 4)),
        ("store", ctypes.CFUNCTYPE(c_int64, *[c_void_p] * 5, *[c_int64] * 4)),
    ]


class After(IntEnum):
    """`enum After` of linear_cpu.cpp: what follows a product while its sums, float32, are still at hand."""

    ROUND = 0  # to the dtype of the weight
    KEEP_FLOAT32 = 1
    ADD = 2  # to what stands in the output, then round
    GATE = 3  # silu(gate) * up, then round: half as many columns
    LARGEST = 4  # nothing is kept but the column of each row's largest sum


class Product(ctypes.Structure):
    """`struct Product` of linear_cpu.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "norm", "weight", "out")),
        *((name, c_int64) for name in ("rows", "words", "panels")),
        ("eps", c_float),
        ("after", c_int32),
    ]


class Prompts(ctypes.Structure):
    """`struct Prompts` of prefill_cpu.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "tasks", "tables")),
        *((name, c_int64) for name in ("num_tasks", "table_stride", "block_size", "query_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size")),
        ("scale", c_float),
    ]


@dataclass(frozen=True)
class PrefillStep:
    """What `CpuKernels.prefill` needs of a step in every layer."""

    arguments: Prompts
    tensors: tuple[Tensor, ...]

    @classmethod
    def make(cls, batch: AttentionBatch) -> PrefillStep:
        """Tasks for the sequences of `batch` with several query tokens; rows that see no key have none."""
        tasks = []  # sequence, first and last row, keys that the first row sees
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        for seq, length in enumerate(lengths):
            begin, end = starts[seq], starts[seq + 1]
            rows = range(max(begin, end - length), end, TASK_ROWS) if end - begin > 1 else ()
            tasks += [(seq, row, min(row + TASK_ROWS, end), length - (end - row) + 1) for row in rows]
        tensors = (torch.tensor(tasks[::-1], dtype=torch.int32), batch.block_tables)  # the longest first
        arguments = Prompts(
            None, None, None, None, *(tensor.data_ptr() for tensor in tensors),
            len(tasks), batch.block_tables.stride(0), batch.block_size,
        )  # fmt: skip
        return cls(arguments, tensors)


@dataclass(frozen=True)
class DecodeStep:
    """What `CpuKernels.decode` needs of a step in every layer; `tensors` keeps alive what it points to."""

    arguments: Arguments
    tensors: tuple[Tensor, ...]

    @classmethod
    def make(cls, batch: AttentionBatch, seqs: Tensor) -> DecodeStep:
        """seqs: int64 [n], sequences of `batch` with one query token and at least one key each."""
        tensors = (seqs, batch.query_start, batch.context_lens, batch.block_tables)
        arguments = Arguments(
            None, None, None, None, *(tensor.data_ptr() for tensor in tensors),
            len(seqs), batch.block_tables.stride(0), batch.block_size,
        )  # fmt: skip
        return cls(arguments, tensors)
