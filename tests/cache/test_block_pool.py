"""BlockPool: reference counts, the free list and its order, the index of published blocks."""

from types import SimpleNamespace

import pytest

from minipaged.cache import BlockPool, hash_block


def name(number: int) -> bytes:
    return hash_block(None, [number])


def holding(*blocks: int) -> SimpleNamespace:
    return SimpleNamespace(blocks=list(blocks))


def snapshot(pool: BlockPool) -> tuple:
    """Everything that a refused call must leave as it was, order included."""
    return (
        list(pool._ref_counts),
        list(pool._blank),
        list(pool._cached),
        dict(pool._hashes),
        {key: list(blocks) for key, blocks in pool._index.items()},
    )


def cached_pool(num_blocks: int) -> BlockPool:
    """Block i is free and published as name(i); block 0 was freed first."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(num_blocks)
    for block in blocks:
        pool.publish(block, name(block))
    pool.free(blocks)
    return pool


def test_a_fresh_pool_hands_out_every_block_once():
    pool = BlockPool(5)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check_invariants([holding(0, 1, 2, 3, 4)])


def test_blocks_return_after_each_of_many_requests():
    """A fresh block counts one holder, so that one `free` gives it back."""
    pool = BlockPool(4)
    for _ in range(5):
        blocks = pool.allocate(2)
        assert [pool.ref_count(block) for block in blocks] == [1, 1]
        pool.free(blocks)
        assert pool.num_free == 4
        pool.check_invariants([])


def test_freeing_twice_raises_and_changes_nothing():
    """Else the block would be on the free list twice, and two requests would get it."""
    pool = BlockPool(4)
    (block,) = pool.allocate()
    pool.free([block])
    before = snapshot(pool)
    with pytest.raises(ValueError, match=f"nobody holds block {block}"):
        pool.free([block])
    assert snapshot(pool) == before
    first, second = pool.allocate(), pool.allocate()
    assert first != second


def test_a_block_given_twice_in_one_call_is_refused():
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.share([a])
    before = snapshot(pool)
    for call in (pool.free, pool.share):
        with pytest.raises(ValueError, match=f"block {a} is given twice"):
            call([b, a, a])
    assert snapshot(pool) == before


@pytest.mark.parametrize("unknown", [-1, 4, 10**9])
def test_unknown_blocks_are_refused_by_name(unknown):
    pool = BlockPool(4)
    pool.allocate(4)
    before = snapshot(pool)
    calls = (
        lambda: pool.free([0, unknown]),
        lambda: pool.share([0, unknown]),
        lambda: pool.publish(unknown, name(0)),
        lambda: pool.unpublish(unknown),
        lambda: pool.ref_count(unknown),
        lambda: pool.count_free([0, unknown]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"block {unknown} .*0 to 3"):
            call()
    assert snapshot(pool) == before


def test_a_free_of_many_is_refused_whole_when_one_of_them_is_free():
    pool = BlockPool(4)
    pool.allocate(3)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="nobody holds block 3"):
        pool.free([0, 1, 3])
    assert snapshot(pool) == before


def test_shortage_is_an_answer_and_changes_nothing():
    pool = cached_pool(4)
    assert pool.allocate(1) == [0]
    before = snapshot(pool)
    assert pool.allocate(4) is None
    assert snapshot(pool) == before
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate() is None
    assert pool.allocate(0) == []


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
    with pytest.raises(ValueError, match="cannot allocate -1 blocks"):
        BlockPool(4).allocate(-1)


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    (block,) = pool.allocate()
    pool.share([block])
    pool.share([block])
    assert pool.ref_count(block) == 3
    pool.check_invariants([holding(block)] * 3)
    for left in (2, 1, 0):
        pool.free([block])
        assert pool.ref_count(block) == left
        assert pool.num_free == (2 if left == 0 else 1)


def test_a_blank_block_cannot_be_shared():
    pool = BlockPool(2)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="block 1 is free and holds nothing to share"):
        pool.share([1])
    assert snapshot(pool) == before


def test_blank_blocks_are_taken_before_cached_ones():
    pool = BlockPool(4)
    a, b, c, _ = pool.allocate(4)
    pool.publish(a, name(1))
    pool.publish(b, name(2))
    pool.free([a])  # cached, and free for longer than c
    pool.free([c])
    pool.free([b])
    assert pool.allocate() == [c]
    assert pool.lookup([name(1)]) == [a]
    assert pool.allocate() == [a]
    assert pool.lookup([name(1)]) == []
    assert pool.lookup([name(2)]) == [b]


def test_cached_blocks_are_evicted_least_recently_used_first():
    pool = cached_pool(4)
    pool.share([0, 2])  # a hit refreshes a block
    pool.free([2, 0])
    assert [pool.allocate() for _ in range(4)] == [[1], [3], [2], [0]]


def test_one_call_evicts_in_the_same_order_as_many():
    one, many = cached_pool(6), cached_pool(6)
    for pool in (one, many):
        pool.share([1, 3])
        pool.free([3, 1])
    assert one.allocate(6) == [block for _ in range(6) for block in many.allocate()]


def test_an_evicted_block_leaves_the_index():
    pool = cached_pool(1)
    (block,) = pool.allocate()
    assert pool.lookup([name(0)]) == []
    assert not pool.is_published(block)
    pool.free([block])
    assert not pool._cached
    pool.check_invariants([])


def test_a_shared_hit_is_not_evicted():
    pool = cached_pool(2)
    pool.share(pool.lookup([name(0)]))
    assert pool.allocate() == [1]
    assert pool.allocate() is None
    assert pool.lookup([name(0)]) == [0]


def test_lookup_stops_at_the_first_miss_and_changes_nothing():
    pool = cached_pool(3)
    before = snapshot(pool)
    assert pool.lookup([name(0), name(1), name(9), name(2)]) == [0, 1]
    assert pool.lookup([name(9), name(0)]) == []
    assert pool.lookup([]) == []
    assert snapshot(pool) == before


def test_equal_contents_may_be_in_several_blocks():
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.publish(a, name(7))
    pool.publish(b, name(7))
    assert pool.lookup([name(7)]) == [a]
    pool.free([a])
    pool.unpublish(b)
    assert pool.lookup([name(7)]) == [a]
    pool.publish(b, name(7))
    assert pool.allocate(3)[2] == a  # evicted
    assert pool.lookup([name(7)]) == [b]


def test_publishing_again_is_harmless_and_under_another_name_is_refused():
    pool = BlockPool(2)
    (block,) = pool.allocate()
    pool.publish(block, name(1))
    before = snapshot(pool)
    pool.publish(block, name(1))
    with pytest.raises(ValueError, match="already published under another hash"):
        pool.publish(block, name(2))
    assert snapshot(pool) == before


def test_only_a_held_block_is_published_or_withdrawn():
    pool = BlockPool(2)
    for call in (lambda: pool.publish(1, name(1)), lambda: pool.unpublish(1)):
        with pytest.raises(ValueError, match="nobody holds block 1"):
            call()
    assert pool.lookup([name(1)]) == []


def test_withdrawing_a_block_that_was_never_offered_is_harmless():
    pool = BlockPool(2)
    (block,) = pool.allocate()
    before = snapshot(pool)
    pool.unpublish(block)
    assert snapshot(pool) == before


def test_a_pool_with_caching_off_publishes_nothing():
    pool = BlockPool(2, enable_prefix_caching=False)
    (block,) = pool.allocate()
    pool.publish(block, name(1))
    assert pool.lookup([name(1)]) == []
    pool.free([block])
    assert not pool._cached


def test_reset_refuses_while_a_block_is_held():
    pool = cached_pool(4)
    pool.share([1])
    before = snapshot(pool)
    assert pool.reset_prefix_cache() is False
    assert snapshot(pool) == before
    pool.free([1])
    assert pool.reset_prefix_cache() is True
    assert not pool._cached and pool.num_free == 4
    assert not any(pool.is_published(block) for block in range(4))
    assert pool.lookup([name(0)]) == []
    pool.check_invariants([])
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_count_free_counts_what_sharing_would_take():
    pool = cached_pool(4)
    pool.share([0])
    assert pool.count_free([0, 1, 2]) == 2


class TestTheCheckerNoticesEachFault:
    """A checker that cannot fail proves nothing: break each promise once."""

    @pytest.fixture
    def pool(self):
        pool = cached_pool(4)
        pool.share([0, 1])
        return pool

    def fails(self, pool, tables, message):
        with pytest.raises(AssertionError, match=message):
            pool.check_invariants(tables)

    def test_a_block_listed_twice(self, pool):
        pool.share([0])
        self.fails(pool, [holding(0, 0), holding(1)], r"a table lists a block twice: \[0, 0\]")

    def test_sound(self, pool):
        pool.check_invariants([holding(0), holding(1)])

    def test_a_reference_that_no_table_holds(self, pool):
        self.fails(pool, [holding(0)], "block 1 has 1 references, tables hold 0")

    def test_a_table_that_holds_without_a_reference(self, pool):
        self.fails(pool, [holding(0, 1), holding(1)], "block 1 has 1 references, tables hold 2")

    def test_a_table_that_lists_a_block_twice(self, pool):
        self.fails(pool, [holding(0, 1, 1)], "block 1 has 1 references, tables hold 2")

    def test_a_table_with_a_block_that_does_not_exist(self, pool):
        self.fails(pool, [holding(0, 1, 9)], r"tables hold blocks that do not exist: \[9\]")

    def test_a_held_block_on_the_free_list(self, pool):
        pool._cached[1] = None
        self.fails(pool, [holding(0, 1)], "block 1 has 1 references and is 1 times free")

    def test_a_block_that_is_free_twice(self, pool):
        pool._blank.append(2)
        self.fails(pool, [holding(0, 1)], "block 2 has 0 references and is 2 times free")

    def test_a_lost_block(self, pool):
        del pool._cached[3]
        self.fails(pool, [holding(0, 1)], "block 3 has 0 references and is 0 times free")

    def test_a_free_block_that_does_not_exist(self, pool):
        pool._blank.append(4)
        self.fails(pool, [holding(0, 1)], r"blocks that do not exist: \[4\]")

    def test_a_stale_index_entry(self, pool):
        del pool._hashes[0]
        self.fails(pool, [holding(0, 1)], "index and hashes of the blocks disagree")

    def test_a_block_missing_from_the_index(self, pool):
        del pool._index[name(0)]
        self.fails(pool, [holding(0, 1)], "index and hashes of the blocks disagree")

    def test_a_block_under_two_hashes(self, pool):
        pool._index = {name(9): {0: None}, **pool._index}
        self.fails(pool, [holding(0, 1)], "a block is indexed under two hashes")

    def test_an_empty_entry(self, pool):
        pool._index[name(9)] = {}
        self.fails(pool, [holding(0, 1)], "an entry without a block")

    def test_a_cached_block_that_is_not_published(self, pool):
        pool._remove_from_index(3)
        self.fails(pool, [holding(0, 1)], "a cached block is not published")

    def test_a_blank_block_that_is_published(self, pool):
        del pool._cached[3]
        pool._blank.append(3)
        self.fails(pool, [holding(0, 1)], r"blank blocks are still published: \[3\]")

    def test_a_published_block_though_caching_is_off(self, pool):
        pool.enable_prefix_caching = False
        self.fails(pool, [holding(0, 1)], "caching is off")
