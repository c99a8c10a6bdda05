"""KVCacheManager: gives requests their blocks and takes them back, as the scheduler's policy decides."""

from __future__ import annotations

from collections.abc import Collection

from minipaged.cache import BlockPool, BlockTable, PrefixStats, usable_hits
from minipaged.cache.swap import SwapSpace
from minipaged.core.request import ParentRequest, Request, Status
from minipaged.memory import blocks_for


class KVCacheManager:
    """Moves requests in and out of the block pool, forks their tables and indexes their full blocks.

    A running request also owns one row of the batch builder's block-table matrix, so `max_num_seqs` rows are
    what bounds the number of running requests.
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

    def new_table(self) -> BlockTable:
        """An empty block table."""
        return BlockTable(self.pool, self.block_size)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def require_fits(self, parent: ParentRequest) -> None:
        """Raise ValueError, with both numbers, for samples that could never fork from one prompt."""
        samples, prompt = len(parent.samples), parent.num_prompt_tokens
        if samples > self.max_num_seqs:
            raise ValueError(f"n is {samples}, max_num_seqs is {self.max_num_seqs}")
        needed = blocks_for(prompt, self.block_size)
        if samples > 1:  # each will store a token of its own; only the prompt's full blocks stay shared
            shared = prompt // self.block_size
            needed = shared + samples * (blocks_for(prompt + 1, self.block_size) - shared)
        if needed > self.pool.num_blocks:
            what = f"prompt has {prompt} tokens" + (f" and n is {samples}" if samples > 1 else "")
            raise ValueError(f"{what}: it needs {needed} blocks, the pool has {self.pool.num_blocks}")

    def find_hits(self, request: Request) -> list[int]:
        """Blocks that hold the start of its tokens, or will when the step being planned has run.

        None for a swapped request, which brings its own, and for one that wants the log-probabilities of its
        prompt, which has to compute all of it. Takes no block.
        """
        swapped, scored = request.status is Status.SWAPPED, request.parent.params.prompt_logprobs is not None
        if swapped or scored or not self.pool.enable_prefix_caching:
            return []
        target = len(request.tokens)
        hashes = request.hashes_of(target, self.block_size)[: usable_hits(target, self.block_size)]
        return self.pool.lookup(hashes)

    def index(self, request: Request) -> None:
        """Offer the full blocks of its table to other requests, also those that this step will fill.

        Many requests with one new system prompt arrive together. When the second is admitted, the chunk of
        the first is already planned, and in every layer a step writes the keys and values of all its tokens
        before any of its queries reads. So the second may list the blocks that the first fills in this very
        step: they are computed once, and no request waits for another. (vLLM, too, indexes a block when it
        is allocated.) `take_all_back` withdraws what a step that failed had not filled.
        """
        table = request.table
        if self.pool.enable_prefix_caching and table.num_tokens // self.block_size > table.num_published:
            table.publish(request.hashes_of(table.num_tokens, self.block_size), table.num_tokens)

    def enter(self, request: Request, hits: list[int]) -> None:
        """Give a waiting request a row and the hits; bring a swapped one's blocks back."""
        if request.status is Status.SWAPPED:
            assert self.swap is not None
            done = self.swap.swap_in([request.table])
            assert done, "the scheduler counted the blocks"
        else:
            parent = request.parent
            request.table.adopt(hits)
            request.num_computed = request.table.num_tokens
            if parent.num_cached_tokens is None:
                parent.num_cached_tokens = request.num_computed
                self.prefix_stats.record(parent.num_prompt_tokens, request.num_computed)
        self._start(request)

    def fork(self, request: Request, sibling: Request) -> None:
        """Let a sibling that never ran share what `request` has, this step's tokens included.

        Takes no block.
        """
        sibling.table = request.table.fork()
        sibling.num_computed = sibling.table.num_tokens
        sibling.hashes = request.hashes
        self._start(sibling)

    def _start(self, request: Request) -> None:
        request.row, request.row_blocks = self._free_rows.pop(), 0
        request.status = Status.RUNNING

    def leave_by_recompute(self, request: Request) -> None:
        """Give up every block; what the request has so far becomes its prompt when it returns."""
        request.table.free()
        request.num_computed = 0
        self._release_row(request)
        request.status = Status.PREEMPTED

    def leave_by_swap(self, request: Request) -> bool:
        """Move the blocks to the host pool. False when it is short: then nothing has changed."""
        if self.swap is None or not self.swap.swap_out([request.table]):
            return False
        self._release_row(request)
        request.status = Status.SWAPPED
        return True

    def retire(self, request: Request) -> None:
        """Free what an ended request holds, in whichever pool it is."""
        request.table.free()
        self._release_row(request)
        request.status = Status.FINISHED

    def _release_row(self, request: Request) -> None:
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row = -1

    def take_all_back(self, requests: Collection[Request]) -> None:
        """Every block and every row is free again, whatever a step that was cut short has left.

        requests: all there are; afterwards their tables must not be used. Prefixes that are computed stay
            cached, unless pool and tables disagree: then the pool is cleared.
        """
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        if self.swap is not None:
            self.swap.host_pool.clear()
        requests = [request for request in requests if request.table.pool is self.pool]
        if self.pool.find_fault([request.table for request in requests]) is not None:
            self.pool.clear()
            return
        for request in requests:
            for block in request.table.blocks[request.num_computed // self.block_size :]:
                self.pool.unpublish(block)  # indexed for this step, never filled
        for request in requests:
            request.table.free()

    def check_invariants(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Prove, given every unfinished request, that each block and row has exactly its owners."""
        self.pool.check_invariants([request.table for request in running])
        if self.swap is not None:
            swapped = [request.table for request in waiting if request.status is Status.SWAPPED]
            self.swap.host_pool.check_invariants(swapped)
        rows = [request.row for request in running]
        assert sorted(rows + self._free_rows) == list(range(self.max_num_seqs)), "a row is lost or held twice"
        for request in waiting:
            nothing = (request.row, request.num_computed, request.table.blocks) == (-1, 0, [])
            assert nothing or request.status is Status.SWAPPED, f"{request.request_id} waits, holding"
        for request in running:
            name, stored, computed = request.request_id, request.table.num_tokens, request.num_computed
            assert request.status is Status.RUNNING, f"{name} runs, its status is {request.status}"
            assert stored == computed, f"{name}: room for {stored} tokens, {computed} computed"
            assert request.num_missing >= 1, f"{name}: nothing left to compute"
