"""Small kernels with known faults, compiled by a child process; prints their reports as JSON.

Run as a script without TRITON_INTERPRET: `python tests/coursekit/aot/toy_kernels.py sm_90`.
"""

import json
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from coursekit.aot.cases import KernelCase
from coursekit.aot.compile import compile_launch, specialise
from coursekit.aot.report import describe, listing_of
from coursekit.aot.table import marked
from minipaged.attention.launch import Launch
from minipaged.attention.targets import TARGETS


@triton.jit
def gather_sum(out_ptr, rows_ptr, table_ptr, count, stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Sum of `count` rows found through a table: an indirect load in a loop, as in paged attention."""
    lane = tl.arange(0, WIDTH)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, count, TILE):
        number = start + tl.arange(0, TILE)
        row = tl.load(table_ptr + number, mask=number < count, other=0)
        total += tl.load(rows_ptr + row[:, None] * stride + lane[None, :]).to(tl.float32)
    tl.store(out_ptr + lane, tl.sum(total, 0))


@triton.jit
def product(out_ptr, a_ptr, b_ptr, steps, SIZE: tl.constexpr, STAGE: tl.constexpr):
    """Accumulated products of SIZE x STAGE tiles: a tensor-core loop whose accumulator grows with SIZE."""
    row = tl.arange(0, SIZE)
    col = tl.arange(0, STAGE)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(0, steps):
        a = tl.load(a_ptr + (row[:, None] * STAGE + col[None, :]) + step * SIZE * STAGE)
        b = tl.load(b_ptr + (col[:, None] * SIZE + row[None, :]) + step * SIZE * STAGE)
        total += tl.dot(a, b)
    tl.store(out_ptr + row[:, None] * SIZE + row[None, :], total)


@dataclass(frozen=True)
class FakeParameter:
    """As much of Triton's KernelParam as `specialise` looks at."""

    name: str
    is_constexpr: bool = False
    do_not_specialize: bool = False


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gather_case(variant: str, width: int, stride: int, tile: int = 32) -> KernelCase:
    rows, table = empty(1000, stride), empty(1000, dtype=torch.int32)
    args: dict[str, Any] = {
        "out_ptr": empty(width, dtype=torch.float32),
        "rows_ptr": rows,
        "table_ptr": table,
    }
    args |= {"count": 1000, "stride": stride, "WIDTH": width, "TILE": tile}
    return KernelCase("gather_sum", variant, Launch(gather_sum, (1,), args), ("rows_ptr",), False)


def product_case(variant: str, size: int) -> KernelCase:
    args: dict[str, Any] = {"out_ptr": empty(size, size, dtype=torch.float32), "steps": 7}
    args |= {"a_ptr": empty(7, size, 64), "b_ptr": empty(7, 64, size), "SIZE": size, "STAGE": 64}
    return KernelCase("product", variant, Launch(product, (1,), args), ("a_ptr", "b_ptr"), True)


CASES = [
    gather_case("aligned", 128, 128),
    gather_case("unaligned", 128, 129),
    product_case("fits", 64),
    product_case("spills", 256),
]


def agrees_with_triton() -> bool:
    """Whether `specialise` says of each argument what Triton's run time says of it."""
    values = [empty(8), empty(8, dtype=torch.int8), empty(8, dtype=torch.bool), empty(8, dtype=torch.int64)]
    values += [1, 2, 16, 2**31 + 1, 2**31 + 16, 1.5, True, None]
    names = [f"argument{i}" for i in range(len(values))]
    kernel = SimpleNamespace(params=[FakeParameter(name) for name in names])
    known = specialise(Launch(kernel, (1,), dict(zip(names, values, strict=True))))
    for name, value in zip(names, values, strict=True):
        kind, key = native_specialize_impl(BaseBackend, value, False, True, True)
        ours = (known.signature[name], "D" if name in known.divisible else None)
        if ours != (kind, key if key == "D" else None):
            print(name, value, ours, (kind, key), file=sys.stderr)
            return False
    return True


def main(target_name: str) -> None:
    target = TARGETS[target_name]
    found: dict[str, Any] = {"agrees_with_triton": agrees_with_triton()}
    for case in CASES if target_name == "sm_80" else CASES[2:3]:
        compiled = compile_launch(case.launch, target)
        listings = {kind: marked(listing_of(compiled, kind)) for kind in ("ptx", "sass")}
        known = asdict(specialise(case.launch))
        found[case.variant] = {"report": asdict(describe(case, target, compiled)), "known": known} | listings
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
