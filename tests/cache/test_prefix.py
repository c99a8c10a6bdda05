"""Prefix hashes and what they find: names of full blocks, chains, salts, usable hits, statistics."""

import pytest

from minipaged.cache import BlockPool, BlockTable, PrefixStats, hash_block, hash_blocks, usable_hits


def run(pool: BlockPool, tokens, block_size: int, *, salt: str | None = None, read_cache: bool = True):
    """Admit a request, compute its tokens and offer its blocks. Returns (table, cached tokens) or None."""
    names = hash_blocks(tokens, block_size, salt=salt)
    hits = pool.lookup(names[: usable_hits(len(tokens), block_size)]) if read_cache else []
    table = BlockTable(pool, block_size)
    if not table.begin(hits, len(tokens)):
        return None
    table.publish(names, len(tokens))
    return table, len(hits) * block_size


def finish(pool: BlockPool, tokens, block_size: int) -> int:
    table, cached = run(pool, tokens, block_size)
    table.free()
    return cached


def cached_tokens(pool: BlockPool, tokens, block_size: int) -> int:
    names = hash_blocks(tokens, block_size)
    return len(pool.lookup(names[: usable_hits(len(tokens), block_size)])) * block_size


class TestHashing:
    def test_only_full_blocks_have_a_name(self):
        assert [len(hash_blocks(range(n), 4)) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]

    def test_names_are_the_chain_of_blocks(self):
        first = hash_block(None, [1, 2])
        assert hash_blocks([1, 2, 3, 4], 2) == [first, hash_block(first, [3, 4])]
        assert len(first) == 32

    def test_known_names_are_extended_not_recomputed(self):
        tokens = list(range(13))
        whole = hash_blocks(tokens, 4)
        for n in range(4):
            assert hash_blocks(tokens, 4, known=whole[:n]) == whole
        assert hash_blocks(tokens, 4, known=[b"x" * 32])[0] == b"x" * 32

    def test_equal_tokens_behind_another_prefix_have_another_name(self):
        """A hash that left out the parent would share keys of another text."""
        assert hash_blocks([1, 2, 3, 4], 2)[1] != hash_blocks([9, 9, 3, 4], 2)[1]

    def test_every_input_is_in_the_digest(self):
        parent, other = hash_block(None, [1]), hash_block(None, [2])
        names = [
            hash_block(None, [3, 4]),
            hash_block(None, [4, 3]),
            hash_block(None, [3, 4, 0]),
            hash_block(None, [-1, 4]),
            hash_block(None, [-2, 4]),  # Python's own hash() of -1 and -2 is the same
            hash_block(parent, [3, 4]),
            hash_block(other, [3, 4]),
            hash_block(None, [3, 4], [("salt", "s")]),
            hash_block(None, [3, 4], [("salt", "t")]),
            hash_block(parent, [3, 4], [("salt", "s")]),
        ]
        assert len(set(names)) == len(names)

    def test_keys_of_different_kinds_do_not_meet(self):
        names = [
            hash_block(None, [1], [("salt", "s")]),
            hash_block(None, [1], [("adapter", "s")]),
            hash_block(None, [1], [("salt", "s"), ("adapter", "s")]),
            hash_block(None, [1], [("salts", "")]),
            hash_block(None, [1], [("salt", "sV")]),
            hash_block(None, [1], [("salt", ""), ("salt", "s")]),
        ]
        assert len(set(names)) == len(names)

    def test_tokens_cannot_imitate_a_field(self):
        key = hash_block(None, [1], [("salt", "s")])
        payload = b"K" + (4).to_bytes(8, "little") + b"salt" + b"V" + (1).to_bytes(8, "little") + b"s"
        imitation = [1] + [int.from_bytes(payload[i : i + 8], "little", signed=True) for i in range(0, 16, 8)]
        assert hash_block(None, imitation) != key

    def test_a_token_that_is_not_a_whole_number_is_refused(self):
        with pytest.raises(TypeError):
            hash_block(None, [1.0])


class TestSalt:
    def test_the_first_block_carries_it_for_the_whole_chain(self):
        """Later blocks know the salt through their parent's hash only."""
        tokens = list(range(12))
        plain, salted = hash_blocks(tokens, 4), hash_blocks(tokens, 4, salt="salt1")
        assert not set(plain) & set(salted)
        assert salted[0] == hash_block(None, tokens[:4], [("salt", "salt1")])
        assert salted[1] == hash_block(salted[0], tokens[4:8])

    def test_requests_with_another_salt_share_nothing(self):
        pool = BlockPool(32)
        tokens = list(range(13))
        cached = [run(pool, tokens, 4, salt=salt)[1] for salt in ("salt1", "salt1", "salt2", None, None)]
        assert cached == [0, 12, 0, 0, 12]

    def test_an_empty_salt_is_a_salt(self):
        assert hash_blocks([1, 2], 2, salt="") != hash_blocks([1, 2], 2)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_at_least_one_token_is_left_to_compute(num_tokens, blocks):
    """Without one there are no logits to sample from."""
    assert usable_hits(num_tokens, 4) == blocks


@pytest.mark.parametrize(("length", "expected"), [(8, 4), (9, 8)])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(length, expected):
    pool = BlockPool(16)
    tokens = list(range(50, 50 + length))
    first, cached = run(pool, tokens, 4)
    assert cached == 0
    first.free()
    second, cached = run(pool, tokens, 4)
    assert cached == expected
    third, cached = run(pool, [*tokens, 1, 2, 3, 4], 4)
    assert cached == 8  # the chain goes on behind the last block, which both have
    pool.check_invariants([second, third])


def test_a_reassigned_block_is_not_found_under_its_old_name():
    """Block size 2, three blocks. A check of the tokens alone would find [7, 8]."""
    pool = BlockPool(3)
    finish(pool, [1, 2, 7, 8], 2)
    finish(pool, [3, 4, 7, 8], 2)
    assert cached_tokens(pool, [1, 2, 7, 8, 9], 2) == 2
    pool.check_invariants([])


def test_a_reused_block_loses_its_hash():
    pool = BlockPool(1)
    tokens = list(range(16))
    finish(pool, tokens, 16)
    table, cached = run(pool, tokens[:15], 16)
    assert cached == 0
    assert not pool.is_published(table.blocks[0])
    assert pool.lookup(hash_blocks(tokens, 16)) == []


def test_a_partial_block_is_evicted_before_full_ones():
    pool = BlockPool(4)
    a = list(range(11))
    finish(pool, a, 4)
    b, _ = run(pool, list(range(100, 107)), 4)
    assert len(b.blocks) == 2
    assert cached_tokens(pool, a, 4) == 8


def test_a_chain_is_evicted_from_its_tail():
    """Without its first block the rest of a chain could not be reached."""
    pool = BlockPool(4)
    a = list(range(12))
    finish(pool, a, 4)
    run(pool, list(range(100, 107)), 4)
    assert cached_tokens(pool, [*a, 0], 4) == 8


def test_a_hit_refreshes_every_block_of_the_chain():
    pool = BlockPool(4)
    a, b = list(range(9)), list(range(100, 109))
    finish(pool, a[:8], 4)
    finish(pool, b[:8], 4)
    assert finish(pool, a[:8], 4) == 4  # its last block is recomputed
    run(pool, list(range(200, 208)), 4)
    assert cached_tokens(pool, a, 4) == 8
    assert cached_tokens(pool, b, 4) == 0


def test_decode_fills_names_and_extends():
    pool = BlockPool(10)
    tokens = list(range(78))
    table, _ = run(pool, tokens[:55], 16)
    table.append(4)
    table.publish(hash_blocks(tokens[:59], 16), 59)
    assert [pool.is_published(block) for block in table.blocks] == [True, True, True, False]
    table.append(19)
    table.publish(hash_blocks(tokens, 16), 78)
    assert [pool.is_published(block) for block in table.blocks] == [True, True, True, True, False]


def test_a_request_that_does_not_read_the_cache_still_feeds_it():
    pool = BlockPool(16)
    tokens = [*range(48), 0]
    runs = [run(pool, tokens, 16, read_cache=read) for read in (False, True, False)]
    assert [cached for _, cached in runs] == [0, 48, 0]
    first, second, third = (table.blocks for table, _ in runs)
    assert first[:3] == second[:3]
    assert not set(first) & set(third)
    assert all(map(pool.is_published, first[:3] + third[:3]))
    pool.check_invariants([table for table, _ in runs])


def test_two_equal_prompts_share_all_but_what_must_be_computed():
    """The suffix continues at the position after the hits, in blocks of its own."""
    pool = BlockPool(16)
    tokens = list(range(10))
    first, _ = run(pool, tokens, 4)
    second, cached = run(pool, tokens, 4)
    assert cached == 8
    assert second.slots(0, 8).tolist() == first.slots(0, 8).tolist()
    assert not set(second.slots(8, 10)) & set(first.slots(8, 10))


def test_reset_during_and_after_two_requests():
    pool = BlockPool(16)
    tokens = list(range(10))
    tables = [run(pool, tokens, 4)[0] for _ in range(2)]
    assert pool.reset_prefix_cache() is False
    assert cached_tokens(pool, tokens, 4) == 8
    for table in tables:
        table.free()
    assert pool.reset_prefix_cache() is True
    assert cached_tokens(pool, tokens, 4) == 0


def test_statistics_count_tokens():
    stats = PrefixStats()
    assert stats.hit_rate == 0.0
    stats.record(10, 8)
    stats.record(30, 0)
    assert (stats.queries, stats.hits, stats.hit_rate) == (40, 8, 0.2)
    for hits in (-1, 11):
        with pytest.raises(ValueError, match=f"{hits} tokens hit out of 10"):
            stats.record(10, hits)
    assert stats.queries == 40
