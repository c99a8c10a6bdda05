"""BlockTable: which block a token needs, sharing, copy-on-write, steps that happen whole or not at all."""

import numpy as np
import pytest

from minipaged.cache import BlockCopy, BlockPool, BlockTable, append_all, blocks_to_append_all, hash_blocks


def table_of(pool: BlockPool, num_tokens: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(pool, block_size)
    assert table.append(num_tokens) == []
    return table


@pytest.mark.parametrize(
    ("length", "num_blocks"),
    [(1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)],
)
def test_a_block_is_taken_only_when_a_token_needs_one(length, num_blocks):
    pool = BlockPool(16)
    table = table_of(pool, length)
    assert len(table.blocks) == num_blocks
    expected = 1 if length % 4 == 0 else 0
    assert table.blocks_to_append(1) == expected
    table.append(1)
    assert len(table.blocks) == num_blocks + expected
    assert table.slots(length, length + 1) == [table.blocks[length // 4] * 4 + length % 4]


def test_an_empty_table_has_no_blocks():
    table = BlockTable(BlockPool(4), 4)
    assert (table.blocks, table.num_tokens) == ([], 0)
    assert not table.tail_is_shared
    assert table.append(0) == []
    assert table.slots(0, 0).tolist() == []
    table.free()


@pytest.mark.parametrize(("chunks", "blocks"), [([4], 1), ([4, 4], 2), ([3, 5], 2), ([1] * 8, 2)])
def test_chunks_take_the_same_blocks_as_a_whole_prompt(chunks, blocks):
    pool = BlockPool(16)
    table = BlockTable(pool, 4)
    for chunk in chunks:
        table.append(chunk)
    assert len(table.blocks) == blocks
    for _ in range(2):  # two decode steps: the first needs a block, the second does not
        table.append(1)
    assert len(table.blocks) == blocks + 1
    assert table.slots(0, table.num_tokens).tolist() == [
        table.blocks[p // 4] * 4 + p % 4 for p in range(table.num_tokens)
    ]


def test_slots_follow_a_scattered_table():
    pool = BlockPool(8)
    table, other = BlockTable(pool, 3), BlockTable(pool, 3)
    for _ in range(4):
        table.append(2)
        other.append(3)
    slots = table.slots(1, 8)
    assert slots.dtype == np.int64
    assert slots.tolist() == [table.blocks[p // 3] * 3 + p % 3 for p in range(1, 8)]
    assert sorted(np.concatenate([table.slots(0, 8), other.slots(0, 12)])) == sorted(
        {*table.slots(0, 8).tolist(), *other.slots(0, 12).tolist()}
    )


def test_slots_do_not_overflow_32_bits():
    table = BlockTable(BlockPool(1), 1024)
    table.append(1024)
    table.blocks = [2**31 // 1024]
    assert table.slots(1023, 1024).tolist() == [2**31 + 1023]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6), (6, 6)])
def test_slots_outside_the_table_are_refused(start, stop):
    with pytest.raises(ValueError, match=f"tokens {start} to {stop} asked for, the table has 5"):
        table_of(BlockPool(4), 5).slots(start, stop)


def test_append_after_fork_copies_only_the_tail():
    pool = BlockPool(16)
    parent = table_of(pool, 6)
    child = parent.fork()
    assert pool.num_free == 14
    assert child.blocks == parent.blocks
    assert [pool.ref_count(block) for block in parent.blocks] == [2, 2]

    before = list(parent.blocks)
    assert child.append(1) == [BlockCopy(src=parent.blocks[1], dst=child.blocks[1])]
    assert pool.num_free == 13
    assert parent.blocks == before
    assert child.blocks[0] == parent.blocks[0]
    assert child.blocks[1] != parent.blocks[1]

    assert pool.ref_count(parent.blocks[1]) == 1
    assert parent.append(1) == []
    pool.check_invariants([parent, child])
    parent.free()
    assert pool.num_free == 14  # the child still holds the shared block and its own tail
    child.free()
    assert pool.num_free == 16


@pytest.mark.parametrize("siblings", [2, 3, 5])
def test_siblings_that_all_append_make_one_copy_less_than_they_are(siblings):
    pool = BlockPool(16)
    tables = [table_of(pool, 6)]
    tables += [tables[0].fork() for _ in range(siblings - 1)]
    assert blocks_to_append_all(tables, [1] * siblings) == siblings - 1
    copies = append_all(tables, [1] * siblings)
    assert len(copies) == siblings - 1
    assert {copy.src for copy in copies} == {1}
    assert len({table.blocks[1] for table in tables}) == siblings
    assert pool.num_free == 16 - 2 - (siblings - 1)
    pool.check_invariants(tables)


def test_a_fork_at_a_block_boundary_needs_no_copy():
    pool = BlockPool(16)
    parent = table_of(pool, 8)
    child = parent.fork()
    assert child.blocks_to_append(1) == 1
    assert child.append(1) == []
    assert pool.num_free == 13
    assert (len(parent.blocks), len(child.blocks)) == (2, 3)


def test_many_forks_take_no_block():
    pool = BlockPool(2)
    parent = table_of(pool, 8)
    children = [parent.fork() for _ in range(50)]
    assert pool.num_free == 0
    pool.check_invariants([parent, *children])
    for table in (parent, *children):
        table.free()
    assert pool.num_free == 2


def test_a_fork_of_a_fork_shares_all_three_ways():
    pool = BlockPool(8)
    a = table_of(pool, 6)
    b = a.fork()
    c = b.fork()
    assert pool.ref_count(a.blocks[0]) == 3
    b.append(1)
    assert pool.ref_count(a.blocks[1]) == 2
    assert c.blocks == a.blocks
    pool.check_invariants([a, b, c])


def test_an_append_can_need_a_copy_and_new_blocks_together():
    pool = BlockPool(8)
    parent = table_of(pool, 6)
    child = parent.fork()
    assert child.blocks_to_append(7) == 1 + 2
    assert len(child.append(7)) == 1
    assert pool.num_free == 8 - 2 - 3
    assert child.num_tokens == 13


def state(pool: BlockPool, *tables: BlockTable) -> tuple:
    return (
        [pool.ref_count(block) for block in range(pool.num_blocks)],
        list(pool._blank),
        list(pool._cached),
        dict(pool._hashes),
        [(list(table.blocks), table.num_tokens, table.num_published) for table in tables],
    )


def test_an_append_that_does_not_fit_changes_nothing():
    pool = BlockPool(3)
    parent = table_of(pool, 6)
    child = parent.fork()
    before = state(pool, parent, child)
    assert child.append(3) is None  # a copy and a new block, one is free
    assert state(pool, parent, child) == before
    assert child.append(2) is not None


def test_a_step_of_several_tables_fits_whole_or_not_at_all():
    pool = BlockPool(4)
    parent = table_of(pool, 6)
    tables = [parent, parent.fork(), parent.fork(), parent.fork()]
    before = state(pool, *tables)
    assert append_all(tables, [1, 1, 1, 1]) is None  # three copies, two free
    assert append_all(tables, [0, 1, 1, 1]) is None
    assert state(pool, *tables) == before
    assert len(append_all(tables, [1, 1, 0, 0])) == 2  # two others go on holding the tail
    assert append_all([], []) == []


def test_a_table_given_twice_in_one_step_is_refused():
    pool = BlockPool(4)
    table = table_of(pool, 4)
    before = state(pool, table)
    with pytest.raises(ValueError, match="a table is given twice"):
        append_all([table, table], [1, 1])
    assert state(pool, table) == before


def test_tables_of_several_pools_are_refused_before_the_first_one_grows():
    roomy, full = BlockPool(4), BlockPool(1)
    tables = [BlockTable(roomy, 4), BlockTable(full, 4)]
    with pytest.raises(ValueError, match="several pools"):
        append_all(tables, [4, 8])
    assert [table.num_tokens for table in tables] == [0, 0] and roomy.num_free == 4


def test_tables_that_do_not_append_keep_the_shared_tail():
    pool = BlockPool(8)
    parent = table_of(pool, 6)
    child, idle = parent.fork(), parent.fork()
    assert blocks_to_append_all([parent, child], [1, 1]) == 2
    assert len(append_all([parent, child], [1, 1])) == 2
    assert idle.blocks[1] == 1
    pool.check_invariants([parent, child, idle])


def test_the_count_ahead_is_what_an_append_takes():
    for lengths in ((6, 6, 6), (8, 8), (5, 0), (3,)):
        pool = BlockPool(32)
        parent = table_of(pool, lengths[0])
        tables = [parent, *(parent.fork() for _ in lengths[1:])]
        counts = [n + 1 for n in range(len(lengths))]
        expected = blocks_to_append_all(tables, counts)
        free = pool.num_free
        append_all(tables, counts)
        assert free - pool.num_free == expected


def test_negative_counts_are_refused():
    table = table_of(BlockPool(4), 5)
    for call in (table.append, table.blocks_to_append):
        with pytest.raises(ValueError, match="cannot append -1 tokens"):
            call(-1)


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size is 0"):
        BlockTable(BlockPool(4), 0)


@pytest.mark.parametrize(("keep", "blocks"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_trim_frees_the_blocks_behind_the_last_kept_token(keep, blocks):
    pool = BlockPool(4)
    table = table_of(pool, 9)
    table.trim(keep)
    assert (table.num_tokens, len(table.blocks)) == (keep, blocks)
    assert pool.num_free == 4 - blocks
    pool.check_invariants([table])


@pytest.mark.parametrize("keep", [-1, 10])
def test_trim_outside_the_table_is_refused(keep):
    table = table_of(BlockPool(4), 9)
    with pytest.raises(ValueError, match=f"cannot trim to {keep} tokens, the table has 9"):
        table.trim(keep)
    assert table.num_tokens == 9


def test_trim_of_a_fork_leaves_the_other_alone():
    pool = BlockPool(4)
    parent = table_of(pool, 9)
    child = parent.fork()
    child.trim(3)
    assert pool.num_free == 1
    assert child.append(1) == [BlockCopy(parent.blocks[0], child.blocks[0])]
    pool.check_invariants([parent, child])


def test_free_gives_up_the_tail_first():
    """The tail is evicted first: without its first block the rest of a chain could not be reached."""
    pool = BlockPool(3)
    table = table_of(pool, 12)
    table.publish(hash_blocks(range(12), 4), 12)
    chain = list(table.blocks)
    table.free()
    assert [pool.allocate()[0] for _ in range(3)] == chain[::-1]


class TestPublishing:
    tokens = range(100, 112)

    @pytest.fixture
    def pool(self):
        return BlockPool(8)

    def names(self, num_tokens: int = 12):
        return hash_blocks(self.tokens[:num_tokens], 4)

    def test_only_full_computed_blocks_are_offered(self, pool):
        """What a block will hold is nobody's hit before it is stored."""
        table = table_of(pool, 12)  # room for the whole prompt
        assert pool.lookup(self.names()) == []  # nothing is computed yet
        table.publish(self.names(), 6)
        assert pool.lookup(self.names()) == table.blocks[:1]
        table.publish(self.names(), 12)
        assert pool.lookup(self.names()) == table.blocks

    def test_an_aborted_request_has_offered_nothing(self, pool):
        table = table_of(pool, 12)
        table.free()
        assert pool.lookup(self.names()) == []
        assert not pool._cached

    def test_a_partly_filled_tail_is_never_offered(self, pool):
        table = table_of(pool, 6)
        table.publish(self.names(6), 6)
        assert len(self.names(6)) == 1
        assert [pool.is_published(block) for block in table.blocks] == [True, False]

    def test_a_block_is_offered_by_the_token_that_fills_it(self, pool):
        table = table_of(pool, 6)
        for length in (7, 8):
            table.append(1)
            table.publish(self.names(length), length)
            assert pool.is_published(table.blocks[1]) == (length == 8)

    def test_more_computed_tokens_than_there_are_is_refused(self, pool):
        table = table_of(pool, 6)
        with pytest.raises(ValueError, match="8 tokens computed, the table has 6"):
            table.publish(self.names(8), 8)
        assert pool.lookup(self.names()) == []

    def test_writing_into_an_offered_block_withdraws_it(self, pool):
        table = table_of(pool, 8)
        table.publish(self.names(8), 8)
        table.trim(6)
        assert pool.lookup(self.names(8)) == table.blocks  # unchanged as long as nobody writes
        assert table.append(1) == []
        assert pool.lookup(self.names(8)) == table.blocks[:1]
        pool.check_invariants([table])

    def test_writing_into_an_offered_block_that_another_holds_copies_it(self, pool):
        table = table_of(pool, 8)
        table.publish(self.names(8), 8)
        other = table.fork()
        table.trim(6)
        assert table.append(1) == [BlockCopy(other.blocks[1], table.blocks[1])]
        assert pool.lookup(self.names(8)) == other.blocks
        assert not pool.is_published(table.blocks[1])

    def test_a_trimmed_table_offers_its_new_contents_under_their_own_name(self, pool):
        table = table_of(pool, 8)
        table.publish(self.names(8), 8)
        table.trim(6)
        table.append(2)
        changed = hash_blocks([*self.tokens[:6], 7, 7], 4)
        table.publish(changed, 8)
        assert pool.lookup(changed) == table.blocks
        assert pool.lookup(self.names(8)) == table.blocks[:1]

    def test_a_trimmed_table_that_is_freed_leaves_the_whole_block_behind(self, pool):
        table = table_of(pool, 8)
        table.publish(self.names(8), 8)
        blocks = list(table.blocks)
        table.trim(7)
        table.free()
        assert pool.lookup(self.names(8)) == blocks


class TestStartingFromHits:
    tokens = range(200, 224)

    def cached(self, pool: BlockPool, num_tokens: int) -> list[bytes]:
        table = table_of(pool, num_tokens)
        names = hash_blocks(self.tokens[:num_tokens], 4)
        table.publish(names, num_tokens)
        table.free()
        return names

    def test_hits_are_shared_and_the_rest_is_new(self):
        pool = BlockPool(10)
        first = table_of(pool, 15)
        first.publish(hash_blocks(self.tokens[:15], 4), 15)
        assert [pool.is_published(block) for block in first.blocks] == [True, True, True, False]
        second = BlockTable(pool, 4)
        hits = pool.lookup(hash_blocks(self.tokens[:14], 4))
        assert second.begin(hits, 14)
        assert second.blocks[:3] == first.blocks[:3]
        assert [pool.ref_count(block) for block in second.blocks] == [2, 2, 2, 1]
        assert pool.num_free == 5
        pool.check_invariants([first, second])

    def test_hits_are_not_evicted_for_the_new_blocks_of_the_same_request(self):
        pool = BlockPool(2)
        names = self.cached(pool, 8)
        head, tail = pool.lookup(names)
        pool.share([tail])
        pool.free([tail])  # now the head is the older one and would be evicted first
        table = BlockTable(pool, 4)
        assert table.begin([head], 8)
        assert table.blocks == [head, tail]
        assert pool.lookup(names) == [head]

    def test_a_shortage_leaves_hits_and_their_order_alone(self):
        pool = BlockPool(10)
        names = self.cached(pool, 24)
        running = BlockTable(pool, 4)
        assert running.begin(pool.lookup(names)[:3], 12)
        other = table_of(pool, 8)
        hits = pool.lookup(names)
        assert pool.num_free == 5
        table = BlockTable(pool, 4)
        before = state(pool, running, other, table)
        assert table.begin(hits, 36) is False  # three new blocks and three cached ones, five are free
        assert state(pool, running, other, table) == before
        assert [pool.ref_count(block) for block in hits] == [1, 1, 1, 0, 0, 0]
        assert table.begin(hits, 32) is True

    def test_hits_longer_than_the_sequence_are_refused(self):
        pool = BlockPool(4)
        names = self.cached(pool, 8)
        with pytest.raises(ValueError, match="2 hits hold 8 tokens, the sequence has 7"):
            BlockTable(pool, 4).begin(pool.lookup(names), 7)

    def test_only_an_empty_table_adopts(self):
        pool = BlockPool(4)
        names = self.cached(pool, 8)
        table = table_of(pool, 1)
        before = state(pool, table)
        for call in (lambda: table.adopt(pool.lookup(names)), lambda: table.begin(pool.lookup(names), 9)):
            with pytest.raises(ValueError, match="the table has 1 tokens"):
                call()
        assert state(pool, table) == before

    def test_adopted_blocks_are_not_offered_again(self):
        pool = BlockPool(4)
        names = self.cached(pool, 8)
        table = BlockTable(pool, 4)
        table.begin(pool.lookup(names), 12)
        table.publish(hash_blocks(self.tokens[:12], 4), 12)
        assert len(pool.lookup(hash_blocks(self.tokens[:12], 4))) == 3
        pool.check_invariants([table])

    def test_without_caching_a_shortage_is_an_answer(self):
        pool = BlockPool(4, enable_prefix_caching=False)
        names = self.cached(pool, 10)
        assert pool.num_free == 4
        assert pool.lookup(names) == []
        table = BlockTable(pool, 4)
        assert table.begin([], 16)
        assert len(table.blocks) == 4
        assert table.append(4) is None
