"""KVCacheManager: gives requests their blocks and takes them back, as the scheduler's policy decides.

`BlocksInFlight` lets requests that enter in one step share what that step computes.
"""

from __future__ import annotations

from collections.abc import Collection

from minipaged.cache import BlockPool, BlockTable, PrefixStats, usable_hits
from minipaged.cache.swap import SwapSpace
from minipaged.core.request import Request, Sequence, Status, StepPlan
from minipaged.memory import blocks_for


class KVCacheManager:
    """Moves requests in and out of the block pool, forks their sequences and publishes their full blocks.

    A running sequence also owns one row of the batch builder's block-table matrix, so `max_num_seqs` rows are
    what bounds the number of sequences.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, swap: SwapSpace | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.swap = swap
        self.prefix_stats = PrefixStats()
        self.max_num_seqs = max_num_seqs
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_sequences(self) -> int:
        """Sequences of running requests; those that will fork from a prompt still being computed count."""
        return self.max_num_seqs - len(self._free_rows)

    def require_fits(self, request: Request) -> None:
        """Raise ValueError, with both numbers, for a request that could never run."""
        samples, prompt = len(request.live), request.num_prompt_tokens
        if samples > self.max_num_seqs:
            raise ValueError(f"n is {samples}, max_num_seqs is {self.max_num_seqs}")
        needed = blocks_for(prompt, self.block_size)
        if samples > 1:  # each will store a token of its own; only the prompt's full blocks stay shared
            shared = prompt // self.block_size
            needed = shared + samples * (blocks_for(prompt + 1, self.block_size) - shared)
        if needed > self.pool.num_blocks:
            what = f"prompt has {prompt} tokens" + (f" and n is {samples}" if samples > 1 else "")
            raise ValueError(f"{what}: it needs {needed} blocks, the pool has {self.pool.num_blocks}")

    def find_hits(self, request: Request, in_flight: BlocksInFlight) -> list[int]:
        """Blocks that hold the start of what the request has to compute: cached ones, then those in flight.

        Empty for a request that wants the log-probabilities of its prompt, which has to compute all of it.
        Takes no block.
        """
        if not self.pool.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        target = request.prefill_target
        hashes = request.active[0].hashes_of(target, self.block_size)[: usable_hits(target, self.block_size)]
        hits = self.pool.lookup(hashes)
        return hits + in_flight.lookup(hashes[len(hits) :])

    def enter(self, request: Request, hits: list[int]) -> None:
        """Give a waiting request its rows and the hits; bring a swapped one's blocks back."""
        if request.status is Status.SWAPPED:
            assert self.swap is not None
            done = self.swap.swap_in([s.table for s in request.active])
            assert done, "the scheduler counted the blocks"
        else:
            first = request.active[0]
            first.table.adopt(hits)
            first.num_computed = first.table.num_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = first.num_computed
                self.prefix_stats.record(request.num_prompt_tokens, first.num_computed)
        for sequence in request.live:
            sequence.row = self._free_rows.pop()
            sequence.row_blocks = 0
        request.status = Status.RUNNING

    def leave_by_recompute(self, request: Request) -> None:
        """Give up every block; what the request has so far becomes its prompt when it returns."""
        for sequence in request.active:
            sequence.table.free()
            sequence.num_computed = 0
        self._release_rows(request)
        request.unfork()
        request.status = Status.PREEMPTED

    def leave_by_swap(self, request: Request) -> bool:
        """Move the blocks to the host pool. False when it is short: then nothing has changed."""
        if self.swap is None or not self.swap.swap_out([s.table for s in request.active]):
            return False
        self._release_rows(request)
        request.status = Status.SWAPPED
        return True

    def fork(self, request: Request) -> None:
        """Share the computed prompt with the other live sequences. Takes no block."""
        first = request.active[0]
        for other in request.live:
            if other is not first:
                other.table = first.table.fork()
                other.num_computed = first.num_computed
                other.hashes = first.hashes[: first.num_computed // self.block_size]
        request.active = request.live

    def publish(self, sequence: Sequence) -> None:
        """Offer the full blocks whose keys and values are stored; call it after the step that stored them."""
        if sequence.num_computed // self.block_size > sequence.table.num_published:
            hashes = sequence.hashes_of(sequence.num_computed, self.block_size)
            sequence.table.publish(hashes, sequence.num_computed)

    def retire(self, sequence: Sequence) -> None:
        """Free what an ended sequence holds, in whichever pool it is, and take it off its request."""
        request = sequence.request
        if not request.is_forked and sequence is request.active[0] and len(request.live) > 1:
            self._hand_over(sequence, request.live[1])
        sequence.table.free()
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        request.live.remove(sequence)
        if not request.live:
            request.active = request.live
            request.status = Status.FINISHED

    def _hand_over(self, sequence: Sequence, heir: Sequence) -> None:
        """Before the fork, the prompt computed so far passes to the next sequence.

        Not the hashes beyond it: a sequence that was preempted may have hashed blocks of its own output.
        """
        heir.table, sequence.table = sequence.table, heir.table
        heir.num_computed = sequence.num_computed
        heir.hashes = sequence.hashes[: heir.num_computed // self.block_size]
        heir.request.active = [heir]

    def _release_rows(self, request: Request) -> None:
        for sequence in request.live:
            self._free_rows.append(sequence.row)
            sequence.row = -1

    def take_all_back(self, tables: Collection[BlockTable]) -> None:
        """Every block and every row is free again, whatever a step that was cut short has left.

        tables: all there are; afterwards they must not be used. Cached prefixes stay, unless pool and tables
            disagree: then the pool is cleared.
        """
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        if self.swap is not None:
            self.swap.host_pool.clear()
        tables = [table for table in tables if table.pool is self.pool]
        if self.pool.find_fault(tables) is None:
            for table in tables:
                table.free()
        else:
            self.pool.clear()

    def check_invariants(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Prove, given every unfinished request, that each block and row has exactly its owners."""
        device = [s.table for r in running for s in r.sequences]
        swapped = [s.table for r in waiting for s in r.sequences if r.status is Status.SWAPPED]
        self.pool.check_invariants(device)
        if self.swap is not None:
            self.swap.host_pool.check_invariants(swapped)
        rows = [s.row for r in running for s in r.live]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs)), "a row is lost or held twice"
        for sequence in (s for r in waiting if r.status is not Status.SWAPPED for s in r.sequences):
            nothing = (sequence.row, sequence.num_computed, sequence.table.blocks) == (-1, 0, [])
            assert nothing or sequence.output.finish_reason, f"{sequence.request.request_id} waits, holding"
        for request in running:
            name = request.request_id
            assert request.status is Status.RUNNING, f"{name} runs, its status is {request.status}"
            for sequence in request.active:
                stored, computed = sequence.table.num_tokens, sequence.num_computed
                assert stored == computed, f"{name}: room for {stored} tokens, {computed} computed"
                assert sequence.num_to_compute >= 1, f"{name}: nothing left to compute"


class BlocksInFlight:
    """The blocks that the step of `plan` completes, by block hash; what is planned later counts as well.

    Many requests with one new system prompt arrive together. When the second is admitted, the first one's
    chunk is already planned, and in every layer a step writes the keys and values of all its tokens before
    any of its queries reads. So the second may list the blocks that the first fills in this very step: they
    are computed once, and no request waits for another.

    These hashes live as long as the planning of one step. The pool offers a block to later steps only once
    it has been computed, so a step that fails leaves nothing to withdraw. (vLLM enters blocks into its index
    when it allocates them, with the same effect within a step.)

    Nothing is hashed before a request lacks a block. Then it is each sequence of the plan once, and each
    block in flight, whose hash is needed after the step anyway.
    """

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self._plan = plan
        self._block_size = block_size
        self._num_noted = 0
        self._blocks: dict[bytes, int] = {}

    def lookup(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest run from the start of `hashes` that this step completes."""
        blocks: list[int] = []
        if hashes:
            self._note_new_sequences()
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _note_new_sequences(self) -> None:
        first = self._num_noted
        self._num_noted = len(self._plan.sequences)
        added = zip(self._plan.sequences[first:], self._plan.query_lens[first:], strict=True)
        for sequence, query_len in added:
            stored, table = sequence.num_computed, sequence.table
            if stored % self._block_size + query_len >= self._block_size:  # completes a block
                hashes = sequence.hashes_of(stored + query_len, self._block_size)
                new = table.num_published  # the blocks before it can be found in the pool
                self._blocks.update(zip(hashes[new:], table.blocks[new:], strict=False))
