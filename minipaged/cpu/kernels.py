"""Calls the C++ kernels of `csrc/` with torch's tensors.

A call takes a microsecond or two: at one row a layer's kernels are shorter than that. So what does not change
from layer to layer is put together once for each step, in a `DecodeStep` and a `PrefillStep`.
"""

from __future__ import annotations

import ctypes
import warnings
from ctypes import c_int64
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minipaged.cpu import build, calibrate
from minipaged.cpu.abi import (
    LANES,
    LARGEST_HEAD,
    NAMES,
    Decodes,
    Functions,
    Layers,
    LayoutError,
    Product,
    Prompts,
    require_same_layout,
)
from minipaged.cpu.calibrate import Choice

if TYPE_CHECKING:
    from minipaged.attention.batch import AttentionBatch
    from minipaged.cache.storage import LayerKV

TASK_ROWS = 64  # query tokens for which the keys of a prompt are laid out once


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


class DecodeStep(Step):
    """The sequences of a batch with one query token and at least one key each, for `CpuKernels.decode`."""

    @classmethod
    def make(cls, batch: AttentionBatch) -> DecodeStep:
        seqs = batch.decoding_sequences()
        arguments = Decodes(
            seqs=seqs.data_ptr(),
            rows=batch.query_start.data_ptr(),
            lens=batch.context_lens.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            num_seqs=len(seqs),
            table_stride=batch.block_tables.stride(0),
            block_size=batch.block_size,
        )
        return cls(arguments, (seqs, batch.query_start, batch.context_lens, batch.block_tables))

    def point_at(self, output: Tensor, query: Tensor, layer: LayerKV, scale: float) -> None:
        super().point_at(output, query, layer, scale)
        # Few sequences: their heads apart, so that all threads have work.
        few = self.arguments.num_seqs < 4 * torch.get_num_threads()
        self.arguments.kv_together = 1 if few else layer.key.shape[2]


class PrefillStep(Step):
    """The sequences of a batch with several query tokens, for `CpuKernels.prefill`."""

    @classmethod
    def make(cls, batch: AttentionBatch) -> PrefillStep:
        """Rows that see no key are in no task."""
        tasks = []  # sequence, first and last row, keys that the first row sees
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        for seq, length in enumerate(lengths):
            begin, end = starts[seq], starts[seq + 1]
            rows = range(max(begin, end - length), end, TASK_ROWS) if end - begin > 1 else ()
            tasks += [(seq, row, min(row + TASK_ROWS, end), length - (end - row) + 1) for row in rows]
        longest_first = torch.tensor(tasks[::-1], dtype=torch.int32)
        arguments = Prompts(
            tasks=longest_first.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            num_tasks=len(tasks),
            table_stride=batch.block_tables.stride(0),
            block_size=batch.block_size,
        )
        return cls(arguments, (longest_first, batch.block_tables))


class CpuKernels:
    """The compiled kernels. All tensors are on the CPU and of one dtype, float32 or bfloat16.

    choice: how the products of this process are made.
    """

    def __init__(self, library: ctypes.CDLL, choice: Choice) -> None:
        self.library, self.choice = library, choice
        self._decode, self._prefill, self._product, self._layers = {}, {}, {}, {}
        self._norm, self._rotate, self._write = {}, {}, {}
        for dtype, name in NAMES.items():
            functions = Functions.in_dll(library, f"functions_{name}")
            self._decode[dtype] = getattr(library, f"decode_{name}")
            self._prefill[dtype] = getattr(library, f"prefill_{name}")
            self._product[dtype] = getattr(library, f"product_{name}")
            self._layers[dtype] = getattr(library, f"layers_{name}")
            self._layers[dtype].restype = c_int64
            self._norm[dtype], self._rotate[dtype] = functions.norm, functions.turn
            self._write[dtype] = functions.store
            calibrate.tell(library, name, choice.ways[name])

    def decode(self, output: Tensor, query: Tensor, layer: LayerKV, step: DecodeStep, scale: float) -> None:
        """Fill the rows of `output` that belong to the sequences of `step`; the others are left alone.

        query, output: [num_tokens, num_query_heads, head_size], output contiguous, heads of query dense.
        """
        step.point_at(output, query, layer, scale)
        self._decode[query.dtype](ctypes.byref(step.arguments))

    def prefill(self, output: Tensor, query: Tensor, layer: LayerKV, step: PrefillStep, scale: float) -> None:
        """As `decode`, for the sequences of `step` with several query tokens each."""
        step.point_at(output, query, layer, scale)
        self._prefill[query.dtype](ctypes.byref(step.arguments))

    def write_kv(self, layer: LayerKV, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store a row per token. Raises IndexError for slots beyond the cache.

        key, value: [num_tokens, num_kv_heads, head_size], views of rows of one stride, heads dense.
        """
        num_slots = layer.key.shape[0] * layer.key.shape[1]
        beyond = self._write[key.dtype](
            key.data_ptr(), value.data_ptr(), slots.data_ptr(), layer.key.data_ptr(), layer.value.data_ptr(),
            num_slots, slots.shape[0], key.stride(0), key.shape[1] * key.shape[2],
        )  # fmt: skip
        require_inside(beyond, len(slots), num_slots)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x, result: [rows, size], contiguous; size a multiple of `LANES`."""
        out = torch.empty_like(x)
        self._norm[x.dtype](x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the heads of x, [T, heads, D], in place; cos, sin: [T, 1, D / 2], a multiple of `LANES`."""
        self._rotate[x.dtype](
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.shape[0], x.stride(0), x.shape[1], cos.shape[2]
        )
        return x

    def multiplies_fast(self, dtype: torch.dtype) -> bool:
        """Whether `product` serves, and not torch's products, which are as fast or faster here."""
        return self.choice.ways.get(NAMES.get(dtype, ""), "torch") != "torch"

    def product(self, x: Tensor, weight: Product, out: Tensor) -> None:
        """out = x · weightᵀ and what follows. x, out: [rows, columns], contiguous; ARGMAX: int64 [rows]."""
        weight.x, weight.out, weight.rows = x.data_ptr(), out.data_ptr(), x.shape[0]
        self._product[x.dtype](ctypes.byref(weight))

    def run_layers(self, step: Layers, dtype: torch.dtype) -> None:
        """All layers of a model. Raises IndexError for slots beyond the cache."""
        require_inside(self._layers[dtype](ctypes.byref(step)), step.rows, step.num_slots)


def require_inside(beyond: int, count: int, num_slots: int) -> None:
    """Raise IndexError if some of the slots of a step, `beyond` of `count`, are beyond the cache."""
    if beyond:
        raise IndexError(f"{beyond} of {count} slots are beyond the {num_slots} slots of the cache")


def can_decode(query: Tensor, layer: LayerKV) -> bool:
    """Whether the kernel reads these: on the CPU, one dtype, not quantised, a head size it has lanes for."""
    size = query.shape[2]
    return (
        layer.key.dtype == query.dtype
        and query.dtype in NAMES
        and query.device.type == "cpu"
        and size % LANES == 0
        and size <= LARGEST_HEAD
        and query.stride()[1:] == (size, 1)
        and layer.key.is_contiguous()
        and layer.value.is_contiguous()
    )


def can_prefill(query: Tensor, layer: LayerKV, kernels: CpuKernels) -> bool:
    """Whether the kernel reads these and beats torch: its time goes into products."""
    return (
        query.shape[2] % (2 * LANES) == 0
        and kernels.multiplies_fast(query.dtype)
        and can_decode(query, layer)
    )


def can_write(layer: LayerKV, key: Tensor, value: Tensor, slots: Tensor) -> bool:
    """Whether the kernel copies these rows into this cache as they are; of wrong ones torch says what is."""
    return (
        slots.dtype == torch.int64
        and slots.shape == key.shape[:1]
        and slots.is_contiguous()
        and layer.key.dtype == key.dtype == value.dtype
        and key.dtype in NAMES
        and key.device.type == "cpu"
        and key.shape == value.shape
        and key.shape[1:] == layer.key.shape[2:]
        and key.stride() == value.stride()
        and key.stride()[1:] == (key.shape[2], 1)
        and layer.key.is_contiguous()
        and layer.value.is_contiguous()
    )


@cache
def load() -> CpuKernels | None:
    """The kernels, built now if need be; None, with one warning, where they cannot be."""
    library = build.load()
    if library is None:
        return None
    try:
        require_same_layout(library)
    except LayoutError as error:
        warnings.warn(f"the CPU runs plain torch, the kernels do not fit abi.py: {error}", stacklevel=2)
        return None
    return CpuKernels(library, calibrate.choice_for(library))
