"""Exercise 05: attention that reads its keys and values through block tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import several

PAGED_ATTENTION = Task(
    name="paged_attention",
    exercise="05",
    title="Attention through a block table",
    points=5,
    defines=("paged_attention",),
    preamble="import math\nimport torch",
)

TASKS = [PAGED_ATTENTION]


@dataclass
class Pool:
    """A cache with the tokens of some sequences in it, and what is needed to attend to them."""

    query: Tensor  # float32 [num_seqs, num_query_heads, head_size]
    keys: Tensor  # float32 [num_blocks, block_size, num_kv_heads, head_size]
    values: Tensor  # float32, as keys
    tables: Tensor  # int32 [num_seqs, max_blocks]
    lengths: Tensor  # int32 [num_seqs]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.query, self.keys, self.values, self.tables, self.lengths

    @property
    def text(self) -> str:
        _, block_size, kv_heads, head_size = self.keys.shape
        return (
            f"lengths {self.lengths.tolist()}, block size {block_size}, "
            f"{several(self.query.shape[1], 'query head')}, {several(kv_heads, 'KV head')}, "
            f"head size {head_size}, block tables {self.tables.tolist()}"
        )


def make_pool(
    lengths: Sequence[int],
    block_size: int,
    heads: tuple[int, int] = (1, 1),
    head_size: int = 8,
    *,
    in_order: bool = False,
    unused: float = 50.0,
    padding: int | None = None,
    seed: int = 5,
) -> Pool:
    """Random queries, keys and values. Slots that hold no token hold `unused`.

    `heads`: of queries and of keys. Blocks of a sequence lie anywhere, or `in_order` from block 0 on. Tables
    are two entries longer than need be; these are `padding`, by default the number of a block without tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = torch.arange(num_blocks) if in_order else torch.randperm(num_blocks, generator=generator)
    *blocks, empty, _ = order.tolist()
    query_heads, kv_heads = heads
    keys, values = torch.full((2, num_blocks, block_size, kv_heads, head_size), unused)
    tables = torch.full(
        (len(lengths), max(counts) + 2), empty if padding is None else padding, dtype=torch.int32
    )
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, blocks = blocks[:count], blocks[count:]
        tables[seq, :count] = torch.tensor(mine, dtype=torch.int32)
        for position in range(length):
            block, offset = mine[position // block_size], position % block_size
            keys[block, offset], values[block, offset] = torch.randn(
                2, kv_heads, head_size, generator=generator
            )
    query = torch.randn(len(lengths), query_heads, head_size, generator=generator)
    return Pool(query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32))


def expected(pool: Pool) -> Tensor:
    """The contract in float64, token by token and head by head: [num_seqs, num_query_heads, head_size]."""
    output = torch.zeros(pool.query.shape, dtype=torch.float64)
    block_size = pool.keys.shape[1]
    share = pool.query.shape[1] // pool.keys.shape[2]
    for seq, length in enumerate(pool.lengths.tolist()):
        places = [(int(pool.tables[seq, p // block_size]), p % block_size) for p in range(length)]
        for head in range(pool.query.shape[1] if places else 0):
            q = pool.query[seq, head].double()
            scores = torch.stack([q @ pool.keys[b, o, head // share].double() for b, o in places])
            weights = torch.softmax(scores / q.numel() ** 0.5, 0)
            for weight, (b, o) in zip(weights, places, strict=True):
                output[seq, head] += weight * pool.values[b, o, head // share].double()
    return output


def same_output(learner: Learner, expect: Expect, pool: Pool, what: str = "") -> None:
    given = pool.text + (f"; {what}" if what else "")
    got = learner.paged_attention(*pool.arguments)
    expect.close(got, expected(pool), given, tolerance=1e-5)
    dtype = str(getattr(got, "dtype", "no tensor"))
    what, why = f"{given}: dtype of the answer", "the contract asks for float32; .to(query.dtype) at the end"
    expect.true(dtype.endswith("float32"), what, "torch.float32, as the query", dtype, hint=why)


@PAGED_ATTENTION.check(
    "averages the values of all tokens of the sequence, and of no other slot",
    hint="the last block holds 1 to block_size tokens; at an exact multiple it is full, and "
    "length % block_size, which is 0 there, is not how many it holds",
)
def every_token(learner: Learner, expect: Expect) -> None:
    for length in (1, 3, 4, 5, 8, 9):
        pool = make_pool([length], 4, in_order=True, seed=length)
        pool.query.zero_()
        same_output(learner, expect, pool, "a query of zeros, so all weights are equal")


@PAGED_ATTENTION.check(
    "weights are the softmax of scores divided by the root of the head size",
    hint="divide by the square root of head_size, the last axis, before the softmax, "
    "and take the softmax over the tokens",
)
def softmax(learner: Learner, expect: Expect) -> None:
    for head_size in (1, 8, 48, 64):
        same_output(learner, expect, make_pool([7], 4, head_size=head_size, in_order=True))


@PAGED_ATTENTION.check(
    "finds block p // block_size of a sequence through its table",
    hint="blocks of one sequence lie anywhere in the pool: which one holds token p is in "
    "block_tables[i, p // block_size]",
)
def through_the_table(learner: Learner, expect: Expect) -> None:
    for seed, (length, block_size) in enumerate([(11, 4), (16, 4), (5, 1), (20, 16)]):
        same_output(learner, expect, make_pool([length], block_size, seed=seed))


@PAGED_ATTENTION.check(
    "query head h reads KV head h // (query heads per KV head)",
    hint="neighbouring query heads share a KV head: with 9 and 3, heads 0, 1, 2 read KV head 0; "
    "h % 3 gives fluent nonsense",
)
def grouped_heads(learner: Learner, expect: Expect) -> None:
    for heads in [(2, 2), (9, 3), (4, 2), (6, 1), (5, 5), (14, 2)]:
        same_output(learner, expect, make_pool([6], 4, heads))


@PAGED_ATTENTION.check(
    "each sequence of a batch has its own length and table",
    hint="sequence i reads row i of block_tables and of query, up to context_lens[i]",
)
def ragged(learner: Learner, expect: Expect) -> None:
    same_output(learner, expect, make_pool([5, 1, 8, 13], 4, (2, 1)))
    same_output(learner, expect, make_pool([16, 33, 2, 32, 1], 16, (9, 3), 16))


@PAGED_ATTENTION.check(
    "what lies in unused slots does not matter, not even NaN",
    hint="a weight of 0 times a value of NaN is NaN, and so is a score of NaN plus minus infinity: "
    "do not read the slots after the last token at all, or replace what was read there",
)
def unused_slots(learner: Learner, expect: Expect) -> None:
    for unused in (float("nan"), float("inf")):
        for lengths in ([5], [1, 7, 4]):
            pool = make_pool(lengths, 4, (3, 1), unused=unused)
            same_output(learner, expect, pool, f"unused slots hold {unused}")
    pool = make_pool([6, 4], 4, (3, 1), unused=float("nan"))
    kept = [learner.keep(argument) for argument in pool.arguments]
    learner.paged_attention(*kept)
    names = "query", "key_cache", "value_cache", "block_tables", "context_lens"
    for argument, before, name in zip(kept, pool.arguments, names, strict=True):
        same = torch.equal(
            learner.fetch(argument).view(torch.int32), before.view(torch.int32)
        )  # NaN is not NaN
        why = f"you changed {name} in place: it belongs to the caller, who reads it again. /= or a "
        why += "method whose name ends in _ writes into its tensor"
        expect.true(same, f"{pool.text}: {name} after the call", "as before", "something else", hint=why)


@PAGED_ATTENTION.check(
    "padding of a table is never followed",
    hint="a table has room for the longest sequence; entries beyond the blocks that a sequence needs are any "
    "number, so look up only the blocks of positions 0 to length - 1",
)
def padded_tables(learner: Learner, expect: Expect) -> None:
    for padding in (-1, 99, -(2**31), 2**31 - 1):
        pool = make_pool([3, 12, 4], 4, (2, 1), unused=float("nan"), padding=padding)
        same_output(learner, expect, pool)


@PAGED_ATTENTION.check(
    "a sequence without tokens gives 0",
    hint="the softmax of nothing but minus infinity is NaN; where a sequence sees no token its output is 0",
)
def empty_sequence(learner: Learner, expect: Expect) -> None:
    for lengths in ([0, 5], [3, 0, 0, 8], [0]):
        for padding in (None, -1):
            pool = make_pool(lengths, 4, (2, 2), unused=float("nan"), padding=padding)
            same_output(learner, expect, pool)


@PAGED_ATTENTION.check(
    "large scores do not overflow",
    hint="exp(100) is infinity in float32: take off the largest score first, as torch.softmax does",
)
def large_scores(learner: Learner, expect: Expect) -> None:
    for factor in (64, -64):
        pool = make_pool([6, 9], 4, (2, 1), 16)
        pool.query, pool.keys = factor * pool.query.round(), pool.keys.round()  # scores are exact
        same_output(learner, expect, pool, "queries of some hundreds")
