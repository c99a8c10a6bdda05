"""Exercise 07, task 1: a kernel that attends through a block table in one pass."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.tasks import kernels
from coursekit.grading.tasks.kernels import run_fenced
from coursekit.grading.values import several

DECODE_KERNEL = Task(
    name="decode_kernel",
    exercise="07",
    title="Attention through the block table, in one pass",
    points=6,
    defines=("my_decode_kernel",),
    preamble="import importlib.util\nimport math\nimport os\nimport torch\n"
    "import triton\nimport triton.language as tl\n"
    "from coursekit.given.launches import decode_from_pool, launch_decode, reads_of_decode",
)

TASKS = [DECODE_KERNEL]


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Of one query [size] and one head's keys and values [n, size], in float64; 0 without keys."""
    if not len(keys):
        return torch.zeros(len(query), dtype=torch.float64)
    return torch.softmax(scale * (keys.double() @ query.double()), dim=0) @ values.double()


PLACES = "with one block it was right: position p is in entry p // BLOCK_SIZE, at offset p % BLOCK_SIZE"
IDLE = (
    "with a full tile it was right: a lane without a key gets the score -inf by tl.where, and loads nothing"
)
ROWS = "with one sequence it was right: the table of the next begins stride_table further on"


def expect_attention(
    learner: Learner,
    expect: Expect,
    given: str,
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (1, 1),
    head_size: int = 16,
    block_size: int = 4,
    tile: int = 8,
    scores: Sequence[float] = (),
    unused: float = 0.0,
    unused_entry: int = 0,
    layers: int = 1,
    first_block: int = 0,
    hint: str = "",
) -> None:
    """Random sequences of these lengths in scattered blocks, against `attention`.

    `scores`: of the keys in turn, in place of random ones. `unused` fills what belongs to no token,
    `unused_entry` what is left of the tables.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + head_size)
    num_heads, num_kv_heads = heads
    query = torch.randn(len(lengths), num_heads, head_size, generator=generator)
    rows = torch.randn(sum(lengths), 2, num_kv_heads, head_size, generator=generator)
    scale = head_size**-0.5
    if scores:
        query[:], rows[:, 0] = 1.0, 0.0
        rows[:, 0, :, 0] = torch.tensor([scores[i % len(scores)] / scale for i in range(len(rows))])[:, None]
    needed = [-(-length // block_size) for length in lengths]
    places = random.Random(sum(lengths)).sample(range(sum(needed) + 2), sum(needed))
    pool = torch.full((sum(needed) + 2, layers, 2, block_size, num_kv_heads, head_size), unused)
    tables = torch.full((len(lengths), max(needed) + 1), unused_entry, dtype=torch.int32)
    wanted = torch.zeros(query.shape, dtype=torch.float64)
    for seq, (length, one) in enumerate(zip(lengths, rows.split(list(lengths)), strict=True)):
        blocks = [places.pop() for _ in range(needed[seq])]
        tables[seq, : len(blocks)] = torch.tensor(blocks) + first_block
        for position in range(length):
            pool[blocks[position // block_size], -1, :, position % block_size] = one[position]
        for head in range(num_heads):
            keys, values = one[:, :, head // (num_heads // num_kv_heads)].unbind(1)
            wanted[seq, head] = attention(query[seq, head], keys, values, scale)
    given += f": lengths {list(lengths)}, {several(num_heads, 'query head')} on {num_kv_heads} "
    given += f"of size {head_size}, block size {block_size}, tiles of {tile} keys"
    call = (query, pool, tables, torch.tensor(lengths, dtype=torch.int32), scale)
    options = {"tile": tile, "layer": layers - 1, "first_block": first_block}
    got = run_fenced(
        expect, given, lambda: learner.decode_from_pool(learner.my_decode_kernel, *call, **options)
    )
    expect.close(got, wanted, given, tolerance=1e-4, hint=hint)


@DECODE_KERNEL.check(
    "one tile of keys: the softmax of the scores, times the values",
    hint="score = query · key (the query is scaled already), weight = exp(score - largest); the result is "
    "the weighted sum of the values over the sum of the weights",
)
def one_tile(learner: Learner, expect: Expect) -> None:
    expect_attention(learner, expect, "a full tile, all in one block", [8], block_size=8)
    expect_attention(learner, expect, "a full tile in two blocks", [8], hint=PLACES)
    expect_attention(learner, expect, "a tile with idle lanes", [5], hint=IDLE)
    expect_attention(learner, expect, "a single key", [1], head_size=32)


@DECODE_KERNEL.check(
    "many tiles: a larger score rescales what came before",
    hint="when the maximum grows from m to n, the sums so far were made with exp(score - m): multiply both, "
    "total and acc, by exp(m - n) before you add",
)
def many_tiles(learner: Learner, expect: Expect) -> None:
    expect_attention(learner, expect, "random scores", [41])
    expect_attention(learner, expect, "two sequences", [24, 41], hint=ROWS)
    expect_attention(learner, expect, "scores that rise", [23], scores=[0.1 * i for i in range(23)])
    expect_attention(learner, expect, "scores that fall", [23], scores=[-0.1 * i for i in range(23)])


@DECODE_KERNEL.check(
    "lengths at the edges of tiles and blocks, which do not depend on each other",
    hint="each lane looks up its own block: a tile may hold several blocks, and a block several tiles",
)
def edges(learner: Learner, expect: Expect) -> None:
    for block_size, tile in [(4, 8), (8, 4), (3, 8)]:
        lengths = [1, 3, 4, 5, 7, 8, 9, 12, 16, 17]
        expect_attention(learner, expect, "edges", lengths, block_size=block_size, tile=tile)
    expect_attention(learner, expect, "blocks of one token", [9], block_size=1, tile=4)


@DECODE_KERNEL.check(
    "query heads that share a KV head",
    hint="query head h reads KV head h // GROUP: with 9 query heads on 3, heads 0, 1, 2 share KV head 0",
)
def shared_heads(learner: Learner, expect: Expect) -> None:
    for heads in [(9, 3), (5, 1), (4, 4), (4, 2)]:
        expect_attention(learner, expect, "heads", [6, 11], heads=heads)


@DECODE_KERNEL.check(
    "what is not this sequence's is never used, not even times 0",
    hint="0 * NaN is NaN: a lane without a key must not load a value, mask both loads with other=0.0, and "
    "set its score to -inf with tl.where",
)
def unused_slots(learner: Learner, expect: Expect) -> None:
    for unused, words in [(math.nan, "NaN"), (1e4, "10000")]:
        given = f"{words} in all other places of the pool"
        expect_attention(learner, expect, given, [5, 2, 10], unused=unused, heads=(2, 2))
    given = "-1 in the rest of the tables, NaN in the rest of the pool"
    expect_attention(learner, expect, given, [5, 12], unused=math.nan, unused_entry=-1)


@DECODE_KERNEL.check(
    "a head size that fills no tile",
    hint="HEAD_PADDED lanes, HEAD_SIZE numbers: the others belong to the next head, or to nobody",
)
def odd_head_size(learner: Learner, expect: Expect) -> None:
    for head_size in (48, 80):
        given = "NaN in all other places of the pool"
        expect_attention(
            learner, expect, given, [9, 4], head_size=head_size, heads=(2, 2), unused=math.nan, layers=2
        )


@DECODE_KERNEL.check(
    "scores may be large, or far below zero",
    hint="exp(89) is infinite in float32, so subtract the largest score so far; and begin with -inf, for any "
    "number that you think low enough is larger than some score",
)
def extreme_scores(learner: Learner, expect: Expect) -> None:
    for name, scores in {
        "scores from 100 to 130": [100.0 + 3 * i for i in range(11)],
        "scores from 200 down to 0": [200.0 - 20 * i for i in range(11)],
        "all scores -60000": [-60000.0],
    }.items():
        expect_attention(learner, expect, name, [11, 1], scores=scores, unused=math.nan)


@DECODE_KERNEL.check(
    "a sequence without keys gets zeros",
    hint="its loop runs no turn and total stays 0; 0 / 0 is NaN, so divide by 1 there",
)
def no_keys(learner: Learner, expect: Expect) -> None:
    expect_attention(learner, expect, "padding", [0, 6, 0], heads=(2, 1), unused=math.nan, unused_entry=-1)


@DECODE_KERNEL.check(
    "addresses of far blocks are computed in 64 bits",
    hint="entries of a table and strides are 32-bit integers, and so is their product: widen the block "
    "before you multiply, blocks.to(tl.int64)",
)
def far_behind(learner: Learner, expect: Expect) -> None:
    first = -(-(2**31) // (30 * 2 * 16 * 3 * 64))  # SmolLM2's layers and heads, keys and values
    given = f"block {first} begins 2^31 numbers after the first"
    shape = {"layers": 30, "head_size": 64, "block_size": 16}
    expect_attention(learner, expect, given, [20], heads=(3, 3), first_block=first, **shape)  # type: ignore[arg-type]


@DECODE_KERNEL.check(
    "each key and each value is read once",
    hint="one pass: a loop for the maximum and another for the sums read every key twice, and reading is "
    "what a decode step waits for. Keep maximum, total and acc in one loop, and rescale the sums as it grows",
)
def one_pass(learner: Learner, expect: Expect) -> None:
    generator = torch.Generator().manual_seed(7)
    query, (keys, values) = (
        torch.randn(1, 1, 16, generator=generator),
        torch.randn(2, 6, 4, 1, 16, generator=generator),
    )
    tables, lengths = torch.arange(6, dtype=torch.int32)[None], torch.tensor([21], dtype=torch.int32)
    given = "21 keys, tiles of 8, one head of 16: numbers read"
    counts = run_fenced(
        expect,
        given,
        lambda: learner.reads_of_decode(learner.my_decode_kernel, query, keys, values, tables, lengths, 0.25),
    )
    expect.equal(counts, [21 * 16, 21 * 16], f"{given} of the key cache, and of the value cache")


@DECODE_KERNEL.check(kernels.COMPILES, hint=kernels.COMPILES_HINT, seconds=120)
def compiles(learner: Learner, expect: Expect) -> None:
    pointers = ["output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"]
    strides = ["stride_block", "stride_slot", "stride_head", "stride_table"]
    types = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(strides, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(["block_tables_ptr", "context_lens_ptr"], "*i32")
    constants = {"BLOCK_SIZE": 16, "HEAD_SIZE": 80, "HEAD_PADDED": 128, "GROUP": 3, "TILE": 32}
    kernels.expect_compiled(learner, expect, "my_decode_kernel", types, constants)
