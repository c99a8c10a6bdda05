"""Other implementations of decode on the same keys and values, for timing side by side.

Each maker takes our paged inputs and returns a call with the same meaning as ours, or raises: a peer that is
not installed, or does not take these inputs, is left out and named. Peers page as they like best.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.data import PagedInputs, dense
from benchmarks.gpu.timing import Call


def dense_sets(inputs: PagedInputs) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every set without paging: [num_seqs, context, num_kv_heads, head_size]."""
    return [dense(inputs, i) for i in range(inputs.num_sets)]


def repaged(inputs: PagedInputs, page_size: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The same keys and values in shuffled pages of another size, and their table [num_seqs, pages] int32.

    Each set is [num_pages, page_size, num_kv_heads, head_size]; contexts must be multiples of `page_size`.
    """
    num_seqs, context = len(inputs.shape.context_lens), inputs.shape.context_lens[0]
    pages = num_seqs * context // page_size
    order = torch.randperm(pages, device=inputs.query.device)
    table = order.argsort().int().view(num_seqs, -1)  # page order[p] of the dense order lies at p
    sets = []
    for index in range(inputs.num_sets):
        key, value = (t.flatten(0, 1).unflatten(0, (pages, page_size))[order] for t in dense(inputs, index))
        sets.append((key, value))
    return sets, table


def sdpa_dense(inputs: PagedInputs) -> Call:
    """torch's scaled_dot_product_attention on contiguous keys and values: what paging is compared with."""
    sets = [[t.transpose(1, 2).contiguous() for t in pair] for pair in dense_sets(inputs)]
    query = inputs.query[:, :, None]  # [num_seqs, Hq, D] -> [num_seqs, Hq, 1, D]

    def call(index: int) -> Tensor:
        key, value = sets[index]
        out = F.scaled_dot_product_attention(query, key, value, scale=inputs.scale, enable_gqa=True)
        return out[:, :, 0]

    return call


def varlen_attn(inputs: PagedInputs) -> Call:
    """torch's varlen_attn through a block table, in pages of 256 as its flash kernel wants them."""
    function = import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" not in inspect.signature(function).parameters:
        raise RuntimeError(f"torch {torch.__version__} has no block table in varlen_attn")
    sets, table = repaged(inputs, 256)
    starts = inputs.batch.query_start
    longest = inputs.batch.max_context_len
    options = {"scale": inputs.scale, "enable_gqa": True, "seqused_k": inputs.batch.context_lens}

    def call(index: int) -> Tensor:
        key, value = sets[index]
        return function(inputs.query, key, value, starts, None, 1, longest, block_table=table, **options)

    return call


def flex_paged(inputs: PagedInputs) -> Call:
    """FlexAttention with its experimental paged cache, in pages of 128, compiled."""
    flex = import_module("torch.nn.attention.flex_attention")
    paging = import_module("torch.nn.attention.experimental._paged_attention")
    page_size, device = 128, inputs.query.device
    num_seqs, context = len(inputs.shape.context_lens), inputs.shape.context_lens[0]
    sets, table = repaged(inputs, page_size)
    num_pages = num_seqs * context // page_size
    cache = paging.PagedAttention(num_pages, page_size, num_seqs, device=str(device))
    cache.page_table[:, : table.shape[1]] = table
    for seq in range(num_seqs):
        cache.physical_to_logical[seq, table[seq].long()] = torch.arange(table.shape[1], device=device)
    mask = flex.create_block_mask(
        flex.noop_mask, num_seqs, None, 1, context, device=str(device), BLOCK_SIZE=(128, page_size)
    )
    lengths = inputs.batch.context_lens
    mask = cache.convert_logical_block_mask(mask, kv_len=lengths)
    score_mod = cache.get_score_mod(None, kv_len=lengths)
    # [num_pages, page_size, Hkv, D] -> [1, Hkv, num_pages * page_size, D]
    flat = [[t.flatten(0, 1).transpose(0, 1)[None].contiguous() for t in pair] for pair in sets]
    query, compiled = inputs.query[:, :, None], torch.compile(flex.flex_attention)

    def call(index: int) -> Tensor:
        key, value = flat[index]
        out = compiled(
            query, key, value, score_mod=score_mod, block_mask=mask, scale=inputs.scale, enable_gqa=True
        )
        return out[:, :, 0]

    return call


def flashinfer(inputs: PagedInputs) -> Call:
    """FlashInfer's batch decode on our own pages."""
    library = import_module("flashinfer")
    shape, device = inputs.shape, inputs.query.device
    pages = shape.context_lens[0] // shape.block_size
    indptr = torch.arange(len(shape.context_lens) + 1, dtype=torch.int32, device=device) * pages
    last = torch.full((len(shape.context_lens),), shape.block_size, dtype=torch.int32, device=device)
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr,
        inputs.batch.block_tables[:, :pages].flatten().contiguous(),
        last,
        shape.num_query_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.block_size,
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.storage.spec.dtype,
        sm_scale=inputs.scale,
    )

    def call(index: int) -> Tensor:
        layer = inputs.layer(index)
        return wrapper.run(inputs.query, (layer.key, layer.value))

    return call


def flash_attn(inputs: PagedInputs) -> Call:
    """The flash-attn package, in pages of 256."""
    function = import_module("flash_attn").flash_attn_with_kvcache
    sets, table = repaged(inputs, 256)
    query = inputs.query[:, None]  # [num_seqs, Hq, D] -> [num_seqs, 1, Hq, D]
    options = {
        "cache_seqlens": inputs.batch.context_lens,
        "block_table": table,
        "softmax_scale": inputs.scale,
    }

    def call(index: int) -> Tensor:
        return function(query, *sets[index], causal=True, **options)[:, 0]

    return call


def vllm_triton(inputs: PagedInputs) -> Call:
    """vLLM's Triton kernel for all kinds of attention, on our own pages."""
    names = ("vllm.v1.attention.ops", "vllm.attention.ops")
    function = _first(names, "triton_unified_attention").unified_attention
    known = inspect.signature(function).parameters
    given: dict[str, Any] = {
        "q": inputs.query,
        "out": torch.empty_like(inputs.query),
        "cu_seqlens_q": inputs.batch.query_start,
        "max_seqlen_q": 1,
        "seqused_k": inputs.batch.context_lens,
        "max_seqlen_k": inputs.batch.max_context_len,
        "softmax_scale": inputs.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": inputs.batch.block_tables,
        "softcap": 0.0,
    }
    for name, parameter in known.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            given[name] = None

    def call(index: int) -> Tensor:
        layer = inputs.layer(index)
        function(**{**given, "k": layer.key, "v": layer.value})
        return given["out"]

    return call


def _first(packages: tuple[str, ...], module: str) -> Any:
    """The module from the first package that has it; vLLM has moved its kernels about."""
    for package in packages:
        try:
            return import_module(f"{package}.{module}")
        except ImportError as error:
            missing = error
    raise missing


# Last the two that may compile when first called, which takes longest.
PEERS: dict[str, Callable[[PagedInputs], Call]] = {
    "SDPA dense": sdpa_dense,
    "varlen_attn": varlen_attn,
    "flash-attn": flash_attn,
    "vLLM Triton": vllm_triton,
    "FlexAttention paged": flex_paged,
    "FlashInfer": flashinfer,
}
