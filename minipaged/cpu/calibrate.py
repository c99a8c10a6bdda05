"""Which products serve on this machine: measured once, when the library is built, and kept beside it.

No processor tells what is fast on it. AMX multiplies ten times as fast as vectors; the hint that feeds one
processor from memory starves another; without wide vectors torch's own products beat ours. So each way is
timed, for each dtype, and one way serves a whole process, the same for every number of rows, since two ways
differ in the last bits of a sum.

The environment variable MINIPAGED_PRODUCTS names a way instead: one of `WAYS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.cpu.abi import NAMES, After, Product
from minipaged.cpu.build import move_durably
from minipaged.cpu.packing import PANEL, WORD_BYTES, PackedLinear, give_freed_memory_back, packed_products_run

HINTS = {"none": -1, "nta": 0, "t0": 3}  # how a weight is asked for: `enum Prefetch` of choice.h
# Instructions of our own kernels and the hint that goes with them; and torch's products, packed for oneDNN.
# Of those that are about as fast the first is taken.
WAYS = (
    *("amx-t0", "amx-none", "amx-nta"),
    *("vectors-nta", "vectors-t0", "vectors-none"),
    "torch",
)
# What a product alone does not feel: norm, gate and sum are a part of our products, and all layers one call;
# and a hint decides what else stays in the caches.
INSTRUCTIONS_TIE, HINTS_TIE = 1.1, 1.25
VARIABLE = "MINIPAGED_PRODUCTS"

DEPTH, WEIGHT_BYTES = 1024, 64 * 2**20  # a weight that most processors have to read from memory
# Rows, and by how much the weight is cut: one request, some, many; and a prompt, whose time is computing.
PRODUCTS = ((1, 1), (8, 1), (32, 2), (128, 8))
MOST_ROUNDS, LEAST_ROUNDS, SECONDS = 8, 3, 0.6  # for each dtype

Milliseconds = Mapping[str, float]
"""way -> what all `PRODUCTS` took together, each at its best."""


@dataclass(frozen=True)
class Choice:
    """How the products of a process are made.

    ways: name of a dtype -> one of `WAYS`. milliseconds: name of a dtype -> what each way took; empty where
    nothing was measured.
    """

    ways: Mapping[str, str]
    milliseconds: Mapping[str, Milliseconds] = field(default_factory=dict)

    @classmethod
    def pinned(cls, way: str, *, tiles: bool) -> Choice:
        """The same way for every dtype; float32, for which AMX has no product, takes vectors and that hint.

        Raises ValueError for a name that is no way, and for AMX where the process may not use tiles.
        """
        if way not in WAYS:
            raise ValueError(f"{VARIABLE} is {way!r}, the ways to multiply are {', '.join(WAYS)}")
        if way.startswith("amx") and not tiles:
            raise ValueError(f"{VARIABLE} is {way!r}, this processor or its system allows no AMX")
        return cls({"float32": way.replace("amx", "vectors"), "bfloat16": way})

    def lines(self) -> list[str]:
        """For each dtype what serves it, and each figure that says why."""
        return [f"{name}: {way} ({self._figures(name)})" for name, way in self.ways.items()]

    def _figures(self, name: str) -> str:
        took = self.milliseconds.get(name)
        if took is None:
            return f"{VARIABLE} says so"
        return "ms: " + ", ".join(f"{way} {took[way]:.1f}" for way in sorted(took, key=took.__getitem__))


def choice_for(library: ctypes.CDLL) -> Choice:
    """What MINIPAGED_PRODUCTS says, else what is kept beside the library, else what is measured now."""
    tiles = bool(library.tiles_allowed())
    if way := os.environ.get(VARIABLE):
        return Choice.pinned(way, tiles=tiles)
    file = Path(library._name).with_suffix(".json")
    ways = {name: ways_of(name, tiles) for name in NAMES.values()}
    measured = read_times(file, ways)
    if measured is None:
        measured = {name: measure(library, dtype, ways[name]) for dtype, name in NAMES.items()}
        with contextlib.suppress(OSError):  # a full disk: it is measured again next time
            write_times(file, measured)
    return Choice({name: fastest(measured[name], ways[name]) for name in ways}, measured)


def ways_of(name: str, tiles: bool) -> list[str]:
    """The ways to multiply in a dtype; `tiles`: whether this process may use AMX, which is for bfloat16."""
    return [way for way in WAYS if not way.startswith("amx") or (tiles and name == "bfloat16")]


def fastest(milliseconds: Milliseconds, ways: Sequence[str]) -> str:
    """The instructions whose best way is the fastest, then their hint; of about equal ones the first."""
    best: dict[str, float] = {}
    for way in ways:
        instructions = way.partition("-")[0]
        best[instructions] = min(milliseconds[way], best.get(instructions, math.inf))
    chosen = next(name for name, time in best.items() if time <= INSTRUCTIONS_TIE * min(best.values()))
    of_these = [way for way in ways if way.partition("-")[0] == chosen]
    return next(way for way in of_these if milliseconds[way] <= HINTS_TIE * best[chosen])


def measure(library: ctypes.CDLL, dtype: torch.dtype, ways: Sequence[str]) -> dict[str, float]:
    """Milliseconds of each way for all `PRODUCTS`. The ways take turns, and the best of some rounds counts.

    In one thread, and by the time that it runs: other programs, which make threads wait for each other, then
    hardly count. What the library was told before is forgotten.
    """
    columns = WEIGHT_BYTES // (DEPTH * dtype.itemsize)
    weight = torch.ones(columns, DEPTH, dtype=dtype)  # packed in any order it is the same
    parts = [(rows, weight[: columns // cut]) for rows, cut in PRODUCTS]
    calls = {way: [_call(library, way, part, rows) for rows, part in parts] for way in ways}
    best = {way: [math.inf] * len(parts) for way in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begin = time.thread_time()
        for done in range(MOST_ROUNDS):
            if done >= LEAST_ROUNDS and time.thread_time() - begin > SECONDS:
                break
            for way in ways:
                tell(library, NAMES[dtype], way)
                for i, call in enumerate(calls[way]):
                    best[way][i] = min(best[way][i], _seconds(call))
    finally:
        torch.set_num_threads(threads)
    del weight, parts, calls
    give_freed_memory_back()
    return {way: round(1e3 * sum(seconds), 3) for way, seconds in best.items()}


def tell(library: ctypes.CDLL, name: str, way: str) -> None:
    """Have our products of a dtype be made this way; where torch's serve, nobody asks for ours."""
    instructions, _, hint = way.partition("-")
    getattr(library, f"choose_{name}")(instructions == "amx", HINTS.get(hint, HINTS["nta"]))


def read_times(file: Path, ways: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]] | None:
    """What was measured before; None unless the file has a time for each of `ways` of each dtype."""
    try:
        found = json.loads(file.read_text())
        times = {name: {way: float(found[name][way]) for way in wanted} for name, wanted in ways.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = all(0 < time < math.inf for of_dtype in times.values() for time in of_dtype.values())
    return times if whole else None


def write_times(file: Path, measured: Mapping[str, Milliseconds]) -> None:
    """Keep it, whole or not at all: another process may read or write it now. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        scratch = Path(folder) / file.name
        scratch.write_text(json.dumps(measured, indent=2) + "\n")
        move_durably(scratch, file)


def _call(library: ctypes.CDLL, way: str, weight: Tensor, rows: int) -> Callable[[], object]:
    """One product of `rows` rows with a weight [columns, depth] of ones."""
    columns, depth = weight.shape
    x, out = weight.new_ones(rows, depth), weight.new_empty(rows, columns)
    if way == "torch":
        if packed_products_run(weight.dtype):
            return partial(PackedLinear(weight), x)
        return partial(F.linear, x, weight)
    product = Product(
        x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), rows=rows,
        words=depth * weight.itemsize // WORD_BYTES, panels=columns // PANEL, after=After.ROUND,
    )  # fmt: skip
    run = getattr(library, f"product_{NAMES[weight.dtype]}")

    def call() -> tuple[Tensor, ...]:
        run(ctypes.byref(product))
        return x, weight, out  # named here, they live as long as this function

    return call


def _seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin
