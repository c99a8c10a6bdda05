"""Timing prefill beside torch's flash attention on the same prompts without paging."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.data import PagedInputs, dense, make_inputs
from benchmarks.gpu.decode import SECONDS_PER_CALL, add_figure, attend, measure_rates
from benchmarks.gpu.part import Part
from benchmarks.gpu.problems import relative_error
from benchmarks.gpu.shapes import prefill_shapes, tiny
from benchmarks.gpu.timing import Call, compare
from minipaged.attention.triton_backend import TritonBackend

NUM_SETS = 2  # prefill is bound by arithmetic: the cache hardly matters
AGREEMENT = 2e-2


def run(part: Part) -> None:
    """Entries under "figures": ours for every shape, torch's for whole prompts."""
    backend = TritonBackend(part.device)
    rates = measure_rates(part)
    for shape in prefill_shapes():
        size = tiny(shape) if part.dry_run else shape
        inputs = make_inputs(size, part.device, part.dtype, num_sets=NUM_SETS)
        calls = {"": attend(inputs, backend)}
        if all(context == size.query_len for context in size.context_lens):
            add_flash(part, inputs, calls)
        for name, timing in compare(calls, NUM_SETS, part.device, SECONDS_PER_CALL * 2).items():
            add_figure(part, shape.name + name, inputs.shape, timing, rates)


def add_flash(part: Part, inputs: PagedInputs, calls: dict[str, Call]) -> None:
    """Add torch's flash attention to the calls, once it is seen to agree with ours."""
    call = flash(inputs)
    try:
        theirs = call(0).cpu().double()
    except RuntimeError as failure:  # torch has no flash kernel for this card
        part.add("notes", text=f"no flash SDPA: {failure}".splitlines()[0])
        return
    error = relative_error(calls[""](0), theirs)
    passed = error <= AGREEMENT
    part.add("checks", kernel="prefill beside SDPA", passed=passed, error=error, limit=AGREEMENT)
    calls[" flash SDPA"] = call


def flash(inputs: PagedInputs) -> Call:
    """torch's attention on dense prompts: its flash kernel on a GPU, whatever it has on a CPU."""
    num_seqs = len(inputs.shape.context_lens)
    # [tokens, Hq, D] -> [num_seqs, Hq, query_len, D]
    query = inputs.query.unflatten(0, (num_seqs, -1)).transpose(1, 2).contiguous()
    sets = [[t.transpose(1, 2).contiguous() for t in dense(inputs, i)] for i in range(inputs.num_sets)]
    backends = [SDPBackend.FLASH_ATTENTION] if query.is_cuda else [SDPBackend.MATH]

    def call(index: int) -> torch.Tensor:
        key, value = sets[index]
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=inputs.scale, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)

    return call
