"""Timing decode: how much of the card's copy bandwidth it reaches, and what paging and small blocks cost."""

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.data import PagedInputs, make_inputs
from benchmarks.gpu.part import Part
from benchmarks.gpu.predict import predict
from benchmarks.gpu.shapes import AttentionShape, decode_shapes, main_decode_shape, tiny
from benchmarks.gpu.timing import Call, Timing, compare, copy_bandwidth, matrix_rate
from minipaged.attention.kernels.decode import decode_launch
from minipaged.attention.triton_backend import TritonBackend

SECONDS_PER_CALL = 1.0


def run(part: Part) -> None:
    """Entries under "rates" (what the card reaches) and "figures" (one per shape and variant)."""
    backend = TritonBackend(part.device)
    rates = measure_rates(part)
    main = main_decode_shape()
    variants(part, backend, rates, tiny(main) if part.dry_run else main)
    for shape in decode_shapes():
        if part.seconds_left < 10 * SECONDS_PER_CALL:
            part.add("notes", text=f"no time left for {shape.name}")
            break
        try:
            inputs = make_inputs(tiny(shape) if part.dry_run else shape, part.device, part.dtype)
            calls = {shape.name: attend(inputs, backend)}
            found = compare(calls, inputs.num_sets, part.device, SECONDS_PER_CALL)
        except torch.OutOfMemoryError:
            part.add("notes", text=f"not enough memory for {shape.name}")
            continue
        add_figure(part, shape.name, inputs.shape, found[shape.name], rates)


def measure_rates(part: Part) -> tuple[float, float]:
    """The card's copy bandwidth (bytes/s) and matrix rate (operations/s), on this card and in this run."""
    num_bytes, size = (2**16, 32) if part.dry_run else (2**32, 8192)
    if part.device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info()[0] // 4)
    bandwidth, copy = copy_bandwidth(part.device, num_bytes, SECONDS_PER_CALL)
    part.add("rates", name="copy", per_second=bandwidth, bytes=2 * num_bytes, **copy.as_dict())
    flops, product = matrix_rate(part.device, size, part.dtype, SECONDS_PER_CALL)
    part.add("rates", name="matmul", per_second=flops, operations=2 * size**3, **product.as_dict())
    return bandwidth, flops


def attend(inputs: PagedInputs, backend: TritonBackend) -> Call:
    """The backend's attention on the sets of inputs."""
    return lambda i: backend.paged_attention(inputs.query, inputs.layer(i), inputs.batch, scale=inputs.scale)


def attend_readable(inputs: PagedInputs) -> Call:
    """The kernel that the course shows first, which reads every key once per query head."""
    output = torch.empty_like(inputs.query)
    return lambda i: decode_launch(output, inputs.query, inputs.layer(i), inputs.batch, inputs.scale).run()


def variants(part: Part, backend: TritonBackend, rates: tuple[float, float], shape: AttentionShape) -> None:
    """One shape in several forms, in turn: shuffled or identity table, large blocks, quantised, readable."""

    def make(shape: AttentionShape = shape, **options: Any) -> PagedInputs:
        return make_inputs(shape, part.device, part.dtype, **options)

    inputs = {
        "shuffled": make(),
        "identity": make(shuffled=False),
        "block 128": make(replace(shape, block_size=128)),
        "int8": make(kv_dtype=torch.int8),
    }
    if part.target.has_float8 and not part.dry_run:
        inputs["float8_e4m3fn"] = make(kv_dtype=torch.float8_e4m3fn)
    calls = {name: attend(made, backend) for name, made in inputs.items()}
    measure_launching(part, calls["shuffled"])
    calls["readable"] = attend_readable(inputs["shuffled"])
    num_sets = min(made.num_sets for made in inputs.values())
    found = compare(calls, num_sets, part.device, SECONDS_PER_CALL * len(calls))
    for name, timing in found.items():
        shape = inputs.get(name, inputs["shuffled"]).shape
        add_figure(part, f"{main_decode_shape().name} {name}", shape, timing, rates)


def measure_launching(part: Part, call: Call) -> None:
    """What one call costs the host, which the timings of captured graphs leave out."""
    call(0)
    if part.device.type == "cuda":
        torch.cuda.synchronize()
    count = 1 if part.dry_run else 50
    start = time.perf_counter()
    for _ in range(count):
        call(0)
    part.add("rates", name="host per call", seconds=(time.perf_counter() - start) / count)


def add_figure(
    part: Part, name: str, shape: AttentionShape, timing: Timing, rates: tuple[float, float]
) -> None:
    """Keep a timing beside what bytes and rates predict, and the share of the copy bandwidth it reached."""
    floor = predict(shape, *rates)
    kv_rate = shape.kv_bytes / timing.median
    part.add(
        "figures",
        name=name,
        **timing.as_dict(),
        kv_bytes=shape.kv_bytes,
        predicted=floor.seconds,
        bound=floor.bound,
        kv_bytes_per_second=kv_rate,
        share_of_copy=kv_rate / rates[0],
    )
