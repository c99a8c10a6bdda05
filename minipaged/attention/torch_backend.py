"""Paged attention in plain torch: gather the keys and values of each sequence, then attend to them.

Sequences with one query token are served together, in batched products over gathered keys, sequences of
about the same length in one. The others are served one after the other, each with a causal mask aligned to
the bottom right corner, because their queries are the last tokens of their context. Only live slots are read,
so garbage elsewhere and the block size do not matter.

This runs where there is neither a GPU nor a C++ compiler; with a compiler `minipaged/cpu` takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minipaged.attention.batch import AttentionBatch, require_matching, require_slots
from minipaged.attention.quantize import dequantize_rows, quantize_rows

if TYPE_CHECKING:
    from minipaged.cache.block_table import BlockCopy
    from minipaged.cache.storage import KVStorage, LayerKV

BUCKET_KEYS = 2048  # gathered at once: more fall out of the processor's cache


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


def length_buckets(lengths: list[int]) -> list[list[int]]:
    """Indices of `lengths`, those of about the same length together, because a product pads to its longest.

    Within a bucket no length is more than a quarter and 16 keys above the shortest. A bucket gathers at most
    `BUCKET_KEYS` keys unless one sequence alone is longer.
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


class BatchPlan:
    """What a batch asks to be gathered; worked out once, for every layer of a step brings the same batch."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch

    @cached_property
    def gathers(self) -> list[GatherPlan]:
        decodes = self.batch.decoding_sequences()
        buckets = length_buckets(self.batch.context_lens[decodes].tolist())
        return [plan_gather(self.batch, decodes[bucket]) for bucket in buckets]

    @cached_property
    def prompts(self) -> list[PrefillPlan]:
        return plan_prefill(self.batch)


class TorchBackend:
    """Paged attention in plain torch, on any device torch runs on."""

    name = "torch"

    def __init__(self) -> None:
        self._plan: BatchPlan | None = None

    def plan_of(self, batch: AttentionBatch) -> BatchPlan:
        if self._plan is None or self._plan.batch is not batch:
            self._plan = BatchPlan(batch)
        return self._plan

    def write_kv(self, layer: "LayerKV", key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        require_slots(layer, slot_mapping)
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
        plan = self.plan_of(batch)
        # Rows that see no key stay zero.
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for gather in plan.gathers:
            output[gather.rows] = attend_gathered(query[gather.rows], layer, gather, scale)
        attend_prompts(output, query, layer, plan.prompts, scale)
        return output

    def copy_blocks(self, storage: "KVStorage", copies: Sequence["BlockCopy"]) -> None:
        storage.copy_blocks(copies)


def attend_prompts(
    output: Tensor, query: Tensor, layer: "LayerKV", prompts: list[PrefillPlan], scale: float
) -> None:
    """Fill the rows of `output` that belong to `prompts`; the others are left alone."""
    for plan in prompts:
        output[plan.first : plan.last] = attend_prefill(query[plan.first : plan.last], layer, plan, scale)


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
