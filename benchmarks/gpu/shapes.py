"""The cases that are timed, and the goals they are held to.

All have 32 query heads on 8 KV heads of size 128 in 16 bits: a layer of Llama 3 8B, 4096 bytes of keys and
values per token. `TINY` shapes run the same code in Triton's interpreter, where a tile takes milliseconds.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionShape:
    """One step of attention over a paged cache.

    `context_lens` has one entry per sequence; the last `query_len` tokens of each are computed in the step.
    """

    name: str
    context_lens: tuple[int, ...]
    query_len: int = 1
    block_size: int = 16
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    itemsize: int = 2

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the step sees; one byte a value comes with a float32 scale a head."""
        head_bytes = self.head_size * self.itemsize + (4 if self.itemsize == 1 else 0)
        return 2 * sum(self.context_lens) * self.num_kv_heads * head_bytes

    @property
    def bytes_moved(self) -> int:
        """Least bytes through device memory: keys and values once, queries in, outputs out."""
        rows = len(self.context_lens) * self.query_len
        return self.kv_bytes + 2 * rows * self.num_query_heads * self.head_size * self.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products over the visible pairs of query and key."""
        pairs = sum(
            self.query_len * context - self.query_len * (self.query_len - 1) // 2
            for context in self.context_lens
        )
        return 4 * pairs * self.num_query_heads * self.head_size


@dataclass(frozen=True)
class Goal:
    """A figure the kernels are held to: `higher_is_better` says which side of the limits is good."""

    name: str
    text: str
    at_least: float
    aim: float
    higher_is_better: bool = True

    def met(self, measured: float, limit: float) -> bool:
        return measured >= limit if self.higher_is_better else measured <= limit

    def limit(self, value: float) -> str:
        return f"{'>=' if self.higher_is_better else '<='} {value:.2f}"


GOALS = (
    Goal("decode_bandwidth", "decode: KV bytes per second / device copy", 0.80, 0.90),
    Goal("paging_price", "decode: shuffled / identity block table, time", 1.10, 1.05, higher_is_better=False),
    Goal("small_blocks", "decode: block 16 / block 128, time", 1.15, 1.05, higher_is_better=False),
    Goal("against_flashinfer", "decode: speed / FlashInfer's", 0.85, 0.95),
    Goal("against_torch_paged", "decode: speed / torch varlen or FlexAttention paged", 1.0, 1.1),
    Goal("single_sequence", "decode, batch 1, 32 768 keys / device copy", 0.40, 0.60),
    Goal("prefill", "prefill: speed / torch's flash SDPA", 0.60, 0.80),
)

BATCH = 32
MAIN_CONTEXT, SINGLE_CONTEXT = 4096, 32768


def decode_shapes() -> list[AttentionShape]:
    """Batch 32 over growing contexts, larger batches, one long sequence, and a ragged batch.

    The ragged batch has as many keys as the one of 32 x 2048, most of them in one sequence.
    """
    shapes = [
        AttentionShape(f"decode b{BATCH} c{context}", (context,) * BATCH)
        for context in (512, 1024, 2048, MAIN_CONTEXT, 8192, 16384)
    ]
    shapes.append(AttentionShape(f"decode b128 c{MAIN_CONTEXT}", (MAIN_CONTEXT,) * 128))
    shapes.append(AttentionShape(f"decode b1 c{SINGLE_CONTEXT}", (SINGLE_CONTEXT,)))
    shapes.append(AttentionShape("decode b32 ragged", (32768, *(1057,) * 30, 1058)))
    return shapes


def main_decode_shape() -> AttentionShape:
    """The shape of the goals that compare two ways to do the same: batch 32, context 4096."""
    return next(s for s in decode_shapes() if s.name == f"decode b{BATCH} c{MAIN_CONTEXT}")


def prefill_shapes() -> list[AttentionShape]:
    """Whole prompts, and a chunk of 512 tokens behind 3584 cached ones."""
    return [
        AttentionShape("prefill 1 x 4096", (4096,), query_len=4096),
        AttentionShape("prefill 4 x 2048", (2048,) * 4, query_len=2048),
        AttentionShape("chunk 4 x 512 of 4096", (4096,) * 4, query_len=512),
    ]


def tiny(shape: AttentionShape) -> AttentionShape:
    """The same kind of step with a handful of keys, for Triton's interpreter."""
    factor = max(shape.context_lens) // 40
    contexts = tuple(max(1, context // factor) for context in shape.context_lens[:2])
    query_len = 1 if shape.query_len == 1 else min(*contexts, max(2, shape.query_len // factor))
    block_size = min(shape.block_size, 16)
    return replace(
        shape, context_lens=contexts, query_len=query_len, block_size=block_size, num_kv_heads=2, head_size=16
    )
