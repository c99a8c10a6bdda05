"""Timing decode beside each peer that is there, ours and theirs in turn."""

import torch

from benchmarks.gpu.data import make_inputs
from benchmarks.gpu.decode import SECONDS_PER_CALL, attend
from benchmarks.gpu.part import Part
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.problems import relative_error
from benchmarks.gpu.shapes import main_decode_shape, tiny
from benchmarks.gpu.timing import compare
from minipaged.attention.triton_backend import TritonBackend

AGREEMENT = 2e-2  # a peer that computes something else must not be compared with


def run(part: Part) -> None:
    """Entries under "peers": name, both timings and the ratio, or why the peer was left out."""
    backend = TritonBackend(part.device)
    shape = tiny(main_decode_shape()) if part.dry_run else main_decode_shape()
    inputs = make_inputs(shape, part.device, part.dtype)
    ours = attend(inputs, backend)
    expected = ours(0).cpu().double()
    for name, make in PEERS.items():
        if part.dry_run and name == "FlexAttention paged":
            part.add("peers", name=name, skipped="not compiled in a dry run")
            continue
        try:
            with torch.inference_mode():
                call = make(inputs)
                error = relative_error(call(0), expected)
                if not error <= AGREEMENT:
                    raise RuntimeError(f"disagrees with ours: relative error {error:.3g}")
                found = compare(
                    {"ours": ours, "theirs": call}, inputs.num_sets, part.device, 2 * SECONDS_PER_CALL
                )
        except Exception as failure:  # not installed, or not for this card or these inputs: say so and go on
            part.add("peers", name=name, skipped=f"{type(failure).__name__}: {failure}".splitlines()[0])
            continue
        speed = found["theirs"].median / found["ours"].median
        part.add(
            "peers", name=name, ours=found["ours"].as_dict(), theirs=found["theirs"].as_dict(), speed=speed
        )
