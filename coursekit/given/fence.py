"""Running a kernel in Triton's interpreter so that it can touch nothing but its own tensors.

A pointer does not know where its tensor ends. Without this a wrong address would end the process, or silently
change memory that belongs to somebody else; with it the kernel raises IndexError where it went wrong. It
reaches into the interpreter of the pinned Triton and needs TRITON_INTERPRET=1.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def run_fenced(
    kernel: Any, grid: tuple[int, ...], args: Mapping[str, Any], skipped: Mapping[str, int] | None = None
) -> None:
    """Run the programs of `grid`. Raises what the kernel raises; IndexError outside its tensors.

    `skipped`: by the name of its argument, how many elements of a tensor lie in front of those that are
    there. A small tensor then stands for the end of one that would not fit in this machine.
    """
    from triton.runtime.interpreter import InterpreterError

    try:
        with fence(args, skipped or {}):
            kernel[grid](**args)
    except InterpreterError as error:
        cause: BaseException = error
        while isinstance(cause, InterpreterError) and cause.__cause__:  # one for each call of a function
            cause = cause.__cause__
        raise cause from None


@contextmanager
def fence(args: Mapping[str, Any], skipped: Mapping[str, int]) -> Iterator[None]:
    """While it is open, kernels reach the tensors among `args` and nothing else."""
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    tensors = {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}
    load, store = builder.create_masked_load, builder.create_masked_store

    def real(pointers: Any, mask: Any, does: str) -> Any:
        # A comparison in the interpreter makes int32 of what is true: only as truths can it be inverted.
        addresses, live = np.broadcast_arrays(pointers.data, mask.data.astype(bool))
        moved, allowed = addresses.copy(), ~live
        for name, tensor in tensors.items():
            skip = skipped.get(name, 0) * tensor.element_size()
            start = tensor.data_ptr() + skip
            inside = ~allowed & (addresses >= start) & (addresses < start + extent(tensor))
            moved[inside] -= np.uint64(skip)
            allowed |= inside
        if not allowed.all():
            program, count = tuple(builder.grid_idx), int((~allowed).sum())
            raise IndexError(f"program {program} {does} outside of its tensors, at {count} addresses")
        return TensorHandle(moved, pointers.dtype)

    builder.create_masked_load = lambda ptr, mask, *more: load(real(ptr, mask, "reads"), mask, *more)
    builder.create_masked_store = lambda ptr, value, mask, *more: store(
        real(ptr, mask, "writes"), value, mask, *more
    )
    try:
        yield
    finally:
        del builder.create_masked_load, builder.create_masked_store  # the class's own methods show again


@contextmanager
def counted_reads(*tensors: torch.Tensor) -> Iterator[list[int]]:
    """While it is open, count the elements of each tensor that kernels read; one read twice counts twice."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counts = [0] * len(tensors)
    load = builder.create_masked_load

    def counting(pointers: Any, mask: Any, *more: Any) -> Any:
        addresses, live = np.broadcast_arrays(pointers.data, mask.data.astype(bool))
        for i, tensor in enumerate(tensors):
            start = tensor.data_ptr()
            counts[i] += int((live & (addresses >= start) & (addresses < start + extent(tensor))).sum())
        return load(pointers, mask, *more)

    builder.create_masked_load = counting
    try:
        yield counts
    finally:
        if vars(builder).get("create_masked_load") is counting:
            del builder.create_masked_load


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to just beyond the last element of a tensor, whatever its strides."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
