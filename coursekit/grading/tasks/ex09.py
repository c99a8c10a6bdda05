"""Exercise 09: reference counts, fork and copy-on-write."""

import random
from functools import partial
from typing import Any

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import several

SETUP = "from coursekit.given.shared_pool import SharedPool"

REF_COUNTS = Task(
    name="ref_counts",
    exercise="09",
    title="Reference counts",
    points=3,
    defines=("MySharedPool",),
    preamble=SETUP,
)

FORK = Task(
    name="fork",
    exercise="09",
    title="Fork and copy-on-write",
    points=5,
    defines=("MyForkingTable",),
    preamble=SETUP,
)

TASKS = [REF_COUNTS, FORK]


@REF_COUNTS.check(
    "a block has one holder when it is given out, and is free when that one has freed it",
    hint="a count that starts at 0 goes to -1 at the first free, and the block never comes back",
)
def starts_with_one(learner: Learner, expect: Expect) -> None:
    pool = learner.MySharedPool(4)
    for request in range(1, 6):
        blocks = pool.allocate(2)
        counts = [pool.ref_count(block) for block in blocks]
        expect.equal(counts, [1, 1], f"ref_count of both blocks of request {request}")
        pool.free(blocks)
        expect.equal(pool.num_free, 4, f"num_free of 4 after request {request} is over")
    expect.equal([pool.ref_count(block) for block in range(4)], [0] * 4, "ref_count of free blocks")


@REF_COUNTS.check(
    "a shared block is free only after its last holder has freed it",
    hint="free takes one holder away; the block goes back to the free list when none is left, not before",
)
def last_holder(learner: Learner, expect: Expect) -> None:
    pool = learner.MySharedPool(5)
    first, second = pool.allocate(2)
    pool.share([first, second])
    pool.share([first])
    expect.equal((pool.ref_count(first), pool.ref_count(second)), (3, 2), "ref_count after two and one share")
    expect.equal(pool.num_free, 3, "num_free of 5 with 2 blocks held, however many hold them")
    free, counts = [], []
    for _ in range(2):
        pool.free([first])
        pool.free([second])
        free.append(pool.num_free)
        counts.append((pool.ref_count(first), pool.ref_count(second)))
    expect.equal(counts, [(2, 1), (1, 0)], "ref_count after each free of both, from 3 and 2")
    expect.equal(free, [3, 4], "num_free after each free of both")
    expect.true(first not in pool.allocate(4), f"allocate(4), block {first} still held", "four others", "it")


@REF_COUNTS.check(
    "a shortage answers None and changes nothing",
    hint="sharing takes no block; compare n with the free ones before you take the first",
)
def shortage(learner: Learner, expect: Expect) -> None:
    pool = learner.MySharedPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks)
    expect.equal(pool.allocate(2), None, "allocate(2) with 1 block free")
    expect.equal(pool.num_free, 1, "num_free after it was refused")
    expect.equal(len(pool.allocate(1)), 1, "blocks from allocate(1) with 1 block free")


@REF_COUNTS.check(
    "a wrong share or free raises ValueError and changes nothing",
    hint="look at every block of the call before you change the first count: some may be held and some not",
)
def wrong_calls(learner: Learner, expect: Expect) -> None:
    pool = learner.MySharedPool(4)
    held = pool.allocate(2)
    free = next(block for block in range(4) if block not in held)
    for name in ("share", "free"):
        for wrong in ([held[0], free], [held[0], held[0]], [4], [-1]):
            given = f"{name}({wrong}), held are {held} of 4"
            expect.raises("ValueError", partial(getattr(pool, name), wrong), given)
            counts = [pool.ref_count(block) for block in held]
            expect.equal((counts, pool.num_free), ([1, 1], 2), f"ref_counts and num_free after {given}")
    pool.free(held)
    expect.raises("ValueError", partial(pool.free, held), f"free({held}) a second time")
    expect.equal(sorted(pool.allocate(4)), [0, 1, 2, 3], "allocate(4) of 4, after everything was freed")


def forked(learner: Learner, num_blocks: int, tokens: int, children: int = 1) -> Any:
    """A pool, a table of `tokens` tokens in blocks of 4, and forks of it."""
    pool = learner.SharedPool(num_blocks)
    table = learner.MyForkingTable(pool, 4)
    table.append(tokens)
    return pool, table, [table.fork() for _ in range(children)]


@FORK.check(
    "without a fork it is a block table",
    hint="n tokens need ceil(n / block_size) blocks, the ones that the table has included",
)
def is_a_table(learner: Learner, expect: Expect) -> None:
    pool = learner.SharedPool(8)
    table = learner.MyForkingTable(pool, 4)
    sizes = []
    for n in (3, 1, 0, 1, 7):
        why = "nobody else holds the last block, so it is written in place: ask ref_count before you copy"
        expect.equal(table.append(n), [], f"copies of append({n}), nobody else holds a block", hint=why)
        sizes.append((len(table.blocks), table.num_tokens))
    wanted = [(1, 3), (1, 4), (1, 4), (2, 5), (3, 12)]
    expect.equal(sizes, wanted, "blocks and num_tokens after append of 3, 1, 0, 1, 7, block size 4")
    table.free()
    expect.equal((table.blocks, table.num_tokens, pool.num_free), ([], 0, 8), "after free(): all 8 free")


@FORK.check(
    "a fork takes no block and shares every one",
    hint="a fork copies the list of block numbers, not the blocks; each block gets one more holder",
)
def takes_nothing(learner: Learner, expect: Expect) -> None:
    pool, table, (child,) = forked(learner, 16, 6)
    expect.equal(pool.num_free, 14, "blocks free of 16 after append(6), block size 4, and a fork")
    expect.equal((child.blocks, child.num_tokens), (table.blocks, 6), "blocks and num_tokens of the fork")
    counts = [pool.ref_count(block) for block in table.blocks]
    expect.equal(counts, [2, 2], "ref_count of the two blocks")


@FORK.check(
    "who writes first into a shared last block gets a copy of it",
    hint="before a token goes into a half-filled last block, ask how many hold that block",
)
def first_writer_copies(learner: Learner, expect: Expect) -> None:
    pool, table, (child,) = forked(learner, 16, 6)
    before = table.blocks
    copies = child.append(1)
    expect.equal(pool.num_free, 13, "blocks free of 16: 6 tokens, a fork, append(1) to the fork")
    why = "fork and parent have one list: child.blocks = self.blocks copies nothing, list(self.blocks) does"
    aliased = why if table.blocks == child.blocks else ""
    given = "the parent's blocks after the fork has appended"
    expect.equal(table.blocks, before, given, hint=aliased)
    expect.equal(child.blocks[0], before[0], "the fork's first block, which is full and stays shared")
    why = "the copy takes the place of the shared block in the table, blocks[-1]: it does not stand after it"
    given = "the fork's blocks after append(1): 7 tokens, block size 4"
    expect.equal(len(child.blocks), 2, f"{given}; how many", hint=why)
    expect.true(child.blocks[1] not in before, f"{given}, the last one", "a block of its own", child.blocks)
    expect.equal(copies, [(before[1], child.blocks[1])], "copies of append(1): (source, destination)")
    why = "the fork still holds the block that it copied from: pool.free of that one block, once"
    given = "copies of the parent's append(1), after the fork's: it is alone by now"
    expect.equal(table.append(1), [], given, hint=why)
    expect.equal((table.blocks, pool.num_free), (before, 13), "the parent's blocks, and the free ones")


@FORK.check(
    "of n tables that share a last block, n - 1 copy it",
    hint="the holder that is left over writes in place: give up your reference to the block you copied from",
)
def last_one_writes_in_place(learner: Learner, expect: Expect) -> None:
    pool, table, children = forked(learner, 16, 6, children=2)
    copies = [len(each.append(1)) for each in (*children, table)]
    expect.equal(copies, [1, 1, 0], "copies of three sharers that append a token one after the other")
    expect.equal(pool.num_free, 16 - 4, "blocks free of 16: one shared, three last ones")


@FORK.check(
    "a full last block is not copied",
    hint="at an exact multiple the next token goes into a new block, and nothing shared is written",
)
def full_tail(learner: Learner, expect: Expect) -> None:
    pool, table, (child,) = forked(learner, 16, 8)
    expect.equal(child.append(1), [], "copies of append(1) to a fork of 8 tokens, block size 4")
    expect.equal((len(child.blocks), len(table.blocks)), (3, 2), "blocks of the fork and of the parent")
    expect.equal(pool.num_free, 13, "blocks free of 16")
    expect.equal(child.append(0), [], "copies of append(0)")
    _, _, (other,) = forked(learner, 16, 6)
    expect.equal(other.append(0), [], "copies of append(0) to a fork of 6 tokens: nothing is written")


@FORK.check(
    "a shortage answers None and changes nothing",
    hint="count the copy and the new blocks together, and ask the pool once for all of them",
)
def no_room_for_the_copy(learner: Learner, expect: Expect) -> None:
    for num_blocks, n in [(2, 1), (3, 3), (4, 7)]:
        pool, table, (child,) = forked(learner, num_blocks, 6)
        given = f"append({n}) to a fork of 6 tokens, block size 4, {several(num_blocks - 2, 'block')} free"
        expect.equal(child.append(n), None, given)
        expect.equal((child.blocks, child.num_tokens), (table.blocks, 6), f"the fork after {given}")
        counts = [pool.ref_count(block) for block in table.blocks]
        expect.equal((counts, pool.num_free), ([2, 2], num_blocks - 2), f"holders, free blocks after {given}")


@FORK.check(
    "every table reads its own tokens, whoever wrote since, and nothing is lost",
    hint="follow one token: its slot must not be written by anybody who forked before it was appended",
)
def own_tokens(learner: Learner, expect: Expect) -> None:
    for seed in range(6):
        source = random.Random(seed)
        memory: dict[tuple[int, int], int] = {}
        pool = learner.SharedPool(10)
        block_size = source.choice([1, 2, 3, 4])
        tables: list[tuple[Any, list[int]]] = [(learner.MyForkingTable(pool, block_size), [])]
        for step in range(25):
            table, tokens = tables[source.randrange(len(tables))]
            action = source.random()
            if action < 0.25 and len(tables) < 4:
                tables.append((table.fork(), list(tokens)))
            elif action < 0.35 and len(tables) > 1:
                table.free()
                tables = [pair for pair in tables if pair[0] is not table]
            else:
                n = source.randrange(1, 4)
                copies = table.append(n)
                if copies is not None:
                    write(
                        memory, table.blocks, copies, tokens, [100 * step + i for i in range(n)], block_size
                    )
            for each, wanted in tables:
                blocks = each.blocks
                slots = [(blocks[p // block_size], p % block_size) for p in range(len(wanted))]
                given = (
                    f"tokens that a table reads back after step {step} (block size {block_size}, seed {seed})"
                )
                expect.equal([memory.get(slot) for slot in slots], wanted, given)
        for table, _ in tables:
            table.free()
        expect.equal(pool.num_free, 10, f"blocks free of 10 after every table was freed (seed {seed})")


def write(
    memory: dict[tuple[int, int], int],
    blocks: list[int],
    copies: list[tuple[int, int]],
    tokens: list[int],
    new: list[int],
    block_size: int,
) -> None:
    """Do the copies, then store the new tokens in their slots."""
    for src, dst in copies:
        for offset in range(block_size):
            if (src, offset) in memory:
                memory[dst, offset] = memory[src, offset]
    for token in new:
        position = len(tokens)
        memory[blocks[position // block_size], position % block_size] = token
        tokens.append(token)
