"""Watching kernels in Triton's interpreter: what they read, and whether the order of their programs matters.

Both functions reach into the interpreter of the pinned Triton; they need TRITON_INTERPRET=1 and tensors on
the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass
class Reads:
    """Bytes that kernels loaded from the watched tensors, each load counted."""

    num_bytes: int = 0


@contextmanager
def counted_reads(*tensors: Tensor) -> Iterator[Reads]:
    """Count what kernels load from `tensors` while the context is open. Lanes behind a mask do not count.

    Loads are counted as the kernel asks for them; a GPU's caches may answer some without going to memory.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    reads = Reads()
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    original = builder.create_masked_load

    def counting(pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(pointers, mask, *args, **kwargs)
        live = np.broadcast_to(mask.data, pointers.data.shape)
        for start, end in ranges:
            inside = (pointers.data >= start) & (pointers.data < end) & live
            reads.num_bytes += int(inside.sum()) * result.data.itemsize
        return result

    builder.create_masked_load = counting
    try:
        yield reads
    finally:
        del builder.create_masked_load  # the class's own method shows again


@contextmanager
def reversed_programs() -> Iterator[None]:
    """Run the programs of each launch from the last to the first. A GPU promises no order at all."""
    from triton.runtime.interpreter import interpreter_builder as builder

    original = builder.set_grid_idx

    def from_the_end(*index: int) -> None:
        original(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    builder.set_grid_idx = from_the_end
    try:
        yield
    finally:
        del builder.set_grid_idx
