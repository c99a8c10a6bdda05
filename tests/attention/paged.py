"""Random paged attention problems with a known answer, shared by the tests of this folder.

A problem hides its live keys in a pool that is NaN everywhere else, in shuffled physical blocks, behind block
tables whose padding names NaN blocks or blocks that do not exist.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.arguments import Tile
from minipaged.attention.kernels.decode import decode_launch
from minipaged.attention.kernels.decode_combine import decode_combine_launch
from minipaged.attention.kernels.decode_grouped import decode_grouped_launch
from minipaged.attention.kernels.decode_split import decode_split_launch
from minipaged.attention.kernels.prefill import prefill_launch
from minipaged.attention.quantize import dequantize_rows, is_quantized
from minipaged.attention.targets import TARGETS
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cache.storage import KVStorage, LayerKV
from minipaged.cpu.backend import CpuBackend
from minipaged.memory import KVSpec

TARGET = TARGETS["sm_90"]
POISON = (-1, 2**31 - 1)  # block ids that must never be looked up


@dataclass
class Problem:
    """A batch, its cache and its queries; `keys` and `values` are each sequence's [length, Hkv, D]."""

    batch: AttentionBatch
    storage: KVStorage
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    scale: float

    @property
    def layer(self) -> LayerKV:
        return self.storage.layer(0)


def poison(storage: KVStorage) -> None:
    """Fill every tensor with NaN, or with the largest magnitude where the dtype has no NaN."""
    for tensor in storage.tensors:
        if tensor.dtype == torch.int8:
            tensor.fill_(127)
        elif tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(float("nan"))


def make_problem(
    context_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_size: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    """A problem with the given lengths; by default every sequence that has keys brings one query."""
    generator = torch.Generator().manual_seed(seed)
    if query_lens is None:
        query_lens = [min(length, 1) for length in context_lens]
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 2
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    unused, shuffled = shuffled[:2], shuffled[2:]
    blocks = [[shuffled.pop() for _ in range(count)] for count in needed]
    storage = KVStorage(KVSpec(1, num_kv_heads, head_size, kv_dtype or dtype), num_blocks, block_size)
    poison(storage)

    everything = AttentionBatch.build(blocks, context_lens, context_lens, block_size)
    shape = (everything.num_tokens, num_kv_heads, head_size)
    key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    TorchBackend().write_kv(storage.layer(0), key, value, everything.slot_mapping)
    read = read_back(storage.layer(0), everything.slot_mapping)
    keys, values = (list(rows.split(list(context_lens))) for rows in read)

    batch = AttentionBatch.build(blocks, query_lens, context_lens, block_size)
    num_tokens, heads = batch.num_tokens, num_kv_heads * group
    query = torch.randn(num_tokens, heads, head_size, generator=generator).to(dtype)
    batch = replace(batch, block_tables=pad_with_poison(batch.block_tables, needed, [*unused, *POISON]))
    return Problem(batch, storage, query, keys, values, head_size**-0.5)


def pad_with_poison(tables: Tensor, used: Sequence[int], ids: Sequence[int]) -> Tensor:
    """The same tables with two more columns, every entry behind the used ones naming a block of `ids`."""
    wide = torch.zeros(len(used), tables.shape[1] + 2, dtype=torch.int32)
    for row, count in enumerate(used):
        wide[row, :count] = tables[row, :count]
        wide[row, count:] = torch.from_numpy(np.resize(np.array(ids, dtype=np.int32), wide.shape[1] - count))
    return wide


def read_back(layer: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """What the cache holds in `slots`, as float64 [num_slots, Hkv, D], so that rounding in the cache is not
    held against attention."""

    def read(cache: Tensor, scale: Tensor | None) -> Tensor:
        rows = cache.flatten(0, 1)[slots]
        if is_quantized(cache.dtype) and scale is not None:
            rows = dequantize_rows(rows, scale.flatten(0, 1)[slots])
        return rows.double()

    return read(layer.key, layer.key_scale), read(layer.value, layer.value_scale)


def dense_attention(problem: Problem) -> Tensor:
    """The right answer, from the contiguous keys and values: float64 [num_tokens, Hq, D]."""
    starts = problem.batch.query_start.tolist()
    outputs = []
    for seq, (keys, values) in enumerate(zip(problem.keys, problem.values, strict=True)):
        query = problem.query[starts[seq] : starts[seq + 1]].double()  # [queries, Hq, D]
        group = query.shape[1] // keys.shape[1]
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * problem.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - len(query) + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected; infinite where the output is not finite."""
    if not output.isfinite().all():
        return float("inf")
    difference = (output.double() - expected.double()).norm().item()
    return difference / max(expected.double().norm().item(), 1e-30)


def run_cpu(problem: Problem) -> Tensor:
    """With the compiled kernels of a CPU, where this machine has a compiler."""
    return CpuBackend().paged_attention(problem.query, problem.layer, problem.batch, scale=problem.scale)


def run_torch(problem: Problem) -> Tensor:
    return TorchBackend().paged_attention(problem.query, problem.layer, problem.batch, scale=problem.scale)


def blank_rows(query: Tensor) -> Tensor:
    """An output of NaN for each row of `query`, with a row after the last that no kernel may touch."""
    return torch.full((len(query) + 1, *query.shape[1:]), float("nan"), dtype=query.dtype)[:-1]


def run_decode(problem: Problem) -> Tensor:
    output = blank_rows(problem.query)
    decode_launch(output, problem.query, problem.layer, problem.batch, problem.scale, tile=16).run()
    return output


def run_grouped(problem: Problem) -> Tensor:
    output = blank_rows(problem.query)
    args = (output, problem.query, problem.layer, problem.batch, problem.scale)
    decode_grouped_launch(*args, target=TARGET, tile=small_tile(problem, 16)).run()
    return output


def run_split(problem: Problem, part_len: int = 16) -> Tensor:
    """Parts of one tile, and one part more than the longest context has."""
    output = blank_rows(problem.query)
    num_parts = problem.batch.max_context_len // part_len + 2
    log_sum_exp = torch.full((*problem.query.shape[:2], num_parts), float("nan"))
    average = torch.full((*log_sum_exp.shape, problem.query.shape[2]), float("nan"))
    args = (problem.query, problem.layer, problem.batch, problem.scale)
    tile = small_tile(problem, 16)
    decode_split_launch(average, log_sum_exp, *args, part_len=part_len, tile=tile).run()
    decode_combine_launch(output, average, log_sum_exp, problem.batch, part_len=part_len).run()
    return output


def run_prefill(problem: Problem) -> Tensor:
    output = blank_rows(problem.query)
    args = (output, problem.query, problem.layer, problem.batch, problem.scale)
    prefill_launch(*args, target=TARGET, tile=small_tile(problem, 16)).run()
    return output


def small_tile(problem: Problem, keys: int) -> Tile:
    group = problem.query.shape[1] // problem.layer.key.shape[2]
    return Tile(max(16, 1 << (group - 1).bit_length()), keys, num_warps=4, num_stages=1)


Run = Callable[[Problem], Tensor]
DECODE: dict[str, Run] = {
    "cpu": run_cpu,
    "torch": run_torch,
    "decode": run_decode,
    "decode_grouped": run_grouped,
    "decode_split": run_split,
    "prefill": run_prefill,
}
RAGGED: dict[str, Run] = {"cpu": run_cpu, "torch": run_torch, "prefill": run_prefill}
