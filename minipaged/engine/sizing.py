"""From what a user says about dtype and memory to numbers: the engine's defaults, in one place."""

from __future__ import annotations

import math
import re
import warnings

import torch

from minipaged.config import EngineConfig, ModelConfig
from minipaged.machine import available_memory
from minipaged.memory import KVSpec

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
CACHE_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CPU_SHARE = 1 / 8  # of the memory that is free
CPU_MOST = 4 * 2**30  # bytes; as vLLM's CPU build by default
GPU_RESERVE = 2**30  # bytes left for activations, workspaces and kernels
# Tokens of a step. A CPU is busy with a few hundred: more only keep the first requests of a burst waiting.
STEP_TOKENS, CPU_STEP_TOKENS = 2048, 512
NUM_SEQS = 256  # that run at once, at most, unless told otherwise


def parse_bytes(amount: int | str, name: str) -> int:
    """Bytes in 67108864, "64MiB" or "0.5 GB". Raises ValueError for anything else and for less than 1
    byte."""
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", amount)
        if match is None or match[2].upper() not in UNITS:
            raise ValueError(f"{name} is {amount!r}, give bytes or a text such as '64MiB' or '2GB'")
        amount = int(float(match[1]) * UNITS[match[2].upper()])
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
        raise ValueError(f"{name} is {amount!r}, at least 1 byte is needed")
    return amount


def resolve_device(device: str | torch.device) -> torch.device:
    """What "auto" means: the GPU where torch sees one, else the CPU. Raises ValueError for a device that is
    not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}, give 'auto', 'cpu' or 'cuda'") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {str(found)!r}, torch sees {torch.cuda.device_count()} GPUs here")
    return found


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """What "auto" means. GPU: bfloat16 from compute capability 8.0 on, else float16. CPU: bfloat16 where it
    has instructions for bfloat16 products (AVX512-BF16, AMX or Arm's BF16), else float32 and a warning."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        return _named(dtype, DTYPES, "dtype")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    if cpu_has_bfloat16():
        return torch.bfloat16
    warnings.warn("this CPU multiplies no bfloat16: the model runs in float32, which is slower", stacklevel=2)
    return torch.float32


def resolve_cache_dtype(kv_cache_dtype: str | torch.dtype, model_dtype: torch.dtype) -> torch.dtype:
    """What "auto" means: the model's dtype."""
    if isinstance(kv_cache_dtype, torch.dtype):
        return kv_cache_dtype
    if kv_cache_dtype == "auto":
        return model_dtype
    return _named(kv_cache_dtype, DTYPES | CACHE_DTYPES, "kv_cache_dtype")


def cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def default_kv_memory(
    device: torch.device, gpu_memory_utilization: float, spec: KVSpec, config: EngineConfig
) -> int:
    """Bytes for the cache when the user names none; call it after the model is loaded.

    On a GPU what is left of `gpu_memory_utilization` of its memory, less a reserve for activations; on a CPU
    an eighth of the free memory, at most 4 GiB. Never more than `max_num_seqs` requests of the longest length
    take.
    """
    if not isinstance(gpu_memory_utilization, (int, float)) or not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization!r}, a share in (0, 1] is needed")
    useful = config.max_num_seqs * config.max_model_len * spec.bytes_per_token
    if device.type != "cuda":
        return min(useful, CPU_MOST, int(available_memory() * CPU_SHARE))
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * gpu_memory_utilization) - (total - free) - GPU_RESERVE
    if budget <= 0:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}: of {total >> 20} MiB, "
            f"{(total - free) >> 20} MiB are taken and {GPU_RESERVE >> 20} MiB kept for activations, so no "
            "memory is left for the KV cache"
        )
    return min(useful, budget)


def blocks_in(memory: int | str, spec: KVSpec, block_size: int, name: str) -> int:
    """Whole blocks in `memory`, bytes or a text such as "64MiB". Raises ValueError when not one fits.

    It is the first to divide by `block_size`, which the caller may have given: that is checked as well.
    """
    memory = parse_bytes(memory, name)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}, a whole number of at least 1 is needed")
    block_bytes = spec.bytes_per_block(block_size)
    if memory < block_bytes:
        raise ValueError(f"{name} is {memory} bytes, a block of {block_size} tokens takes {block_bytes}")
    return memory // block_bytes


def resolve_num_blocks(
    num_blocks: int | None, kv_memory: int | str | None, spec: KVSpec, block_size: int, device: torch.device
) -> int:
    """The number of blocks that exactly one of `num_blocks` and `kv_memory` says.

    Raises ValueError for a cache that `device` has no memory for.
    """
    if num_blocks is not None and kv_memory is not None:
        raise ValueError(f"give kv_memory ({kv_memory!r}) or num_blocks ({num_blocks}), not both")
    if kv_memory is not None:
        num_blocks = blocks_in(kv_memory, spec, block_size, "kv_memory")
    assert num_blocks is not None
    _require_room(num_blocks, spec, block_size, device)
    return num_blocks


def _require_room(num_blocks: object, spec: KVSpec, block_size: object, device: torch.device) -> None:
    """Raise ValueError, before the system ends the process, when the cache is larger than free memory."""
    if not isinstance(num_blocks, int) or not isinstance(block_size, int) or block_size < 1:
        return  # the cache's own config refuses these
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    needed = num_blocks * spec.bytes_per_block(block_size)
    if needed > free:
        raise ValueError(
            f"{num_blocks} blocks of {block_size} tokens take {needed >> 20} MiB, {free >> 20} MiB are free"
        )


def host_blocks(swap_space: float | str, spec: KVSpec, block_size: int) -> int:
    """Blocks in `swap_space`: a number of GiB, as in vLLM, or text."""
    is_number = isinstance(swap_space, (int, float)) and not isinstance(swap_space, bool)
    if not isinstance(swap_space, str) and not (is_number and 0 < swap_space < math.inf):
        raise ValueError(f"swap_space is {swap_space!r} GiB, a positive number is needed")
    memory = swap_space if isinstance(swap_space, str) else int(swap_space * 2**30)
    num_blocks = blocks_in(memory, spec, block_size, "swap_space")
    _require_room(num_blocks, spec, block_size, torch.device("cpu"))
    return num_blocks


def resolve_max_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    """None is the model's longest context. Raises ValueError for more than that."""
    if max_model_len is None:
        return config.max_position_embeddings
    if isinstance(max_model_len, int) and max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_model_len}, the model's positions end at {config.max_position_embeddings}"
        )
    return max_model_len


def _named(name: str, table: dict[str, torch.dtype], what: str) -> torch.dtype:
    if name not in table:
        raise ValueError(f"{what} is {name!r}, supported are 'auto', {', '.join(map(repr, table))}")
    return table[name]


def default_step_tokens(
    device: torch.device, max_model_len: int, max_num_seqs: int | None, *, enable_chunked_prefill: bool
) -> int:
    """What `max_num_batched_tokens` is unless it is given: enough for every sequence to decode in a step, and
    for the longest prompt where prompts cannot be computed in chunks."""
    usual = CPU_STEP_TOKENS if device.type == "cpu" else STEP_TOKENS
    asked = (usual, max_num_seqs, 0 if enable_chunked_prefill else max_model_len)
    return max([size for size in asked if isinstance(size, int)])  # what is no number is refused later


def default_num_seqs(max_num_batched_tokens: int) -> int:
    """What `max_num_seqs` is unless it is given: no more than can decode in a step."""
    if not isinstance(max_num_batched_tokens, int):
        return NUM_SEQS  # refused later
    return min(NUM_SEQS, max_num_batched_tokens)
