"""Exercise 02: bytes of keys and values for a token, and what fits on a card."""

import random
from fractions import Fraction
from functools import partial
from typing import Any

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import several

SETUP = "from coursekit.given.models import LLAMA_70B, OPT_13B, SMOLLM2_135M, ModelShape"

BYTES_PER_TOKEN = Task(
    name="bytes_per_token",
    exercise="02",
    title="Bytes per token",
    points=2,
    defines=("bytes_per_token",),
    preamble=SETUP,
)

MEMORY_PLAN = Task(
    name="memory_plan",
    exercise="02",
    title="A memory plan",
    points=3,
    defines=("memory_plan",),
    preamble=SETUP,
)

TASKS = [BYTES_PER_TOKEN, MEMORY_PLAN]


def same_bytes(
    learner: Learner,
    expect: Expect,
    shape: tuple[int, int, int, int],
    hidden_size: int,
    bits: int,
    scale_bytes: int,
) -> None:
    """`shape`: layers, query heads, KV heads, head size. What is expected is counted vector by vector."""
    layers, query_heads, kv_heads, head_size = shape
    wanted = sum(
        head_size * bits // 8 + scale_bytes
        for _layer in range(layers)
        for _head in range(kv_heads)
        for _vector in ("key", "value")
    )
    model = learner.ModelShape(*shape, hidden_size)
    given = (
        f"{several(layers, 'layer')}, {several(query_heads, 'query head')}, {several(kv_heads, 'KV head')}, "
        f"head size {head_size}, "
        f"hidden size {hidden_size}; {bits} bits, {scale_bytes} bytes for a scale"
    )
    expect.whole(learner.bytes_per_token(model, bits, scale_bytes), wanted, given)


@BYTES_PER_TOKEN.check(
    "two vectors in each layer for each head, in bytes",
    hint="a key and a value; every layer has its own; and eight bits are one byte",
)
def vectors(learner: Learner, expect: Expect) -> None:
    same_bytes(learner, expect, (1, 1, 1, 8), 8, 16, 0)
    same_bytes(learner, expect, (2, 4, 4, 8), 32, 32, 0)
    same_bytes(learner, expect, (12, 12, 12, 64), 768, 16, 0)
    same_bytes(learner, expect, (3, 2, 2, 6), 12, 4, 0)


@BYTES_PER_TOKEN.check(
    "counts the heads of keys and values, not those of queries",
    hint="several query heads share one key and value; queries are used once and not kept",
)
def grouped(learner: Learner, expect: Expect) -> None:
    for kv_heads in (1, 2, 4, 8):
        same_bytes(learner, expect, (2, 8, kv_heads, 16), 128, 16, 0)


@BYTES_PER_TOKEN.check(
    "reads the head size and does not derive it",
    hint="hidden_size / num_query_heads is right for many models and wrong for those that state a head size; "
    "one engine sized its cache that way and wrote beyond its end",
)
def stated_head_size(learner: Learner, expect: Expect) -> None:
    same_bytes(learner, expect, (3, 4, 2, 32), 64, 16, 0)
    same_bytes(learner, expect, (3, 5, 1, 80), 640, 16, 0)


@BYTES_PER_TOKEN.check(
    "each vector brings one scale",
    hint="scales are memory too: one for each layer, KV head, and for key and value apart; not one a number, "
    "and not one a token",
)
def scales(learner: Learner, expect: Expect) -> None:
    same_bytes(learner, expect, (2, 4, 2, 8), 32, 8, 4)
    same_bytes(learner, expect, (30, 9, 3, 64), 576, 8, 4)
    same_bytes(learner, expect, (3, 2, 2, 6), 12, 4, 2)


@BYTES_PER_TOKEN.check(
    "any model and format, to the byte",
    hint="'about right' is not right: an exact number can be compared exactly",
)
def any_model(learner: Learner, expect: Expect) -> None:
    source = random.Random(2)
    for _ in range(12):
        kv_heads, head_size = source.randrange(1, 9), 2 * source.randrange(4, 65)
        query_heads = kv_heads * source.randrange(1, 9)
        shape = source.randrange(1, 81), query_heads, kv_heads, head_size
        bits, scale = source.choice([(4, 2), (4, 4), (8, 0), (8, 2), (8, 4), (16, 0), (32, 0)])
        same_bytes(learner, expect, shape, 64 * source.randrange(2, 65), bits, scale)


def expected_plan(
    card: int, parameters: int, bits: float, reserve: int, token: int, block: int, n: int
) -> Any:
    """The contract in exact fractions and by counting: None where it asks for a ValueError."""
    weights = -(-Fraction(bits) * parameters // 8)
    left = card - weights - reserve
    if left < 0:
        return None
    num_blocks = int(Fraction(left, block * token))
    per_request = len(range(0, n, block))  # blocks start at tokens 0, block, 2 * block, …
    return num_blocks, num_blocks // per_request


NAMES = ("card", "parameters", "bits", "reserve", "bytes a token", "block size", "tokens a request")


def same_blocks(learner: Learner, expect: Expect, *args: Any) -> None:
    given = ", ".join(f"{name} {value}" for name, value in zip(NAMES, args, strict=True))
    expect.whole(learner.memory_plan(*args)[0], expected_plan(*args)[0], f"{given}: num_blocks")


def same_plan(learner: Learner, expect: Expect, *args: Any) -> None:
    given = ", ".join(f"{name} {value}" for name, value in zip(NAMES, args, strict=True))
    plan = learner.memory_plan(*args)
    expect.equal(plan, expected_plan(*args), given)
    for number, wanted in zip(plan, expected_plan(*args), strict=True):
        expect.whole(number, wanted, given)


@MEMORY_PLAN.check(
    "blocks are what is left after the weights and the reserve",
    hint="bits_per_weight are bits, eight to the byte; take off the weights and the reserve, then divide by "
    "the bytes of a whole block",
)
def blocks_left(learner: Learner, expect: Expect) -> None:
    same_blocks(learner, expect, 1000, 400, 8, 0, 10, 4, 4)
    same_blocks(learner, expect, 1000, 400, 4, 0, 10, 4, 4)
    same_blocks(learner, expect, 1000, 400, 8, 100, 10, 2, 2)
    same_blocks(learner, expect, 80 * 10**9, 70 * 10**9, 4.5, 3_924_840_000, 327_680, 16, 4096)


@MEMORY_PLAN.check(
    "what is less than a block is lost",
    hint="memory is given out in whole blocks: round down, or the last block reaches beyond the card",
)
def whole_blocks(learner: Learner, expect: Expect) -> None:
    for card in (439, 440, 441, 479, 480):
        same_blocks(learner, expect, card, 400, 8, 0, 10, 4, 4)
    same_blocks(learner, expect, 1000, 400, 8, 100, 10, 4, 9)


@MEMORY_PLAN.check(
    "a request takes whole blocks, rounded up",
    hint="a block belongs to one request, so the rest of its last one helps nobody; at an exact multiple of "
    "the block size the last block is full, and no further one is needed",
)
def whole_requests(learner: Learner, expect: Expect) -> None:
    for tokens in (1, 3, 4, 5, 7, 8, 9, 12, 48, 49):
        same_plan(learner, expect, 1000, 400, 8, 100, 10, 4, tokens)
    same_plan(learner, expect, 1000, 400, 8, 100, 10, 1, 7)
    same_plan(learner, expect, 80 * 10**9, 70 * 10**9, 4.5, 0, 2_621_440, 16, 4096)


@MEMORY_PLAN.check(
    "weights round up to a whole byte",
    hint="three weights of 4 bits take two bytes, not one",
)
def whole_bytes(learner: Learner, expect: Expect) -> None:
    for parameters, bits in [(3, 4), (5, 4), (7, 4.5), (16, 4.5), (1, 4)]:
        for card in range(10, 14):
            same_blocks(learner, expect, card, parameters, bits, 0, 1, 1, 1)


@MEMORY_PLAN.check(
    "a model that does not fit raises ValueError, one that just fits leaves (0, 0)",
    hint="a negative number of bytes is no plan; a server that starts with it dies at its first request. "
    "No byte left over is no error: the plan is then empty",
)
def no_room(learner: Learner, expect: Expect) -> None:
    for card, parameters, bits, reserve in [(399, 400, 8, 0), (499, 400, 8, 100), (1000, 400, 16, 300)]:
        args = card, parameters, bits, reserve, 10, 4, 9
        given = ", ".join(f"{name} {value}" for name, value in zip(NAMES, args, strict=True))
        expect.raises("ValueError", partial(learner.memory_plan, *args), given)
    same_plan(learner, expect, 400, 400, 8, 0, 10, 4, 9)
    same_plan(learner, expect, 500, 400, 8, 100, 10, 4, 9)
    same_plan(learner, expect, 539, 400, 8, 100, 10, 4, 9)
    same_plan(learner, expect, 540, 400, 8, 100, 10, 4, 9)


@MEMORY_PLAN.check(
    "any card, model and length",
    hint="what is needed is rounded up, what there is is rounded down",
)
def any_plan(learner: Learner, expect: Expect) -> None:
    source = random.Random(20)
    for _ in range(20):
        bits = source.choice([4, 4.5, 8, 8.5, 16])
        parameters, reserve = source.randrange(1, 5000), source.randrange(0, 500)
        block_size = source.choice([1, 4, 16, 24])
        card = int(parameters * bits / 8) + 1 + reserve + source.randrange(0, 20_000)
        token, tokens = source.randrange(1, 40), source.randrange(1, 200)
        same_plan(learner, expect, card, parameters, bits, reserve, token, block_size, tokens)
