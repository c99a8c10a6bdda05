"""Random histories of the whole memory manager against a model that cannot be wrong.

The model of a sequence is the list of its tokens. The "K/V" of a token is a digest of every token up to it
and of the salt, as real K/V depend on the whole prefix: a block that is shared, copied, hit, evicted or
swapped wrongly shows up as a byte that differs. The blocks a call needs are counted again, the slow way.
"""

import os
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minipaged.cache import (
    BlockPool,
    BlockTable,
    KVStorage,
    SwapSpace,
    append_all,
    blocks_to_append_all,
    hash_blocks,
    usable_hits,
)
from minipaged.memory import KVSpec, blocks_for

FUZZ = int(os.environ.get("MINIPAGED_FUZZ", "1"))
MAX_SEQUENCES = 6
ROW_BYTES = 24  # 8 of the key, 8 of the value, 4 of each scale


def prompt(which: int, length: int, last: int) -> list[int]:
    """One of three texts, cut anywhere and given a last token: prompts share long prefixes, then part."""
    return [*([0] * 14, [1] * 14, [0, 1] * 7)[which][: length - 1], last]


prompts = st.builds(prompt, st.integers(0, 2), st.integers(1, 14), st.integers(0, 1))
pick = st.integers(0, MAX_SEQUENCES - 1)
subset = st.sets(pick, min_size=1)


class Sequence:
    """A block table and, beside it, the tokens whose K/V it is supposed to hold."""

    def __init__(self, table: BlockTable, tokens: list[int], salt: str | None, computed: int) -> None:
        self.table, self.tokens, self.salt, self.computed = table, tokens, salt, computed

    def names(self) -> list[bytes]:
        return hash_blocks(self.tokens, self.table.block_size, salt=self.salt)

    def rows(self) -> np.ndarray:
        """uint8 [num_tokens, ROW_BYTES]: the K/V that each token must have."""
        digest, rows = blake2b(str(self.salt).encode(), digest_size=ROW_BYTES).digest(), []
        for token in self.tokens:
            digest = blake2b(digest + bytes([token]), digest_size=ROW_BYTES).digest()
            rows.append(digest)
        return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, ROW_BYTES)


class Histories(RuleBasedStateMachine):
    dtype = torch.float32
    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []

    @initialize(num_blocks=st.integers(4, 14), host_blocks=st.integers(2, 8), block_size=st.integers(1, 4))
    def start(self, num_blocks, host_blocks, block_size):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_prefix_caching=self.caching)
        self.storage = KVStorage(KVSpec(1, 1, 8 // self.dtype.itemsize, self.dtype), num_blocks, block_size)
        self.space = SwapSpace.create(self.pool, self.storage, host_blocks)
        self.host_pool, self.host_storage = self.space.host_pool, self.space.host_storage
        for storage in (self.storage, self.host_storage):
            for tensor in storage.tensors:
                tensor.view(torch.uint8).fill_(0xFF)

    def on(self, pool: BlockPool) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.table.pool is pool]

    def chosen(self, pool: BlockPool, numbers) -> list[Sequence]:
        there = self.on(pool)
        return list({id(there[n % len(there)]): there[n % len(there)] for n in sorted(numbers)}.values())

    def num_free(self, pool: BlockPool) -> int:
        return pool.num_blocks - len({block for seq in self.on(pool) for block in seq.table.blocks})

    def state(self) -> tuple:
        pools = [
            (
                p._ref_counts[:],
                p._blank[:],
                list(p._cached),
                dict(p._hashes),
                {h: list(b) for h, b in p._index.items()},
            )
            for p in (self.pool, self.host_pool)
        ]
        tables = [(s.table.blocks[:], s.table.num_tokens, s.table.num_published) for s in self.sequences]
        return pools, tables

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        """What a forward pass does: write the K/V of the next tokens, then offer the full blocks."""
        stop = seq.computed + num_tokens
        if not num_tokens:
            return
        raw = torch.from_numpy(seq.rows()[seq.computed : stop].copy())
        slots = torch.from_numpy(seq.table.slots(seq.computed, stop))
        key, value = (raw[:, i : i + 8].contiguous().view(self.dtype)[:, None] for i in (0, 8))
        scales = [None, None]
        if self.storage.spec.is_quantized:
            scales = [raw[:, i : i + 4].contiguous().view(torch.float32) for i in (16, 20)]
        self.storage.layer(0).write(slots, key, value, *scales)
        seq.computed = stop
        seq.table.publish(seq.names(), stop)

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(tokens=prompts, salt=st.sampled_from([None, None, None, "s"]), chunk=st.integers(0, 14))
    def admit(self, tokens, salt, chunk):
        seq = Sequence(BlockTable(self.pool, self.block_size), tokens, salt, 0)
        hits = self.pool.lookup(seq.names()[: usable_hits(len(tokens), self.block_size)])
        held = {block for other in self.on(self.pool) for block in other.table.blocks}
        needed = blocks_for(len(tokens), self.block_size) - len(held & set(hits))
        blank, published, before = len(self.pool._blank), set(self.pool._hashes), self.state()
        expected = needed <= self.num_free(self.pool)
        fits = seq.table.begin(hits, len(tokens))
        assert fits == expected
        if not fits:
            assert self.state() == before
            return
        assert seq.table.blocks[: len(hits)] == hits
        if needed - len(set(hits) - held) <= blank:
            assert published <= set(self.pool._hashes), "evicted while a blank block was free"
        self.sequences.append(seq)
        seq.computed = len(hits) * self.block_size
        self.compute(seq, min(chunk, len(tokens) - seq.computed))

    @precondition(lambda self: self.on(self.pool))
    @rule(number=pick, chunk=st.integers(1, 6))
    def prefill_on(self, number, chunk):
        (seq,) = self.chosen(self.pool, [number])
        self.compute(seq, min(chunk, len(seq.tokens) - seq.computed))

    @precondition(lambda self: self.on(self.pool))
    @rule(numbers=subset, new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode_together(self, numbers, new):
        group = [seq for seq in self.chosen(self.pool, numbers) if seq.computed == len(seq.tokens)]
        counts = [1 + (i + new[0]) % len(new) for i in range(len(group))]
        references = Counter(block for seq in self.on(self.pool) for block in seq.table.blocks)
        needed = 0
        for seq, n in zip(group, counts, strict=True):
            table = seq.table
            if table.num_tokens % self.block_size and references[table.blocks[-1]] > 1:
                references[table.blocks[-1]] -= 1
                needed += 1
            needed += blocks_for(table.num_tokens + n, self.block_size) - len(table.blocks)
        fits = needed <= self.num_free(self.pool)
        before, tables = self.state(), [seq.table for seq in group]
        assert blocks_to_append_all(tables, counts) == needed
        copies = append_all(tables, counts)
        assert (copies is not None) == fits
        if copies is None:
            assert self.state() == before
            return
        self.storage.copy_blocks(copies)
        for seq, n in zip(group, counts, strict=True):
            seq.tokens = seq.tokens + new[:n]
            self.compute(seq, n)

    @precondition(lambda self: 0 < len(self.sequences) < MAX_SEQUENCES)
    @rule(number=pick)
    def fork(self, number):
        seq = self.sequences[number % len(self.sequences)]
        if seq.computed == len(seq.tokens):
            self.sequences.append(Sequence(seq.table.fork(), seq.tokens, seq.salt, seq.computed))

    @precondition(lambda self: self.sequences)
    @rule(number=pick)
    def free(self, number):
        seq = self.sequences.pop(number % len(self.sequences))
        seq.table.free()
        assert (seq.table.blocks, seq.table.num_tokens) == ([], 0)

    @precondition(lambda self: self.on(self.pool))
    @rule(number=pick, keep=st.integers(1, 13))
    def trim(self, number, keep):
        (seq,) = self.chosen(self.pool, [number])
        keep = min(keep, len(seq.tokens))
        seq.table.trim(keep)
        seq.tokens, seq.computed = seq.tokens[:keep], min(seq.computed, keep)

    @precondition(lambda self: self.on(self.pool))
    @rule(numbers=subset)
    def swap_out(self, numbers):
        self.swap(self.chosen(self.pool, numbers), self.space.swap_out, self.host_pool)

    @precondition(lambda self: self.on(self.host_pool))
    @rule(numbers=subset)
    def swap_in(self, numbers):
        self.swap(self.chosen(self.host_pool, numbers), self.space.swap_in, self.pool)

    def swap(self, group, move, to) -> None:
        needed = len({block for seq in group for block in seq.table.blocks})
        free, before = self.num_free(to), self.state()
        moved = move([seq.table for seq in group])
        assert moved == (needed <= free)
        assert all(seq.table.pool is to for seq in group) if moved else self.state() == before

    @precondition(lambda self: self.pool._cached)
    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() == (not self.on(self.pool))

    @precondition(lambda self: self.sequences)
    @rule(block=st.integers(-1, 14))
    def misuse(self, block):
        before = self.state()
        held = [b for seq in self.on(self.pool) for b in seq.table.blocks]
        if block not in held:
            with pytest.raises(ValueError, match=f"block {block}"):
                self.pool.free([*held[:1], block])
        else:
            with pytest.raises(ValueError, match=f"block {block} is given twice"):
                self.pool.free([block, block])
        assert self.state() == before

    @invariant()
    def bookkeeping_is_sound(self):
        for pool in (self.pool, self.host_pool):
            pool.check_invariants([seq.table for seq in self.on(pool)])
            assert pool.num_free == self.num_free(pool)

    @invariant()
    def contents_are_those_of_the_model(self):
        for seq in self.sequences:
            storage = self.storage if seq.table.pool is self.pool else self.host_storage
            assert seq.table.num_tokens == len(seq.tokens)
            slots = seq.table.slots(0, seq.computed)
            rows, column = seq.rows()[: seq.computed], 0
            for tensor in storage.tensors:
                stored = tensor.view(torch.uint8).numpy().reshape(storage.num_slots, -1)[slots]
                assert np.array_equal(stored, rows[:, column : column + stored.shape[1]])
                column += stored.shape[1]

    @invariant()
    def what_a_table_has_offered_can_be_hit(self):
        for seq in self.on(self.pool) if self.caching else []:
            names = seq.names()[: seq.table.num_published]
            assert len(self.pool.lookup(names)) == seq.table.num_published


class QuantizedHistories(Histories):
    dtype = torch.int8


class Fp8Histories(Histories):
    dtype = torch.float8_e4m3fn


class HistoriesWithoutCaching(Histories):
    caching = False


for machine in (Histories, QuantizedHistories, Fp8Histories, HistoriesWithoutCaching):
    machine.TestCase.settings = settings(
        max_examples=125 * FUZZ,  # 500 for the four together; 3 000 in `make check`
        stateful_step_count=40,
        derandomize=FUZZ <= 6,  # `make check` runs the same histories every time, `make fuzz` new ones
        suppress_health_check=list(HealthCheck),
    )

TestHistories = pytest.mark.fuzz(Histories.TestCase)
TestQuantizedHistories = pytest.mark.fuzz(QuantizedHistories.TestCase)
TestFp8Histories = pytest.mark.fuzz(Fp8Histories.TestCase)
TestHistoriesWithoutCaching = pytest.mark.fuzz(HistoriesWithoutCaching.TestCase)
