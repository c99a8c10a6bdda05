"""Paged attention in plain torch: what runs where there is no GPU.

Sequences with one query token are served together: by the compiled kernel of `decode.cpp` where this
machine can build it, else in batched products over gathered keys, sequences of about the same length in one.
The others are served by `prefill.cpp` where the processor has the instructions that make it fast, else
one after the other, each with a causal mask aligned to the bottom right corner, because their queries are the
last tokens of their context. Only live slots are read, so garbage elsewhere and the block size do not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.attention.backend import require_matching, require_slots
from minipaged.attention.batch import AttentionBatch
from minipaged.attention.quantize import dequantize_rows, quantize_rows
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import DecodeStep, PrefillStep
from minipaged.cpu.kernels import CpuKernels

if TYPE_CHECKING:
    from minipaged.cache.block_table import BlockCopy
    from minipaged.cache.storage import KVStorage, LayerKV

BUCKET_KEYS = 2048


@dataclass(frozen=True)
class GatherPlan:
    """What the batched product over some sequences with one query token needs."""

    rows: Tensor
    """int64 [num_decodes]: their rows in the query."""
    slots: Tensor
    """int64 [num_decodes, longest]: slots of their keys; shorter ones repeat a live slot of their own."""
    visible: Tensor
    """bool [num_decodes, longest]: which of `slots` are keys and not repeats."""


@dataclass(frozen=True)
class PrefillPlan:
    """One sequence that has several query tokens: the rows that see a key, and the slots of its keys."""

    first: int
    last: int
    slots: Tensor  # int64 [context_len]
    visible: Tensor | None  # bool [last - first, context_len]; None for the plain causal square


def context_slots(block_tables: Tensor, length: int, block_size: int) -> Tensor:
    """Slots of positions 0 to length - 1: int64 [num_seqs, length] for tables [num_seqs, max_blocks]."""
    positions = torch.arange(length, device=block_tables.device)
    blocks = block_tables[:, positions // block_size].long()  # [num_seqs, length]
    return blocks * block_size + positions % block_size


def decoding_sequences(batch: AttentionBatch) -> Tensor:
    """int64 [num_decodes]: the sequences with one query token that sees a key."""
    query_lens = batch.query_start.diff()  # [num_seqs]
    return torch.nonzero((query_lens == 1) & (batch.context_lens > 0)).flatten()


def length_buckets(lengths: list[int]) -> list[list[int]]:
    """Indices of `lengths`, those of about the same length together, because a product pads to its longest.

    Within a bucket no length is more than a quarter and 16 keys above the shortest. A bucket gathers at most
    `BUCKET_KEYS` keys unless one sequence alone is longer: more fall out of the processor's cache.
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length, last = lengths[index], buckets[-1] if buckets else []
        fits = last and length <= 1.25 * lengths[last[0]] + 16
        if fits and (len(last) + 1) * length <= BUCKET_KEYS:
            last.append(index)
        else:
            buckets.append([index])
    return buckets


def plan_gather(batch: AttentionBatch, decodes: Tensor) -> GatherPlan:
    """For the sequences `decodes`, int64 [num_decodes], which see at least one key each."""
    lengths = batch.context_lens[decodes].long()
    longest = int(lengths.max())
    positions = torch.arange(longest, device=lengths.device)
    visible = positions < lengths[:, None]  # [num_decodes, longest]
    positions = torch.where(visible, positions, 0)
    tables = batch.block_tables[decodes].long()
    blocks = tables.gather(1, positions // batch.block_size)
    slots = blocks * batch.block_size + positions % batch.block_size
    return GatherPlan(batch.query_start[decodes].long(), slots, visible)


def plan_prefill(batch: AttentionBatch) -> list[PrefillPlan]:
    plans = []
    starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
    for seq, length in enumerate(lengths):
        first, last = starts[seq], starts[seq + 1]
        if last - first <= 1 or length == 0:
            continue
        first = max(first, last - length)  # rows before the first key see nothing
        slots = context_slots(batch.block_tables[seq : seq + 1], length, batch.block_size)[0]
        visible = None
        if last - first < length:
            visible = torch.ones(last - first, length, dtype=torch.bool, device=slots.device)
            visible = visible.tril(length - (last - first))
        plans.append(PrefillPlan(first, last, slots, visible))
    return plans


class TorchBackend:
    """Paged attention in plain torch, on any device torch runs on.

    With `compiled=False` the C++ kernels are not used, nor built.
    """

    name = "torch"

    def __init__(self, *, compiled: bool = True) -> None:
        self.compiled = compiled
        self._batch: AttentionBatch | None = None  # the batch the values below were made for
        self._decodes, self._num_decodes = torch.empty(0, dtype=torch.int64), 0
        self._step: DecodeStep | None = None
        self._gathers: list[GatherPlan] = []
        self._prompts: PrefillStep | None = None
        self._prefill: list[PrefillPlan] = []

    def _kernels(self, device: torch.device) -> CpuKernels | None:
        return cpu_kernels.load() if self.compiled and device.type == "cpu" else None

    def write_kv(self, layer: "LayerKV", key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        require_slots(layer, slot_mapping)
        kernels = self._kernels(key.device)
        if kernels is not None and cpu_kernels.can_write(layer, key, value, slot_mapping):
            kernels.write_kv(layer, key, value, slot_mapping)
            return
        if layer.key_scale is None:
            layer.write(slot_mapping, key.to(layer.key.dtype), value.to(layer.value.dtype))
            return
        key, key_scale = quantize_rows(key, layer.key.dtype)
        value, value_scale = quantize_rows(value, layer.value.dtype)
        layer.write(slot_mapping, key, value, key_scale, value_scale)

    def paged_attention(
        self, query: Tensor, layer: "LayerKV", batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        require_matching(query, layer, batch)
        if self._batch is not batch:  # every layer of a step brings the same batch
            self._batch, self._decodes = batch, decoding_sequences(batch)
            self._num_decodes = len(self._decodes)
            self._step, self._gathers, self._prompts, self._prefill = None, [], None, []
        only_decodes = self._num_decodes == query.shape[0]
        fill = torch.empty_like if only_decodes else torch.zeros_like  # rows that see no key stay zero
        output = fill(query, memory_format=torch.contiguous_format)
        if self._num_decodes:
            self._attend_decodes(output, query, layer, batch, scale)
        if not only_decodes:
            self._attend_prompts(output, query, layer, batch, scale)
        return output

    def _attend_decodes(
        self, output: Tensor, query: Tensor, layer: "LayerKV", batch: AttentionBatch, scale: float
    ) -> None:
        kernels = self._kernels(query.device)
        if kernels is not None and cpu_kernels.can_decode(query, layer):
            if self._step is None:
                self._step = DecodeStep.make(batch, self._decodes)
            kernels.decode(output, query, layer, self._step, scale)
            return
        if not self._gathers:
            buckets = length_buckets(batch.context_lens[self._decodes].tolist())
            self._gathers = [plan_gather(batch, self._decodes[bucket]) for bucket in buckets]
        for plan in self._gathers:
            output[plan.rows] = attend_gathered(query[plan.rows], layer, plan, scale)

    def _attend_prompts(
        self, output: Tensor, query: Tensor, layer: "LayerKV", batch: AttentionBatch, scale: float
    ) -> None:
        kernels = self._kernels(query.device)
        if kernels is not None and cpu_kernels.can_prefill(query, layer, kernels):
            if self._prompts is None:
                self._prompts = PrefillStep.make(batch)
            kernels.prefill(output, query, layer, self._prompts, scale)
            return
        if not self._prefill:
            self._prefill = plan_prefill(batch)
        for plan in self._prefill:
            output[plan.first : plan.last] = attend_prefill(query[plan.first : plan.last], layer, plan, scale)

    def copy_blocks(self, storage: "KVStorage", copies: Sequence["BlockCopy"]) -> None:
        storage.copy_blocks(copies)


def gather(cache: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache [num_blocks, block_size, num_kv_heads, head_size], dequantised.

    Returns `dtype` [*slots.shape, num_kv_heads, head_size].
    """
    flat = slots.flatten()
    rows = cache.flatten(0, 1).index_select(0, flat)
    if scale is not None:
        rows = dequantize_rows(rows, scale.flatten(0, 1).index_select(0, flat), dtype)
    return rows.to(dtype).unflatten(0, slots.shape)


def attend_gathered(query: Tensor, layer: "LayerKV", plan: GatherPlan, scale: float) -> Tensor:
    """One query token per sequence: [num_decodes, num_query_heads, head_size] in and out."""
    key = gather(layer.key, layer.key_scale, plan.slots, query.dtype)
    value = gather(layer.value, layer.value_scale, plan.slots, query.dtype)
    # The query heads that share a KV head become the query rows of that head: [S, Hkv, group, D].
    grouped = query.unflatten(1, (layer.key.shape[2], -1))
    out = F.scaled_dot_product_attention(
        grouped,
        key.transpose(1, 2),  # [S, longest, Hkv, D] -> [S, Hkv, longest, D]
        value.transpose(1, 2),
        attn_mask=plan.visible[:, None, None, :],
        scale=scale,
    )
    return out.reshape(query.shape)


def attend_prefill(query: Tensor, layer: "LayerKV", plan: PrefillPlan, scale: float) -> Tensor:
    """Several query tokens of one sequence: [num_rows, num_query_heads, head_size] in and out."""
    key = gather(layer.key, layer.key_scale, plan.slots, query.dtype)
    value = gather(layer.value, layer.value_scale, plan.slots, query.dtype)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [rows, Hq, D] -> [1, Hq, rows, D]
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=plan.visible,
        is_causal=plan.visible is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
