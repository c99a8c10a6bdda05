"""Exercise 04: a block allocator and a block table."""

import random
from collections.abc import Sized
from functools import partial

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task

SETUP = "from coursekit.given.pools import ScatteredPool"

ALLOCATOR = Task(
    name="allocator",
    exercise="04",
    title="A block allocator",
    points=3,
    defines=("MyBlockPool",),
    preamble=SETUP,
)

BLOCK_TABLE = Task(
    name="block_table",
    exercise="04",
    title="A block table and its slots",
    points=4,
    defines=("MyBlockTable",),
    preamble=SETUP,
)

TASKS = [ALLOCATOR, BLOCK_TABLE]


@ALLOCATOR.check(
    "gives out different blocks until none is left",
    hint="a block that is given out must leave the free list; n blocks are asked for in one call",
)
def gives_out(learner: Learner, expect: Expect) -> None:
    pool = learner.MyBlockPool(6)
    expect.equal(pool.num_free, 6, "MyBlockPool(6).num_free")
    first, second = pool.allocate(2), pool.allocate(4)
    for blocks, n in ((first, 2), (second, 4)):
        why = f"{n} free blocks are enough for {n}: compare with >, not with >=" if blocks is None else ""
        given = f"blocks of allocate({n}), the {'first' if n == 2 else 'second'} call of a pool of 6"
        expect.true(isinstance(blocks, Sized), given, str(n), blocks, hint=why)
    expect.equal(sorted([*first, *second]), list(range(6)), "allocate(2), then allocate(4), of 6 blocks")
    expect.equal(pool.num_free, 0, "num_free after 6 of 6 blocks were given out")
    pool = learner.MyBlockPool(6)
    nothing = "free[-n:] of a list is the whole list when n is 0" if len(pool.allocate(0)) else ""
    expect.equal(pool.num_free, 6, "num_free after allocate(0) of 6 free blocks", hint=nothing)
    expect.equal(pool.allocate(0), [], "allocate(0) with 6 blocks free", hint=nothing)


@ALLOCATOR.check(
    "a shortage answers None and changes nothing",
    hint="look at num_free before you take the first block: when the rest is missing, the first is lost",
)
def shortage(learner: Learner, expect: Expect) -> None:
    pool = learner.MyBlockPool(4)
    pool.allocate(3)
    expect.equal(pool.allocate(2), None, "allocate(2) with 1 block free")
    expect.equal(pool.num_free, 1, "num_free after an allocation that was refused")
    expect.equal(len(pool.allocate(1)), 1, "allocate(1) with 1 block free")
    expect.equal(pool.allocate(1), None, "allocate(1) with no block free")
    expect.equal(pool.allocate(0), [], "allocate(0) with no block free")


@ALLOCATOR.check(
    "freed blocks can be given out again, as often as one likes",
    hint="every block that comes back must be on the free list exactly once",
)
def reuse(learner: Learner, expect: Expect) -> None:
    pool, source = learner.MyBlockPool(5), random.Random(4)
    held: list[list[int]] = []
    for step in range(60):
        if held and (pool.num_free < 2 or source.random() < 0.4):
            pool.free(held.pop(source.randrange(len(held))))
        else:
            held.append(pool.allocate(2))
        taken = [block for blocks in held for block in blocks]
        expect.equal(len(set(taken)), len(taken), f"blocks held after step {step}: {taken}; how many differ")
        expect.equal(pool.num_free, 5 - len(taken), f"num_free with {len(taken)} of 5 blocks held")


@ALLOCATOR.check(
    "a wrong free raises ValueError and changes nothing",
    hint="a block freed twice is on the free list twice, and two requests later write into the same memory; "
    "check all blocks of a call before you touch the free list",
)
def wrong_free(learner: Learner, expect: Expect) -> None:
    pool = learner.MyBlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    for wrong in (blocks, [4], [-1]):
        expect.raises("ValueError", partial(pool.free, wrong), f"free({wrong}) with no block of 4 held")
        expect.equal(pool.num_free, 4, f"num_free after free({wrong}) was refused")
    held = pool.allocate(4)
    for wrong in ([4], [-1], [-4]):
        why = "a list counts negative numbers from its end: is_free[-1] is about the last block"
        given = f"free({wrong}) with all 4 blocks held"
        expect.raises("ValueError", partial(pool.free, wrong), given, hint=why if wrong[0] < 0 else "")
        expect.equal(pool.num_free, 0, f"num_free after {given} was refused")
    pool.free(held)
    held = pool.allocate(1)
    free = next(block for block in range(4) if block != held[0])
    for wrong in ([held[0], held[0]], [held[0], free]):
        expect.raises("ValueError", partial(pool.free, wrong), f"free({wrong}), only {held} is held")
        expect.equal(pool.num_free, 3, f"num_free after free({wrong}) was refused")
    pool.free(held)
    expect.equal(sorted(pool.allocate(4)), [0, 1, 2, 3], "allocate(4) of 4, after everything was freed")


@ALLOCATOR.check(
    "the list of blocks stays the caller's",
    hint="copy what you are given: a pool that keeps, sorts or empties the caller's list changes a request's "
    "table, and that of another when the list grows",
)
def callers_list(learner: Learner, expect: Expect) -> None:
    pool = learner.MyBlockPool(6)
    pool.allocate(6)
    blocks = learner.keep([4, 1, 3])
    pool.free(blocks)
    expect.equal(learner.fetch(blocks), [4, 1, 3], "the list [4, 1, 3] after free([4, 1, 3])")
    given = "6 blocks held; free([4, 1, 3]), then the caller adds 5 to that list: num_free"
    blocks.append(5)
    expect.equal(pool.num_free, 3, given)


@BLOCK_TABLE.check(
    "takes a block only when a token needs one",
    hint="n tokens need ceil(n / block_size) blocks; at an exact multiple the last block is full, not empty",
)
def only_when_needed(learner: Learner, expect: Expect) -> None:
    for tokens, blocks in [(1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)]:
        table = learner.MyBlockTable(learner.ScatteredPool(8), 4)
        expect.equal(table.append(tokens), True, f"append({tokens}), block size 4, 8 blocks free")
        expect.equal(len(table.blocks), blocks, f"blocks after append({tokens}), block size 4")
    table = learner.MyBlockTable(learner.ScatteredPool(8), 4)
    lengths = []
    for _ in range(9):
        table.append(1)
        lengths.append(len(table.blocks))
    expect.equal(lengths, [1, 1, 1, 1, 2, 2, 2, 2, 3], "blocks after each of 9 times append(1), block size 4")


@BLOCK_TABLE.check(
    "nothing is taken for no tokens",
    hint="append(0) on an empty table needs no block",
)
def nothing_for_nothing(learner: Learner, expect: Expect) -> None:
    pool = learner.ScatteredPool(8)
    table = learner.MyBlockTable(pool, 4)
    expect.equal(table.append(0), True, "append(0) to an empty table")
    expect.equal((table.blocks, table.num_tokens), ([], 0), "blocks and num_tokens after append(0)")
    expect.equal(pool.num_free, 8, "blocks free after append(0)")


@BLOCK_TABLE.check(
    "token p is in slot blocks[p // block_size] * block_size + p % block_size",
    hint="blocks of one table lie anywhere in the pool: the slot starts from the number in the table, "
    "not from the position of the block in it",
)
def slots(learner: Learner, expect: Expect) -> None:
    for block_size, steps in [(4, [5]), (4, [3, 1, 1, 7]), (16, [16, 1]), (3, [9]), (1, [4])]:
        table = learner.MyBlockTable(learner.ScatteredPool(12), block_size)
        for step in steps:
            table.append(step)
        blocks, total = table.blocks, sum(steps)
        wanted = [blocks[p // block_size] * block_size + p % block_size for p in range(total)]
        given = f"append of {steps} tokens, block size {block_size}, blocks {blocks}"
        expect.equal(table.slots(0, total), wanted, f"{given}: slots(0, {total})")
        why = (
            "slots(start, stop) answers for tokens start … stop - 1 of the sequence: start is a position, too"
        )
        last = table.slots(total - 1, total)
        expect.equal(last, wanted[-1:], f"{given}: slots({total - 1}, {total})", hint=why)
        expect.equal(table.slots(total, total), [], f"{given}: slots({total}, {total})")


@BLOCK_TABLE.check(
    "a full pool answers False and changes nothing",
    hint="ask the pool for all new blocks in one call, and count the tokens only after it has given them",
)
def full_pool(learner: Learner, expect: Expect) -> None:
    pool = learner.ScatteredPool(3)
    table = learner.MyBlockTable(pool, 4)
    table.append(6)
    before = table.blocks
    expect.equal(table.append(7), False, "append(7) to 6 tokens, block size 4, 1 block free")
    expect.equal((table.blocks, table.num_tokens), (before, 6), "blocks and num_tokens after it was refused")
    expect.equal(pool.num_free, 1, "blocks free after it was refused")
    expect.equal(table.append(6), True, "append(6) to 6 tokens, block size 4, 1 block free")
    expect.equal(table.append(1), False, "append(1) to 12 tokens, block size 4, no block free")


@BLOCK_TABLE.check(
    "free gives every block back once and leaves an empty table",
    hint="after free() the table must forget its blocks, or a second request frees them again",
)
def frees(learner: Learner, expect: Expect) -> None:
    pool = learner.ScatteredPool(8)
    table, other = learner.MyBlockTable(pool, 4), learner.MyBlockTable(pool, 4)
    table.append(9)
    other.append(4)
    table.free()
    given = "blocks free of 8, after a table of 9 tokens was freed and one of 4 was not"
    lost = "nothing came back: hand the blocks to pool.free before the table forgets them" * (
        pool.num_free == 4
    )
    expect.equal(pool.num_free, 7, given, hint=lost)
    expect.equal((table.blocks, table.num_tokens), ([], 0), "blocks and num_tokens after free()")
    table.free()
    expect.equal(pool.num_free, 7, "blocks free after free() of an empty table")
    table.append(5)
    shared = set(table.blocks) & set(other.blocks)
    expect.equal(sorted(shared), [], "blocks that a reused table shares with another")
