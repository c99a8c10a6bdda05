"""The paper, vLLM today and minipaged, point by point, each with the place in vLLM's source that shows it.

`VERSION` is the release that the quotations are from. tests/coursekit/test_vllm_table.py looks each of them
up in an installed vLLM; the lesson only prints them.
"""

from dataclasses import dataclass

VERSION = "0.32.0"


@dataclass(frozen=True)
class Quote:
    """Words of vLLM's source, and the file or folder that they are in, relative to the package."""

    path: str
    text: str


@dataclass(frozen=True)
class Point:
    """One row of the table. `shows` must be found in vLLM's source, `lacks` must not."""

    subject: str
    paper: str
    vllm: str
    minipaged: str
    lesson: int
    shows: tuple[Quote, ...]
    lacks: tuple[Quote, ...] = ()


@dataclass(frozen=True)
class Setting:
    """An argument of vLLM's `LLM`, what it is called here (None: not here), and the lesson about it."""

    name: str
    ours: str | None
    lesson: int
    subject: str


POINTS = (
    Point(
        "block size",
        "16 tokens",
        "16 tokens; multiples of 16 in its GPU kernels, of 32 on a CPU",
        "16 tokens, any number",
        4,
        (
            Quote("config/cache.py", "DEFAULT_BLOCK_SIZE: ClassVar[int] = 16"),
            Quote("v1/attention/backends/flash_attn.py", "return [MultipleOf(16)]"),
            Quote("v1/attention/backends/cpu_attn.py", "return [MultipleOf(32)]"),
        ),
    ),
    Point(
        "hashing",
        "none: shared prefixes are named in advance",
        "a hash for each full block, chained to the block before; SHA-256",
        "the same",
        10,
        (
            Quote("v1/core/kv_cache_utils.py", "def hash_block_tokens("),
            Quote("v1/core/kv_cache_utils.py", "(parent_block_hash, curr_block_token_ids_tuple, extra_keys)"),
            Quote("config/cache.py", 'prefix_caching_hash_algo: PrefixCachingHashAlgo = "sha256"'),
        ),
    ),
    Point(
        "eviction order",
        "all blocks of a sequence or none",
        "cached blocks that nobody holds: the least recently used first, of one chain the tail first",
        "the same",
        10,
        (
            Quote("v1/core/kv_cache_utils.py", "class FreeKVCacheBlockQueue"),
            Quote("v1/core/single_type_kv_cache_manager.py", "free_blocks(reversed("),
        ),
    ),
    Point(
        "preemption",
        "the latest request: swapped to host memory, or computed again",
        "the latest request: computed again. Swapping was dropped",
        "the latest request: either",
        11,
        (
            Quote("v1/core/sched/scheduler.py", "preempted_req = self.running.pop()"),
            Quote("v1/core/sched/scheduler.py", "request.num_computed_tokens = 0"),
        ),
        (Quote(".", "swap_space"), Quote(".", "preemption_mode")),
    ),
    Point(
        "parallel samples",
        "forked block tables",
        "n requests that meet in the prefix cache",
        "forked block tables",
        9,
        (Quote("v1/engine/parallel_sampling.py", "class ParentRequest"),),
        (Quote("v1/core", "def fork"),),
    ),
    Point(
        "beam search",
        "forked block tables, inside the engine",
        "outside the engine, by requests for one token each",
        "forked block tables",
        9,
        (
            Quote("entrypoints/generate/beam_search/offline.py", "class BeamSearchOfflineMixin"),
            Quote("entrypoints/generate/beam_search/offline.py", "max_tokens=1,"),
        ),
        (Quote("v1/core", "BeamSearch"),),
    ),
    Point(
        "copy-on-write",
        "when one of several samples or beams writes",
        "gone for samples and beams; kept for a prefix hit that ends inside a block",
        "when one of several samples or beams writes",
        9,
        (
            Quote("v1/core/single_type_kv_cache_manager.py", "def _apply_cow("),
            Quote("v1/core/single_type_kv_cache_manager.py", "Redirect a partial prefix-cache hit"),
            Quote("config/cache.py", "prefix_match_unit: int | None"),
        ),
    ),
    Point(
        "prompts",
        "whole, in one step",
        "in chunks beside the decodes",
        "in chunks beside the decodes",
        8,
        (Quote("config/scheduler.py", "enable_chunked_prefill: bool = True"),),
    ),
    Point(
        "kernels",
        "its own, in CUDA",
        "FlashAttention with a block table, Triton, FlashInfer and others to choose from",
        "its own, in Triton; torch and C++ on a CPU",
        6,
        (
            Quote("v1/attention/backends/registry.py", "FLASH_ATTN = "),
            Quote("v1/attention/backends/registry.py", "FLASHINFER = "),
            Quote("v1/attention/ops/triton_unified_attention.py", "def unified_attention("),
        ),
        (Quote("_custom_ops.py", "paged_attention_v1"),),
    ),
    Point(
        "smaller K and V",
        "none, 16 bits",
        "fp8 with one scale for a tensor; int8, fp8 and int4 with one for each token and head; others",
        "int8 and fp8, a scale for each token and head",
        13,
        (
            Quote("v1/kv_cache_interface.py", "FP8_PER_TENSOR = 1"),
            Quote("v1/kv_cache_interface.py", "INT8_PER_TOKEN_HEAD = 2"),
        ),
    ),
    Point(
        "several cards",
        "KV heads are split, one block table for all cards",
        "KV heads are split, and repeated where there are fewer heads than cards",
        "one card",
        14,
        (Quote("config/model.py", "def get_num_kv_heads("),),
    ),
)

SETTINGS = (
    Setting("max_model_len", "max_model_len", 3, "the longest request, which a strip reserves"),
    Setting("kv_cache_memory_bytes", "kv_memory", 2, "the budget"),
    Setting("gpu_memory_utilization", "gpu_memory_utilization", 2, "the budget, as a share of the card"),
    Setting("num_gpu_blocks_override", "num_blocks", 4, "the budget, counted in blocks"),
    Setting("block_size", "block_size", 4, "tokens in a block"),
    Setting("attention_backend", "attention_backend", 6, "which kernels run"),
    Setting("max_num_batched_tokens", "max_num_batched_tokens", 8, "tokens computed in a step"),
    Setting("enable_chunked_prefill", "enable_chunked_prefill", 8, "long prompts in pieces"),
    Setting("enable_prefix_caching", "enable_prefix_caching", 10, "blocks found by hash"),
    Setting("max_num_seqs", "max_num_seqs", 11, "sequences that run at once"),
    Setting("kv_offloading_size", None, 11, "host memory for blocks; here swap_space, for whole requests"),
    Setting("kv_cache_dtype", "kv_cache_dtype", 13, "numbers of K and V"),
    Setting("tensor_parallel_size", None, 14, "cards that share each layer"),
    Setting("decode_context_parallel_size", None, 14, "cards that split the tokens of a context"),
    Setting("pipeline_parallel_size", None, 14, "cards that have different layers"),
    Setting("data_parallel_size", None, 14, "copies of the engine; here minipaged batch --workers"),
    Setting("distributed_executor_backend", None, 14, "who starts the processes: mp, ray and others"),
)
