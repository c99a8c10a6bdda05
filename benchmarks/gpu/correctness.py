"""Every kernel in every data type against float64, on fresh random inputs.

Outputs and scratch are NaN before a kernel runs, so what it leaves unwritten shows, and so is all it must not
read (`problems.py`). A relative error is ||out - expected|| / ||expected||; NaN never passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from benchmarks.gpu.part import Part
from benchmarks.gpu.problems import (
    Heads,
    Problem,
    expected,
    make_problem,
    poison,
    poisoned_allocations,
    relative_error,
)
from minipaged.attention.kernels.decode import decode_launch
from minipaged.attention.kernels.decode_grouped import decode_grouped_launch
from minipaged.attention.kernels.prefill import prefill_launch
from minipaged.attention.quantize import is_quantized, quantize_rows
from minipaged.attention.triton_backend import TritonBackend, decode_launches
from minipaged.cache.block_table import BlockCopy
from minipaged.cache.storage import KVStorage
from minipaged.memory import KVSpec

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = [
    Heads(8, 4, 128, block_size=16),
    Heads(3, 3, 64, block_size=16),
    Heads(2, 8, 80, block_size=8),
    Heads(1, 32, 112, block_size=128),
    Heads(2, 5, 256, block_size=32),
]
TINY_HEADS = [Heads(2, 3, 16, block_size=4)]

# (query tokens, keys) of each sequence: none, one, around a block, a prefix hit, a chunk, a whole prompt
RAGGED = [(0, 0), (1, 1), (5, 5), (16, 16), (17, 33), (64, 64), (100, 1000), (1, 700), (128, 129)]
DECODE = [(1, 1), (0, 0), (1, 15), (1, 16), (1, 17), (1, 127), (1, 1000), (1, 4097)]
SPLIT = [(1, 33), (1, 9000)]
TINY_RAGGED, TINY_DECODE, TINY_SPLIT = (
    [(0, 0), (5, 5), (3, 9), (1, 7)],
    [(1, 1), (0, 0), (1, 9)],
    [(1, 3), (1, 300)],
)

Run = Callable[[Tensor, Problem, TritonBackend], None]


def run_decode(output: Tensor, p: Problem, backend: TritonBackend) -> None:
    decode_launch(output, p.query, p.layer, p.batch, p.scale).run()


def run_grouped(output: Tensor, p: Problem, backend: TritonBackend) -> None:
    decode_grouped_launch(output, p.query, p.layer, p.batch, p.scale, target=backend.target).run()


def run_split(output: Tensor, p: Problem, backend: TritonBackend) -> None:
    launches = decode_launches(output, p.query, p.layer, p.batch, p.scale, backend.target)
    if len(launches) != 2:
        raise RuntimeError(f"a context of {p.batch.max_context_len} keys was not cut into parts")
    for launch in launches:
        launch.run()


def run_prefill(output: Tensor, p: Problem, backend: TritonBackend) -> None:
    prefill_launch(output, p.query, p.layer, p.batch, p.scale, target=backend.target).run()


def run_backend(output: Tensor, p: Problem, backend: TritonBackend) -> None:
    output.copy_(backend.paged_attention(p.query, p.layer, p.batch, scale=p.scale))


def kernels(tiny: bool) -> list[tuple[str, list[tuple[int, int]], Run]]:
    """Each kernel with the sequences it is tried on."""
    ragged, decode, split = (TINY_RAGGED, TINY_DECODE, TINY_SPLIT) if tiny else (RAGGED, DECODE, SPLIT)
    return [
        ("decode", decode, run_decode),
        ("decode_grouped", decode, run_grouped),
        ("decode_split", split, run_split),
        ("prefill", ragged, run_prefill),
        ("prefill", decode, run_prefill),
        ("backend", ragged, run_backend),
        ("backend", decode, run_backend),
    ]


def combinations(part: Part) -> Iterator[tuple[torch.dtype, torch.dtype, Heads]]:
    """Query data type, KV data type and heads: all heads in the plain types, some in the quantised ones."""
    all_heads = TINY_HEADS if part.dry_run else HEADS
    half = torch.bfloat16 if part.target.has_bfloat16 and not part.dry_run else torch.float16
    quantised = [torch.int8] + ([torch.float8_e4m3fn] if part.target.has_float8 else [])
    for kv_dtype in quantised:
        for heads in all_heads[:2]:
            yield half, kv_dtype, heads
    plain = [torch.float16, torch.float32] + ([torch.bfloat16] if half is torch.bfloat16 else [])
    for heads in all_heads:
        for dtype in plain:
            yield dtype, dtype, heads


def run(part: Part) -> None:
    """Check every combination; entries under "checks". A kernel that raises has failed."""
    backend = TritonBackend(part.device)
    for dtype, kv_dtype, heads in combinations(part):
        check_writing(part, backend, dtype, kv_dtype, heads)
        check_copying(part, backend, kv_dtype, heads)
        for name, sequences, kernel in kernels(part.dry_run):
            label = {"query": name_of(dtype), "kv": name_of(kv_dtype), "heads": asdict(heads)}
            try:
                problem = make_problem(sequences, heads, dtype, kv_dtype, backend, part.device)
                error = try_kernel(kernel, problem, backend)
            except Exception as failure:  # a kernel that does not compile or launch is a finding, not the end
                part.add("checks", kernel=name, **label, passed=False, error=repr(failure))
                continue
            passed = error <= LIMITS[dtype]
            part.add("checks", kernel=name, **label, passed=passed, error=error, limit=LIMITS[dtype])


def try_kernel(kernel: Run, problem: Problem, backend: TritonBackend) -> float:
    """The relative error of one kernel on one problem."""
    output = torch.empty_like(problem.query)
    poison(output)
    with poisoned_allocations():
        kernel(output, problem, backend)
    return relative_error(output, expected(problem))


def check_writing(
    part: Part, backend: TritonBackend, dtype: torch.dtype, kv_dtype: torch.dtype, heads: Heads
) -> None:
    """Keys and values land in their slots and nowhere else, quantised as plain torch does it.

    The scales may differ in the last bit, for a GPU divides in its own way; given them, the values may not.
    """
    length = 2 * heads.block_size + 1
    problem = make_problem([(length, length)], heads, dtype, kv_dtype, backend, part.device)
    slots = problem.batch.slot_mapping
    layer, passed = problem.layer, True
    for cache, scales, rows in (
        (layer.key, layer.key_scale, problem.key),
        (layer.value, layer.value_scale, problem.value),
    ):
        expected_rows = rows
        if scales is not None and is_quantized(kv_dtype):
            stored = scales.flatten(0, 1)[slots]
            passed &= torch.allclose(stored, quantize_rows(rows, kv_dtype)[1], rtol=1e-6, atol=0)
            passed &= int(scales.isnan().sum()) == scales.numel() - stored.numel()
            expected_rows, _ = quantize_rows(rows, kv_dtype, stored)
        passed &= torch.equal(cache.flatten(0, 1).float()[slots], expected_rows.float())
    part.add(
        "checks",
        kernel="write_kv",
        query=name_of(dtype),
        kv=name_of(kv_dtype),
        heads=asdict(heads),
        passed=passed,
    )


def check_copying(part: Part, backend: TritonBackend, kv_dtype: torch.dtype, heads: Heads) -> None:
    """Blocks are copied bit for bit, also where one block is both read and written."""
    spec = KVSpec(2, heads.num_kv_heads, heads.head_size, kv_dtype)
    ours, theirs = (KVStorage(spec, 6, heads.block_size, device=part.device) for _ in range(2))
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        mine.view(torch.uint8).random_(0, 255)
        other.view(torch.uint8).copy_(mine.view(torch.uint8))
    copies = [BlockCopy(0, 1), BlockCopy(1, 4), BlockCopy(4, 0)]
    backend.copy_blocks(ours, copies)
    theirs.copy_blocks(copies)
    pairs = zip(ours.tensors, theirs.tensors, strict=True)
    passed = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    part.add("checks", kernel="copy_blocks", kv=name_of(kv_dtype), heads=asdict(heads), passed=passed)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
