"""EngineArgs: every setting of an engine, and from them the numbers that it runs with.

A setting is said, explained, and checked here. torch is imported when something is resolved, not before: the
commands read their options from here, and print help at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, get_args

from minipaged.checks import (
    check_seed,
    is_number,
    parse_bytes,
    require_at_least,
    require_flags,
    require_one_of,
    require_share,
)
from minipaged.machine import available_memory, find_device, gpu_memory

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from minipaged.checkpoints.loading import LoadedModel
    from minipaged.config import CacheConfig, EngineConfig, ModelConfig, Preemption
    from minipaged.memory import KVSpec

P = ParamSpec("P")
CPU_SHARE = 1 / 8  # of the memory that is free
CPU_MOST = 4 * 2**30  # bytes; as vLLM's CPU build by default
GPU_RESERVE = 2**30  # bytes left for activations, workspaces and kernels
# Tokens of a step. A CPU is busy with a few hundred: more only keep the first requests of a burst waiting.
STEP_TOKENS, CPU_STEP_TOKENS = 2048, 512
NUM_SEQS = 256  # that run at once, at most, unless told otherwise


@dataclass(frozen=True)
class EngineArgs:
    """What `LLM` is made from. Names and meanings are vLLM's, where vLLM has them.

    Attributes:
        model: a name, a .gguf file, a Hugging Face folder or hub id. In Python also a model that is loaded.
        dtype: number format of weights and activations: float32, bfloat16 or float16; auto is what is fast
            here.
        device: cpu or cuda; auto is a GPU where there is one.
        block_size: tokens per block. With `block_size=max_model_len` every request reserves one strip for its
            longest length: the contiguous baseline.
        kv_memory: size of the KV cache, in bytes or as text such as "64MiB". Without it and without
            `num_blocks`: on a GPU what `gpu_memory_utilization` leaves, on a CPU a modest share of the free
            memory.
        num_blocks: size of the KV cache in blocks. Give this or `kv_memory`.
        gpu_memory_utilization: share of a GPU's memory that weights, activations, and cache may take.
        kv_cache_dtype: number format of the KV cache: one that a model may have, int8 or fp8; auto is the
            model's.
        max_model_len: most tokens of prompt and output together; by default the model's context.
        max_num_seqs: sequences that run at once; by default 256, fewer if `max_num_batched_tokens` is.
        max_num_batched_tokens: tokens computed in one step; by default 2048, on a CPU 512, or `max_num_seqs`
            or without chunked prefill `max_model_len` if that is more.
        enable_chunked_prefill: compute a long prompt over several steps.
        enable_prefix_caching: keep computed blocks for prompts that begin in the same way.
        preemption: what becomes of a request that must make room: "recompute", or "swap" (to host
            memory).
        swap_space: host memory for swapped blocks, a number of GiB or text ("512MiB").
        watermark: share of the blocks that admission leaves free.
        attention_backend: auto is Triton on a GPU and the compiled code of `minipaged/cpu` on a CPU; torch is
            plain torch on either, for attention and all of the model; or triton, reference.
        seed: what requests without a seed derive theirs from. None takes fresh randomness.

    Raises:
        ValueError: a setting that no machine and no model could meet, with the value and the limit.
    """

    model: str | Path | LoadedModel = "smollm2-135m"
    _: KW_ONLY
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    block_size: int = 16
    kv_memory: int | str | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str | torch.dtype = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    preemption: Preemption = "recompute"
    swap_space: float | str = 1
    watermark: float = 0.01
    attention_backend: str = "auto"
    seed: int | None = 0

    def __post_init__(self) -> None:
        from minipaged.config import Preemption
        from minipaged.dtypes import COMPUTE_DTYPES, KV_DTYPES, named

        for name, supported in (("dtype", COMPUTE_DTYPES), ("kv_cache_dtype", KV_DTYPES)):
            if getattr(self, name) != "auto":
                named(getattr(self, name), supported, name)
        require_at_least(self, 1, "block_size")
        optional = ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        require_at_least(self, 1, *optional, allow_none=True)
        require_flags(self, "enable_chunked_prefill", "enable_prefix_caching")
        require_one_of(self, "preemption", get_args(Preemption))
        require_share(self, "gpu_memory_utilization", "(0, 1]")
        require_share(self, "watermark", "[0, 1)")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory, "kv_memory")
            if self.num_blocks is not None:
                raise ValueError(
                    f"give kv_memory ({self.kv_memory!r}) or num_blocks ({self.num_blocks}), not both"
                )
        if self.seed is not None:
            check_seed("seed", self.seed)
        if self.preemption != "recompute" or self.swap_space != 0:  # as in vLLM, 0 GiB is no swapping
            self.swap_bytes()

    def swap_bytes(self) -> int:
        """Bytes of host memory that `swap_space` stands for."""
        if isinstance(self.swap_space, str):
            return parse_bytes(self.swap_space, "swap_space")
        if not is_number(self.swap_space) or not 0 < self.swap_space < math.inf:
            raise ValueError(f"swap_space is {self.swap_space!r} GiB, a positive number is needed")
        return parse_bytes(int(self.swap_space * 2**30), "swap_space")

    # What a setting comes to on this machine

    def find_device(self) -> torch.device:
        """The device that is meant; "auto" is a GPU where there is one. Raises ValueError for one that is not
        there."""
        return find_device(self.device)

    def find_dtype(self, device: torch.device) -> torch.dtype:
        """The model's dtype; "auto" is what `device` computes fast, with a warning where that is no 16-bit
        format."""
        from minipaged.dtypes import COMPUTE_DTYPES, fast_dtype, named

        return fast_dtype(device) if self.dtype == "auto" else named(self.dtype, COMPUTE_DTYPES, "dtype")

    def resolve(
        self, model_config: ModelConfig, model_dtype: torch.dtype, device: torch.device
    ) -> tuple[CacheConfig, EngineConfig]:
        """The cache and the limits for a model that is loaded on `device`, with the memory that is free now.

        Raises ValueError, with the value and the limit, for what this model or this machine cannot meet.
        """
        from minipaged.config import CacheConfig
        from minipaged.dtypes import KV_DTYPES, named
        from minipaged.memory import KVSpec

        limits = self.limits(model_config, device)
        kept = model_dtype
        if self.kv_cache_dtype != "auto":
            kept = named(self.kv_cache_dtype, KV_DTYPES, "kv_cache_dtype")
        spec = KVSpec.from_model(model_config, kept)
        num_blocks, num_host_blocks = self.num_blocks, 0
        if num_blocks is None:
            num_blocks = self._blocks_in(self._kv_bytes(spec, limits, device), spec, "kv_memory")
        free = gpu_memory(device)[0] if device.type == "cuda" else available_memory()
        self._require_room(num_blocks, spec, free)
        if self.preemption != "recompute":
            num_host_blocks = self._blocks_in(self.swap_bytes(), spec, "swap_space")
            self._require_room(num_host_blocks, spec, available_memory())
        cache = CacheConfig(
            block_size=self.block_size,
            num_blocks=num_blocks,
            dtype=spec.dtype,
            enable_prefix_caching=self.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        return cache, limits

    def limits(self, model_config: ModelConfig, device: torch.device) -> EngineConfig:
        """The scheduler's part of `resolve`, which needs no memory."""
        from minipaged.config import EngineConfig

        longest = model_config.max_position_embeddings
        max_model_len = longest if self.max_model_len is None else self.max_model_len
        if max_model_len > longest:
            raise ValueError(f"max_model_len is {max_model_len}, the model's positions end at {longest}")
        step_tokens = self.max_num_batched_tokens
        if step_tokens is None:  # every sequence can decode in a step, and a prompt that is not cut fits
            usual = CPU_STEP_TOKENS if device.type == "cpu" else STEP_TOKENS
            uncut = 0 if self.enable_chunked_prefill else max_model_len
            step_tokens = max(usual, self.max_num_seqs or 0, uncut)
        return EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=min(NUM_SEQS, step_tokens) if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=step_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preemption=self.preemption,
            watermark=self.watermark,
        )

    def _kv_bytes(self, spec: KVSpec, limits: EngineConfig, device: torch.device) -> int:
        """Bytes for the cache: what `kv_memory` says; else what is left of `gpu_memory_utilization` of a GPU,
        less a reserve for activations, or on a CPU an eighth of the free memory, at most 4 GiB. Never more
        than `max_num_seqs` requests of the longest length take, unless it is asked for."""
        if self.kv_memory is not None:
            return parse_bytes(self.kv_memory, "kv_memory")
        useful = limits.max_num_seqs * limits.max_model_len * spec.bytes_per_token
        if device.type != "cuda":
            return min(useful, CPU_MOST, int(available_memory() * CPU_SHARE))
        free, total = gpu_memory(device)
        budget = int(total * self.gpu_memory_utilization) - (total - free) - GPU_RESERVE
        if budget <= 0:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: of {total >> 20} MiB, "
                f"{(total - free) >> 20} MiB are taken and {GPU_RESERVE >> 20} MiB kept for activations, so "
                "no memory is left for the KV cache"
            )
        return min(useful, budget)

    def _blocks_in(self, memory: int, spec: KVSpec, name: str) -> int:
        """Whole blocks in `memory` bytes. Raises ValueError when not one fits."""
        block_bytes = spec.bytes_per_block(self.block_size)
        if memory < block_bytes:
            raise ValueError(
                f"{name} is {memory} bytes, a block of {self.block_size} tokens takes {block_bytes}"
            )
        return memory // block_bytes

    def _require_room(self, num_blocks: int, spec: KVSpec, free: int) -> None:
        """Raise ValueError, before the system ends the process, when blocks take more than is free."""
        needed = num_blocks * spec.bytes_per_block(self.block_size)
        if needed > free:
            raise ValueError(
                f"{num_blocks} blocks of {self.block_size} tokens take {needed >> 20} MiB, "
                f"{free >> 20} MiB are free"
            )


def takes_arguments_of(
    settings: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` that passes on what it gets the signature of `settings`.

    `help`, editors, and type checkers then know the arguments of both, and they are listed once.
    """

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
        asked = signature(settings)
        init.__signature__ = asked.replace(  # type: ignore[attr-defined]
            parameters=[*own, *asked.parameters.values()], return_annotation=None
        )
        return init

    return decorate
