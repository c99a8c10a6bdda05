"""The graders of exercise 07 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

pytest.importorskip("triton")

DECODE_KERNEL = Proof(
    task="decode_kernel",
    second='''
@triton.jit
def rows_of(cache_ptr, table_ptr, positions, context_len, stride_block, stride_slot, dims,
            BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Rows of a cache by position; 0 behind the end."""
    wide = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < context_len).to(tl.int64)
    place = wide * stride_block + (positions % BLOCK_SIZE) * stride_slot
    mask = (positions < context_len)[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(cache_ptr + place[:, None] + dims[None, :], mask=mask, other=0)


@triton.jit
def my_decode_kernel(
    output_ptr, query_ptr, key_cache_ptr, value_cache_ptr, block_tables_ptr, context_lens_ptr, scale,
    stride_block, stride_slot, stride_head, stride_table,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):
    """A while loop, powers of two, and the average kept up to date in place of the weighted sum."""
    head, seq = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, HEAD_PADDED)
    row = (seq * tl.num_programs(0) + head) * HEAD_SIZE
    query = tl.load(query_ptr + row + dims, mask=dims < HEAD_SIZE, other=0.0) * (scale * 1.4426950408889634)
    table_ptr = block_tables_ptr + seq * stride_table
    context_len = tl.load(context_lens_ptr + seq)
    key_cache_ptr += (head // GROUP) * stride_head
    value_cache_ptr += (head // GROUP) * stride_head
    first = 0
    largest = tl.full([], -float("inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    average = tl.zeros([HEAD_PADDED], tl.float32)
    while first < context_len:
        lanes = first + tl.arange(0, TILE)
        keys = rows_of(key_cache_ptr, table_ptr, lanes, context_len, stride_block, stride_slot, dims,
                       BLOCK_SIZE, HEAD_SIZE)
        values = rows_of(value_cache_ptr, table_ptr, lanes, context_len, stride_block, stride_slot, dims,
                         BLOCK_SIZE, HEAD_SIZE)
        scores = tl.sum(query[None, :] * keys, 1)
        scores = tl.where(lanes >= context_len, -float("inf"), scores)
        top = tl.maximum(tl.max(scores, 0), largest)
        old = weight * tl.exp2(largest - top)
        parts = tl.exp2(scores - top)
        weight = old + tl.sum(parts, 0)
        average = average * (old / weight) + tl.sum(values * parts[:, None], 0) / weight
        largest = top
        first += TILE
    tl.store(output_ptr + row + dims, average, mask=dims < HEAD_SIZE)
''',
    wrong=[
        Wrong(
            "does not rescale when a larger score comes",
            "many tiles",
            replace=("acc = acc * rescale +", "acc = acc +"),
        ),
        Wrong(
            "forgets the last, partly filled tile",
            "one tile of keys",
            replace=("range(0, context_len, TILE)", "range(0, context_len // TILE * TILE, TILE)"),
        ),
        Wrong(
            "looks one block up for a whole tile",
            "one tile of keys",
            replace=(
                "table_ptr + positions // BLOCK_SIZE, mask=live",
                "table_ptr + first // BLOCK_SIZE + 0 * positions, mask=live",
            ),
        ),
        Wrong(
            "takes the query head modulo the group",
            "query heads that share a KV head",
            replace=("kv_head = head // GROUP", "kv_head = head % (tl.num_programs(0) // GROUP)"),
        ),
        Wrong(
            "loads values of idle lanes and gives them weight 0",
            "what is not this sequence's",
            replace=(
                "tl.load(value_cache_ptr + rows[:, None] + dims[None, :], mask=real, other=0.0)",
                "tl.load(value_cache_ptr + rows[:, None] + dims[None, :], mask=in_head[None, :], other=0.0)",
            ),
        ),
        Wrong(
            "no mask for the head size",
            "a head size that fills no tile",
            replace=("live[:, None] & in_head[None, :]", "live[:, None] & (dims >= 0)[None, :]"),
        ),
        Wrong(
            "begins with a number that seems low enough",
            "scores may be large, or far below zero",
            replace=('maximum = float("-inf")', "maximum = -1e4"),
        ),
        Wrong(
            "divides by nothing",
            "a sequence without keys",
            replace=("tl.where(total > 0.0, total, 1.0)", "total"),
        ),
        Wrong(
            "multiplies in 32 bits",
            "addresses of far blocks",
            replace=(".to(tl.int64)", ""),
        ),
        Wrong(
            "lets a variable of the loop change its type, which only the interpreter takes",
            "the kernel compiles for a card, too",
            replace=("total = 0.0", "total = 0"),
        ),
    ],
)

COMBINE = Proof(
    task="combine",
    second='''
import math

def my_combine(maximum, total, acc):
    """Head by head and part by part, with numbers of Python."""
    num_parts, num_heads, head_size = acc.shape
    result = torch.zeros(num_heads, head_size)
    for head in range(num_heads):
        weights = []
        for part in range(num_parts):
            t = float(total[part, head])
            weights.append(float(maximum[part, head]) + math.log(t) if t else None)
        live = [w for w in weights if w is not None]
        if live:
            log_sum = max(live) + math.log(sum(math.exp(w - max(live)) for w in live))
            for part, w in enumerate(weights):
                if w is not None:
                    average = acc[part, head] / total[part, head]
                    result[head] += math.exp(w - log_sum) * average
    return result.tolist()
''',
    wrong=[
        Wrong(
            "adds the parts as they are",
            "the parts together are the whole",
            replace=("torch.exp(maximum - shift)", "torch.ones_like(maximum)"),
        ),
        Wrong(
            "averages the averages",
            "the parts together are the whole",
            source="""
def my_combine(maximum, total, acc):
    share = torch.softmax(maximum, dim=0).nan_to_num()
    return (share[:, :, None] * acc / total.clamp(min=1)[:, :, None]).sum(dim=0)
""",
        ),
        Wrong(
            "does not subtract the largest",
            "large and small scores",
            replace=("torch.exp(maximum - shift)", "torch.exp(maximum)"),
        ),
        Wrong(
            "subtracts the largest of all heads",
            "large and small scores",
            replace=("maximum.max(dim=0).values", "maximum.max().expand(maximum.shape[1])"),
        ),
        Wrong(
            "begins with the maximum 0",
            "large and small scores",
            replace=("maximum.max(dim=0).values", "maximum.max(dim=0).values.clamp(min=0)"),
        ),
        Wrong(
            "gives an empty part a number that seems low enough",
            "empty parts add nothing",
            replace=(
                "largest = maximum.max",
                "maximum = maximum.where(total > 0, -1e4)\n    largest = maximum.max",
            ),
        ),
        Wrong(
            "takes minus infinity from minus infinity",
            "a head without any key",
            replace=("torch.where(largest == -torch.inf, 0.0, largest)", "largest"),
        ),
        Wrong(
            "divides by nothing",
            "a head without any key",
            replace=("torch.where(total > 0, total, 1.0)", "total"),
        ),
    ],
)

PROOFS = [DECODE_KERNEL, COMBINE]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_graders_tell_right_from_wrong(proof):
    proof.check()
