"""The grader of exercise 06 finds what it is there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

pytest.importorskip("triton")

LOOP = '''
@triton.jit
def move(from_ptr, to_ptr, SIZE: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(to_ptr + lanes, tl.load(from_ptr + lanes, mask=lanes < SIZE), mask=lanes < SIZE)


@triton.jit
def my_write_kv(
    key_ptr, value_ptr, slots_ptr, key_cache_ptr, value_cache_ptr,
    stride_token, stride_head, stride_block, stride_slot, stride_cache_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HEAD_PADDED: tl.constexpr,
):
    """Head after head, by moving pointers, with a function for one row."""
    token = tl.program_id(0)
    slots_ptr += token
    slot = tl.load(slots_ptr)
    if slot >= 0:
        wide = tl.cast(slot, tl.int64)
        place = (wide // BLOCK_SIZE) * stride_block + (wide - wide // BLOCK_SIZE * BLOCK_SIZE) * stride_slot
        for head in range(NUM_HEADS):
            source = token * stride_token + head * stride_head
            target = place + head * stride_cache_head
            move(value_ptr + source, value_cache_ptr + target, HEAD_SIZE, HEAD_PADDED)
            move(key_ptr + source, key_cache_ptr + target, HEAD_SIZE, HEAD_PADDED)
'''

WRITE_KV = Proof(
    task="write_kv",
    second=LOOP,
    wrong=[
        Wrong(
            "no mask for the head size",
            "head sizes and numbers of heads that fill no tile",
            replace=("(head < NUM_HEADS) & (dims < HEAD_SIZE)", "(head < NUM_HEADS) & (dims >= 0)"),
        ),
        Wrong(
            "no mask for the number of heads",
            "head sizes and numbers of heads that fill no tile",
            replace=("(head < NUM_HEADS) & (dims < HEAD_SIZE)", "(head >= 0) & (dims < HEAD_SIZE)"),
        ),
        Wrong(
            "masks the load and not the store",
            "head sizes and numbers of heads that fill no tile",
            replace=(
                "tl.store(value_cache_ptr + target, value, mask=real)",
                "tl.store(value_cache_ptr + target, value)",
            ),
        ),
        Wrong(
            "multiplies in 32 bits",
            "addresses of far blocks",
            replace=(".to(tl.int64)", ""),
        ),
        Wrong(
            "widens the product",
            "addresses of far blocks",
            source=LOOP.replace("tl.cast(slot, tl.int64)", "slot").replace(
                "place = (wide // BLOCK_SIZE) * stride_block",
                "place = ((wide // BLOCK_SIZE) * stride_block).to(tl.int64)",
            ),
        ),
        Wrong("writes padding", "a token whose slot is -1", replace=("if slot < 0:", "if slot < -1:")),
        Wrong(
            "takes slots of all blocks to lie side by side",
            "nothing is taken to lie side by side",
            replace=("block * stride_block + offset * stride_slot", "slot * stride_slot"),
        ),
        Wrong(
            "takes rows to lie side by side",
            "nothing is taken to lie side by side",
            replace=("token * stride_token", "token * NUM_HEADS * HEAD_SIZE"),
        ),
        Wrong(
            "swaps keys and values",
            "each token's keys and values are in its slot",
            replace=("tl.load(key_ptr + source", "tl.load(value_ptr + source"),
        ),
        Wrong(
            "leaves a loop with break, which only the interpreter takes",
            "the kernel compiles for a card, too",
            source=LOOP.replace(
                "range(NUM_HEADS):",
                "range(HEADS_PADDED):\n            if head >= NUM_HEADS:\n                break",
            ),
        ),
    ],
)

PROOFS = [WRITE_KV]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
