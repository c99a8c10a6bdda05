"""The graders of exercise 02 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

BYTES_PER_TOKEN = Proof(
    task="bytes_per_token",
    second="""
from functools import reduce
from operator import mul

def bytes_per_token(model, bits_per_number, scale_bytes):
    "Numbers and scales counted apart."
    factors = [model.num_kv_heads, 2, model.num_layers]
    numbers = reduce(mul, factors, model.head_size)
    scales = reduce(mul, factors)
    return numbers * bits_per_number // 8 + scales * scale_bytes
""",
    wrong=[
        Wrong("forgets the value", "two vectors in each layer", replace=("2 * model", "model")),
        Wrong("forgets the layers", "two vectors in each layer", replace=(" * model.num_layers", "")),
        Wrong(
            "takes bits for bytes",
            "two vectors in each layer",
            replace=("bits_per_number // 8", "bits_per_number"),
        ),
        Wrong(
            "counts 32 bits whatever the format",
            "two vectors in each layer",
            replace=("bits_per_number // 8", "4"),
        ),
        Wrong(
            "counts query heads",
            "counts the heads of keys and values",
            replace=("num_kv_heads", "num_query_heads"),
        ),
        Wrong(
            "derives the head size",
            "reads the head size",
            replace=("model.head_size", "model.hidden_size // model.num_query_heads"),
        ),
        Wrong(
            "one scale for each number",
            "each vector brings one scale",
            replace=(
                "model.head_size * bits_per_number // 8 + scale_bytes",
                "model.head_size * (bits_per_number + 8 * scale_bytes) // 8",
            ),
        ),
        Wrong(
            "one scale for each token",
            "each vector brings one scale",
            replace=(
                "model.head_size * bits_per_number // 8 + scale_bytes\n    return vectors * bytes_per_vector",
                "model.head_size * bits_per_number // 8\n    return vectors * bytes_per_vector + scale_bytes",
            ),
        ),
        Wrong(
            "forgets the scales",
            "each vector brings one scale",
            replace=("bits_per_number // 8 + scale_bytes", "bits_per_number // 8"),
        ),
    ],
)

MEMORY_PLAN = Proof(
    task="memory_plan",
    second="""
def memory_plan(card, parameters, bits, reserve, token_bytes, block_size, tokens):
    "divmod and a remainder in place of rounding up."
    whole, rest = divmod(parameters * bits, 8)
    left = card - reserve - int(whole) - bool(rest)
    if left < 0:
        raise ValueError("does not fit")
    blocks, _lost = divmod(left, token_bytes * block_size)
    full, partial = divmod(tokens, block_size)
    return [blocks, blocks // (full + (partial > 0))]
""",
    wrong=[
        Wrong(
            "takes bits for bytes",
            "blocks are what is left",
            replace=("bits_per_weight / 8", "bits_per_weight"),
        ),
        Wrong("forgets the reserve", "blocks are what is left", replace=(" - reserve_bytes", "")),
        Wrong(
            "counts a block that is only partly there",
            "what is less than a block is lost",
            replace=(
                "kv_bytes // (block_size * token_bytes)",
                "math.ceil(kv_bytes / (block_size * token_bytes))",
            ),
        ),
        Wrong(
            "divides tokens and forgets that blocks are whole",
            "a request takes whole blocks",
            replace=("num_blocks // blocks_per_request", "num_blocks * block_size // tokens_per_request"),
        ),
        Wrong(
            "a block too many at exact multiples",
            "a request takes whole blocks",
            replace=("math.ceil(tokens_per_request / block_size)", "tokens_per_request // block_size + 1"),
        ),
        Wrong(
            "rounds the blocks of a request down",
            "a request takes whole blocks",
            replace=(
                "math.ceil(tokens_per_request / block_size)",
                "max(1, tokens_per_request // block_size)",
            ),
        ),
        Wrong(
            "rounds the weights down",
            "weights round up to a whole byte",
            replace=(
                "math.ceil(num_parameters * bits_per_weight / 8)",
                "int(num_parameters * bits_per_weight / 8)",
            ),
        ),
        Wrong(
            "plans with a negative rest",
            "a model that does not fit raises ValueError",
            replace=("if kv_bytes < 0:", "if False:"),
        ),
        Wrong(
            "answers nothing where an error is due",
            "a model that does not fit raises ValueError",
            replace=(
                'raise ValueError(f"{weight_bytes} + {reserve_bytes} bytes do not fit {card_bytes}")',
                "return 0, 0",
            ),
        ),
        Wrong(
            "refuses a model that just fits",
            "a model that does not fit raises ValueError",
            replace=("if kv_bytes < 0:", "if kv_bytes <= 0:"),
        ),
    ],
)

PROOFS = [BYTES_PER_TOKEN, MEMORY_PLAN]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
