"""What the C++ kernels of `kernels/*_cpu.cpp` are called with: the structures of `arguments.h` and
`layers.cpp`, with the same fields in the same order.

A call takes a microsecond or two: at one row a layer's kernels are shorter than that, so what does not change
from layer to layer is put together once for each step.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import LayerKV

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LANES, LARGEST_HEAD = 16, 256  # as in lanes.h and decode.cpp
TASK_ROWS = 64  # query tokens for which the keys of a prompt are laid out once


class Decodes(ctypes.Structure):
    """`struct Decodes`: sequences with one query token each."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "seqs", "rows", "lens", "tables")),
        *((name, c_int64) for name in ("num_seqs", "table_stride", "block_size", "query_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size", "kv_together")),
        ("scale", c_float),
    ]


class Functions(ctypes.Structure):
    """`struct Functions` of layers.cpp."""

    _fields_ = [
        ("norm", ctypes.CFUNCTYPE(None, *[c_void_p] * 3, c_int64, c_int64, c_float)),
        ("turn", ctypes.CFUNCTYPE(None, *[c_void_p] * 3, *[c_int64] * 4)),
        ("store", ctypes.CFUNCTYPE(c_int64, *[c_void_p] * 5, *[c_int64] * 4)),
    ]


class After(IntEnum):
    """`enum After`: what follows a product while its sums, float32, are still at hand."""

    ROUND = 0  # to the dtype of the weight
    KEEP_FLOAT32 = 1
    ADD = 2  # to what stands in the output, then round
    GATE = 3  # silu(gate) * up, then round: half as many columns
    LARGEST = 4  # nothing is kept but the column of each row's largest sum


class Product(ctypes.Structure):
    """`struct Product`: rows times a weight."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "norm", "weight", "out")),
        *((name, c_int64) for name in ("rows", "words", "panels")),
        ("eps", c_float),
        ("after", c_int32),
    ]

    @classmethod
    def of(cls, packed: Tensor, after: After, norm: Tensor | None = None, eps: float = 0.0) -> Product:
        """All but the rows. packed: a weight as `packing.in_panels` lays it out."""
        norm_weight, (panels, words, _) = None if norm is None else norm.data_ptr(), packed.shape[:3]
        return cls(None, norm_weight, packed.data_ptr(), None, 0, words, panels, eps, after)


class Prompts(ctypes.Structure):
    """`struct Prompts`: sequences with several query tokens each."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "tasks", "tables")),
        *((name, c_int64) for name in ("num_tasks", "table_stride", "block_size", "query_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size")),
        ("scale", c_float),
    ]


class Layer(ctypes.Structure):
    """`struct Layer` of layers.cpp."""

    _fields_ = [(name, Product) for name in ("qkv", "attended", "gate_up", "down")]


class Layers(ctypes.Structure):
    """`struct Layers` of layers.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "heads", "attended", "gated", "cos", "sin", "slots")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("rows", "num_slots", "layer_stride", "num_layers")),
        ("layers", ctypes.POINTER(Layer)),
        ("decodes", Decodes),
        ("prompts", Prompts),
    ]


@dataclass(frozen=True)
class Step:
    """What a kernel of attention needs of a step in every layer; `tensors` keeps alive what it points to."""

    arguments: Any  # Decodes or Prompts
    tensors: tuple[Tensor, ...]

    def point_at(self, output: Tensor, query: Tensor, layer: LayerKV, scale: float) -> None:
        """query, output: [num_tokens, num_query_heads, head_size], output contiguous, rows of query dense."""
        a = self.arguments
        a.query, a.query_stride, a.out = query.data_ptr(), query.stride(0), output.data_ptr()
        a.keys, a.values = layer.key.data_ptr(), layer.value.data_ptr()
        a.heads, a.kv_heads, a.size, a.scale = query.shape[1], layer.key.shape[2], query.shape[2], scale


class PrefillStep(Step):
    """For `CpuKernels.prefill`."""

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


class DecodeStep(Step):
    """For `CpuKernels.decode`."""

    @classmethod
    def make(cls, batch: AttentionBatch, seqs: Tensor) -> DecodeStep:
        """seqs: int64 [n], sequences of `batch` with one query token and at least one key each."""
        tensors = (seqs, batch.query_start, batch.context_lens, batch.block_tables)
        arguments = Decodes(
            None, None, None, None, *(tensor.data_ptr() for tensor in tensors),
            len(seqs), batch.block_tables.stride(0), batch.block_size,
        )  # fmt: skip
        return cls(arguments, tensors)

    def point_at(self, output: Tensor, query: Tensor, layer: LayerKV, scale: float) -> None:
        super().point_at(output, query, layer, scale)
        # Few sequences: their heads apart, so that all threads have work.
        few = self.arguments.num_seqs < 4 * torch.get_num_threads()
        self.arguments.kv_together = 1 if few else layer.key.shape[2]
