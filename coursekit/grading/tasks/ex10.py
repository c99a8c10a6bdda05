"""Exercise 10, first task: chained block hashes."""

import random

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import several

BLOCK_HASH = Task(
    name="block_hash",
    exercise="10",
    title="A hash that contains the past",
    points=3,
    defines=("my_block_hashes",),
)

TASKS = [BLOCK_HASH]


@BLOCK_HASH.check(
    "one hash for every full block, none for the rest",
    hint="the last block may still get tokens: only len(token_ids) // block_size blocks are full",
)
def full_blocks(learner: Learner, expect: Expect) -> None:
    for length, blocks in [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (8, 2), (11, 2), (12, 3)]:
        hashes = learner.my_block_hashes(list(range(length)), 4)
        expect.equal(len(hashes), blocks, f"number of hashes of {several(length, 'token')}, block size 4")


@BLOCK_HASH.check(
    "equal beginnings have equal hashes, in every process",
    hint="Python's own hash() of text differs from process to process; hashlib does not",
)
def equal_beginnings(learner: Learner, expect: Expect) -> None:
    common = [7, 7, 300, 2, 9, 1, 0, 5]
    first = learner.my_block_hashes([*common, 1, 2, 3, 4], 4)
    second = learner.my_block_hashes([*common, 5, 6, 7, 8], 4)
    expect.equal(first[:2], second[:2], f"hashes of the two blocks of {common} in two requests")
    expect.true(first[2] != second[2], "the third blocks, [1, 2, 3, 4] and [5, 6, 7, 8]", "two hashes", "one")
    for salt in (None, "customer 7"):
        with learner.again() as other:
            again = other.my_block_hashes(common, 4, salt)
        here = learner.my_block_hashes(common, 4, salt)
        expect.equal(again, here, f"hashes of {common} with salt {salt!r} in a second process")


@BLOCK_HASH.check(
    "the same tokens after another past are another block",
    hint="keys and values depend on every token before them: put the hash of the block before into this one",
)
def past(learner: Learner, expect: Expect) -> None:
    first, second = learner.my_block_hashes([1, 2, 3, 4], 2), learner.my_block_hashes([9, 9, 3, 4], 2)
    expect.true(first[1] != second[1], "block [3, 4] behind [1, 2], and behind [9, 9]", "two hashes", "one")
    long, other = [1, *range(2, 24)], [0, *range(2, 24)]
    pairs = zip(learner.my_block_hashes(long, 4), learner.my_block_hashes(other, 4), strict=True)
    equal = [i for i, (a, b) in enumerate(pairs) if a == b]
    expect.equal(equal, [], "blocks with one hash of two requests that differ in token 0 only, block size 4")
    repeated = learner.my_block_hashes([5, 5, 5, 5, 5, 5], 2)
    expect.equal(len(set(map(str, repeated))), 3, "different hashes of the 3 blocks of [5, 5, 5, 5, 5, 5]")


@BLOCK_HASH.check(
    "different tokens are different blocks",
    hint="nothing of a token may be lost: not its order, not where it ends, not what is above 255",
)
def different_tokens(learner: Learner, expect: Expect) -> None:
    source = random.Random(10)
    pairs = [([1, 23], [12, 3]), ([1, 2], [2, 1]), ([0, 0], [0, 256]), ([65536, 1], [0, 1]), ([3, 5], [4, 4])]
    for _ in range(40):
        tokens = [source.randrange(50_000) for _ in range(6)]
        other = list(tokens)
        other[source.randrange(6)] ^= 1 << source.randrange(16)
        pairs.append((tokens, other))
    for first, second in pairs:
        same = learner.my_block_hashes(first, len(first)) == learner.my_block_hashes(second, len(second))
        expect.true(not same, f"{first} and {second}, one block each", "two hashes", "one")


@BLOCK_HASH.check(
    "two blocks meet by accident only as seldom as with sha256",
    hint="a shortened digest, or md5, can be made to collide: somebody else's keys and values would be read. "
    "Keep all 32 bytes of sha256 (64 digits as text) or more",
)
def long_enough(learner: Learner, expect: Expect) -> None:
    hashes = learner.my_block_hashes(list(range(64)), 2)
    for value in hashes:
        bits = 8 * len(value) if isinstance(value, bytes) else 0
        if isinstance(value, str):
            digits = set(value.lower()) <= set("0123456789abcdef")
            bits = (4 if digits else 6) * len(value)
        if isinstance(value, int):
            bits = 256 if max(map(abs, hashes)) >= 2**247 else 64
        if isinstance(value, tuple | list):
            bits = 256  # the tokens themselves: no two blocks have the same
        expect.true(
            bits >= 256, "the first 32 blocks of 2 tokens", "hashes of 256 bits", f"{value!r}: {bits} bits"
        )


@BLOCK_HASH.check(
    "a salt keeps customers apart, through every block",
    hint="the salt goes into the first hash, the chain carries it on; no salt is not an empty one",
)
def salts(learner: Learner, expect: Expect) -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    found = {repr(salt): learner.my_block_hashes(tokens, 2, salt) for salt in (None, "", "a", "b", "None")}
    for block in range(3):
        values = {str(hashes[block]) for hashes in found.values()}
        given = f"different hashes of block {block} of {tokens} with the salts {', '.join(found)}"
        expect.equal(len(values), len(found), given)
    expect.equal(learner.my_block_hashes(tokens, 2, "a"), found["'a'"], "hashes with the same salt twice")
