"""Attention problems with poisoned surroundings, and what float64 says their solution is.

Whatever a kernel must not read is NaN or the largest integer: unused slots, the padding of the block tables.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.quantize import dequantize_rows
from minipaged.attention.triton_backend import TritonBackend
from minipaged.cache.storage import KVStorage, LayerKV
from minipaged.memory import KVSpec, blocks_for


@dataclass(frozen=True)
class Heads:
    """KV heads, query heads on each, head size, block size."""

    num_kv_heads: int
    group: int
    head_size: int
    block_size: int


@dataclass(frozen=True)
class Problem:
    """A batch, its queries, and a poisoned cache in which only the visible rows are alive."""

    query: Tensor
    layer: LayerKV
    batch: AttentionBatch
    key: Tensor  # the rows to write: [num_tokens, num_kv_heads, head_size]
    value: Tensor
    scale: float


def poison(tensor: Tensor) -> None:
    """Fill with what shows wherever it is used: NaN, or the largest integer."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in this encoding
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let torch.empty give NaN, so that what a kernel leaves unwritten shows."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def make_problem(
    sequences: list[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    backend: TritonBackend,
    device: torch.device,
) -> Problem:
    """Random keys and values, written by the backend's own `write_kv` into a poisoned cache."""
    counts = [blocks_for(context, heads.block_size) for _, context in sequences]
    order = torch.randperm(sum(counts) + 3)[: sum(counts)]
    tables = [part.tolist() for part in order.split(counts)]
    query_lens, context_lens = [q for q, _ in sequences], [c for _, c in sequences]
    spec = KVSpec(1, heads.num_kv_heads, heads.head_size, kv_dtype)
    storage = KVStorage(spec, sum(counts) + 3, heads.block_size, device=device)
    for tensor in storage.tensors:
        poison(tensor)
    whole = AttentionBatch.build(tables, context_lens, context_lens, heads.block_size, device)
    shape = (whole.num_tokens, heads.num_kv_heads, heads.head_size)
    key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    backend.write_kv(storage.layer(0), key, value, whole.slot_mapping)
    batch = AttentionBatch.build(tables, query_lens, context_lens, heads.block_size, device)
    for row, count in enumerate(counts):
        batch.block_tables[row, count:] = 2**30
    num_query_heads = heads.num_kv_heads * heads.group
    query = torch.randn(batch.num_tokens, num_query_heads, heads.head_size, device=device).to(dtype)
    return Problem(query, storage.layer(0), batch, key, value, heads.head_size**-0.5)


def expected(problem: Problem) -> Tensor:
    """Dense causal attention in float64 over what the cache stores, one sequence at a time; on the CPU."""
    batch, block_size = problem.batch, problem.batch.block_size
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    key, value = stored_rows(problem.layer)
    output = torch.zeros(problem.query.shape, dtype=torch.float64)
    group = problem.query.shape[1] // key.shape[1]
    for seq, context in enumerate(contexts):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        positions = torch.arange(context)
        blocks = batch.block_tables[seq].cpu().long()[positions // block_size]
        slots = blocks * block_size + positions % block_size
        query = problem.query[first:last].cpu().double().transpose(0, 1)  # [Hq, rows, D]
        keys = key[slots].transpose(0, 1).repeat_interleave(group, 0)  # [Hq, context, D]
        values = value[slots].transpose(0, 1).repeat_interleave(group, 0)
        scores = query @ keys.transpose(1, 2) * problem.scale  # [Hq, rows, context]
        last_visible = torch.arange(context - (last - first), context)[:, None]
        scores = scores.masked_fill(positions > last_visible, float("-inf"))
        output[first:last] = (torch.softmax(scores, -1) @ values).transpose(0, 1)
    return output


def stored_rows(layer: LayerKV) -> tuple[Tensor, Tensor]:
    """What the slots stand for: two float64 tensors [num_slots, num_kv_heads, head_size] on the CPU."""
    pairs = ((layer.key, layer.key_scale), (layer.value, layer.value_scale))
    rows = []
    for tensor, scales in pairs:
        values = tensor.cpu()
        if scales is not None:
            values = dequantize_rows(values, scales.cpu(), torch.float64)
        rows.append(values.double().flatten(0, 1))
    return rows[0], rows[1]


def relative_error(output: Tensor, reference: Tensor) -> float:
    """||output - reference|| / ||reference||; NaN if anything is."""
    return float((output.cpu().double() - reference).norm() / reference.norm())
