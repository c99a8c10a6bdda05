"""Exercise 10, second task: a prefix cache that gives up the least recently used block."""

import random
from typing import Any

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task

PREFIX_CACHE = Task(
    name="prefix_cache",
    exercise="10",
    title="A prefix cache with LRU eviction",
    points=5,
    defines=("MyPrefixCache",),
)

TASKS = [PREFIX_CACHE]


@PREFIX_CACHE.check(
    "a published block is found, while it is held and after it was freed",
    hint="free gives the block back, but what is in it stays true until the block is handed out again",
)
def found_again(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(4)
    expect.equal(cache.lookup(["a"]), [], 'lookup(["a"]) in an empty cache')
    first, second = cache.allocate(2)
    cache.publish(first, "a")
    cache.publish(second, "a-b")
    expect.equal(cache.lookup(["a", "a-b"]), [first, second], "lookup of two keys, both blocks held")
    cache.free([second, first])
    expect.equal(cache.num_free, 4, "num_free of 4 after both were freed")
    expect.equal(cache.lookup(["a", "a-b"]), [first, second], "lookup of both keys after they were freed")
    expect.equal(cache.num_free, 4, "num_free after a lookup, which changes nothing")


@PREFIX_CACHE.check(
    "a lookup stops at the first key that is not there",
    hint="a block can be used only with everything before it: a hit after a gap is worth nothing",
)
def stops_at_gap(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(4)
    blocks = cache.allocate(3)
    for block, key in zip(blocks, "acd", strict=True):
        cache.publish(block, key)
    expect.equal(
        cache.lookup(["a", "b", "c"]), blocks[:1], 'lookup(["a", "b", "c"]), "b" was never published'
    )
    expect.equal(cache.lookup(["b", "a"]), [], 'lookup(["b", "a"])')
    expect.equal(cache.lookup([]), [], "lookup([])")


@PREFIX_CACHE.check(
    "a cached block that somebody shares is not handed out",
    hint="share takes a free block off the free list; while anybody holds it, nobody else may get it",
)
def shared_is_held(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(3)
    blocks = cache.allocate(1)
    cache.publish(blocks[0], "a")
    cache.free(blocks)
    cache.share(cache.lookup(["a"]))
    expect.equal(cache.num_free, 2, "num_free of 3 after a hit was shared")
    cache.share(blocks)
    cache.free(blocks)
    expect.equal(cache.num_free, 2, "num_free after it was shared twice and freed once")
    expect.true(
        blocks[0] not in cache.allocate(2), f"allocate(2), block {blocks[0]} held", "the others", "it"
    )
    expect.equal(cache.allocate(1), None, "allocate(1) with no block free")
    expect.equal(cache.lookup(["a"]), blocks, 'lookup(["a"]) after an allocation that was refused')
    cache.free(blocks)
    expect.equal(cache.num_free, 1, "num_free after the last holder has freed it")


@PREFIX_CACHE.check(
    "the block that was free for longest is given up first",
    hint="keep free blocks in the order in which they became free; a hit that is freed again goes to the end",
)
def least_recently_used(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(3)
    blocks = cache.allocate(3)
    for block, key in zip(blocks, "abc", strict=True):
        cache.publish(block, key)
    for block in blocks:
        cache.free([block])
    hit = cache.lookup(["a"])
    cache.share(hit)
    cache.free(hit)
    expect.equal(
        cache.allocate(1), [blocks[1]], f"a, b, c freed in turn as {blocks}, a used again: allocate(1)"
    )
    expect.equal(
        cache.allocate(2),
        [blocks[2], blocks[0]],
        f"a, b, c freed in turn as {blocks}, a used again, allocate(1): allocate(2)",
    )
    cache = learner.MyPrefixCache(3)
    blocks = cache.allocate(3)
    for block, key in zip(blocks, "abc", strict=True):
        cache.publish(block, key)
        cache.free([block])
    cache.lookup(["a"])
    given = f"a, b, c freed in turn as {blocks}, then a looked up and not shared: allocate(1)"
    expect.equal(
        cache.allocate(1), blocks[:1], given, hint="a lookup changes nothing: only share takes a block"
    )


@PREFIX_CACHE.check(
    "blank blocks are taken before cached ones",
    hint="giving up a cached block costs its next reader the work of computing it; a blank one costs nothing",
)
def blank_first(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(4)
    blocks = cache.allocate(4)
    cache.publish(blocks[0], "a")
    cache.publish(blocks[2], "b")
    for block in blocks:
        cache.free([block])
    given = f"{blocks} freed in turn, with keys in {blocks[0]} and {blocks[2]}"
    expect.equal(cache.allocate(1), [blocks[1]], f"{given}: allocate(1)")
    expect.equal(cache.lookup(["a"]), [blocks[0]], f'{given}: lookup(["a"]) after that')
    expect.equal(cache.allocate(2), [blocks[3], blocks[0]], f"{given}, allocate(1): allocate(2)")


@PREFIX_CACHE.check(
    "a block that is handed out again is forgotten",
    hint="its old key must leave the index at that moment: the block will soon hold other tokens",
)
def forgotten(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(3)
    for keys in (["12", "12-78"], ["34", "34-78"]):
        blocks = cache.allocate(2)
        for block, key in zip(blocks, keys, strict=True):
            cache.publish(block, key)
        cache.free(blocks[::-1])
    found = cache.lookup(["12", "12-78"])
    given = (
        "3 blocks; a request with the keys 12, 12-78, then one with 34, 34-78, each freed last block first"
    )
    expect.equal(len(found), 1, f"{given}: hits of 12, 12-78")
    expect.equal(len(cache.lookup(["34", "34-78"])), 2, f"{given}: hits of 34, 34-78")
    fresh = cache.allocate(3)
    for key in ("12", "34", "34-78"):
        expect.equal(
            cache.lookup([key]), [], f"lookup([{key!r}]) after all blocks {fresh} were handed out again"
        )
    cache.publish(fresh[0], "12")
    expect.equal(cache.lookup(["12"]), [fresh[0]], "lookup of a key that was forgotten and published anew")


@PREFIX_CACHE.check(
    "a key stays with the block that offered it first",
    hint="two requests may compute the same block at once: if the second takes the key over, forgetting one "
    "of the blocks must not lose or keep the key of the other",
)
def first_owner(learner: Learner, expect: Expect) -> None:
    cache = learner.MyPrefixCache(2)
    (first,) = cache.allocate(1)
    (second,) = cache.allocate(1)
    cache.publish(first, "a")
    cache.publish(second, "a")
    expect.equal(cache.lookup(["a"]), [first], f'"a" published by block {first}, then by block {second}')
    cache.free([second])
    cache.allocate(1)
    expect.equal(
        cache.lookup(["a"]), [first], f"the same after block {second} was freed and handed out again"
    )
    cache.free([first])
    cache.allocate(1)
    expect.equal(cache.lookup(["a"]), [], f"the same after block {first} was handed out again too")


@PREFIX_CACHE.check(
    "nothing is lost in long random histories",
    hint="follow one block: free or held, with a key or without, in the index exactly while the key is true",
)
def histories(learner: Learner, expect: Expect) -> None:
    for seed in range(4):
        source, cache = random.Random(seed), learner.MyPrefixCache(5)
        held: list[tuple[list[int], list[str]]] = []
        content: dict[int, str] = {}
        for step in range(40):
            keys = [source.choice("pqr"), source.choice("xyz"), source.choice("xyz")]
            keys = ["".join(keys[: i + 1]) for i in range(3)]
            if held and source.random() < 0.5:
                cache.free(held.pop(source.randrange(len(held)))[0][::-1])
            else:
                held += begin(cache, keys, content, expect, f"step {step}, seed {seed}")
            used = {block for blocks, _ in held for block in blocks}
            expect.equal(cache.num_free, 5 - len(used), f"num_free of 5 after step {step}, seed {seed}")


def begin(
    cache: Any, keys: list[str], content: dict[int, str], expect: Expect, when: str
) -> list[tuple[list[int], list[str]]]:
    """One request: use its hits, take the rest, publish all. [] when the pool is short."""
    hits = cache.lookup(keys)
    wanted = [content.get(block) for block in hits]
    expect.equal(wanted, keys[: len(hits)], f"what the blocks {hits} hold that lookup({keys}) found, {when}")
    cache.share(hits)
    more = cache.allocate(len(keys) - len(hits))
    if more is None:
        cache.free(hits[::-1])
        return []
    for block, key in zip(more, keys[len(hits) :], strict=True):
        content[block] = key
        cache.publish(block, key)
    return [([*hits, *more], keys)]
