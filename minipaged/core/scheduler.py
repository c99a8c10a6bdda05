"""The scheduler: before each step it decides which requests compute which tokens, wait, or give way.

First come, first served. There are two queues. Read one after the other, they are in order of arrival:

    running   holds device blocks; its end is the youngest request, the first to give way
    waiting   preempted and swapped requests, then those that never ran; only its head may enter

A step decodes first (one token for every running sequence that can), spends what is left of the token budget
on chunks of prompts, and then admits. When a decode finds no free block, the youngest request is preempted.
It is older than all waiting requests, so it goes to the head of the queue and returns before any new request
enters: no request starves.

Decodes first and prompts in chunks is Sarathi-Serve (Agrawal et al. 2024); preemption by recompute or by swap
is section 4.5 of the PagedAttention paper.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from minipaged.cache import BlockCopy, BlockTable, PrefixStats, append_all
from minipaged.cache.swap import SwapSpace
from minipaged.config import EngineConfig
from minipaged.core.kv_cache_manager import BlocksInFlight, KVCacheManager
from minipaged.core.request import Request, Sequence, Status, StepPlan
from minipaged.memory import blocks_for

SMOOTHING = 0.2  # weight of the newest measurement


class Scheduler:
    """Policy only: it knows queues, budgets and block counts, no model and no tensor."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
        self.pool = manager.pool
        self.block_size = manager.block_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cost = PreemptionCost()
        self.stats = EngineStats()
        self._watermark = int(config.watermark * self.pool.num_blocks)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_swapped(self) -> int:
        """Swapped requests; they are all before the requests that never ran."""
        count = 0
        for request in self.waiting:
            if request.status is Status.WAITING:
                break
            count += request.status is Status.SWAPPED
        return count

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request off the queue it is in."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)

    def schedule(self) -> StepPlan:
        """Plan the next step and take its blocks.

        Raises RuntimeError when requests exist and nothing can be done for any of them: a bug, never a wait.
        """
        plan = StepPlan()
        while self.has_unfinished and not plan.ended:
            partial = self._plan_decodes(plan)
            if plan.ended:
                break
            budget = self.config.max_num_batched_tokens - plan.num_decodes
            budget = self._plan_chunks(partial, plan, budget)
            self._admit(partial, plan, budget)
            if plan.sequences:
                plan.idle = [s for r in partial for s in r.active if s.table.num_tokens == s.num_computed]
                break
            self._give_way(plan)
        return plan

    def requeue_all(self, requests: Collection[Request]) -> list[Request]:
        """After a step was cut short: every unfinished request waits again, holding nothing but its tokens.

        An error or Ctrl-C may come in the middle of planning or committing. So no queue, row or table is
        believed; only the tokens are, and all else is computed again.

        requests: all there are, in order of arrival. Returns those that have ended.
        """
        self.manager.take_all_back([s.table for r in requests for s in r.sequences])
        self.running.clear()
        self.waiting.clear()
        ended = []
        for request in requests:
            for sequence in request.sequences:
                sequence.restart(BlockTable(self.pool, self.block_size))
            request.live = [s for s in request.sequences if s.output.finish_reason is None]
            request.unfork()
            if not request.live:
                request.status = Status.FINISHED
                ended.append(request)
                continue
            if request.status is Status.RUNNING:
                request.metrics.num_preemptions += 1
                self.stats.num_recomputes += 1
            if request.status is not Status.WAITING:
                request.status = Status.PREEMPTED
            self.waiting.append(request)
        return ended

    def preempt_youngest(self) -> Request:
        """Put the youngest running request back at the head of the queue, its blocks freed or swapped out."""
        request = self.running.pop()
        request.metrics.num_preemptions += 1
        if self._prefers_swap(request) and self.manager.leave_by_swap(request):
            self.stats.num_swaps += 1
        else:
            self.manager.leave_by_recompute(request)
            self.stats.num_recomputes += 1
        self.waiting.appendleft(request)
        return request

    def _prefers_swap(self, request: Request) -> bool:
        if self.config.preemption == "auto":
            num_tokens = sum(s.num_computed for s in request.active)
            return self.cost.prefers_swap(num_tokens, request.num_blocks_held(self.block_size))
        return self.config.preemption == "swap"

    # Decodes

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """One token for each sequence that lacks only its last one; returns the requests with more to do."""
        partial: list[Request] = []
        position = 0
        while position < len(self.running):  # preempting shortens the list from its end
            request = self.running[position]
            position += 1
            ready = [s for s in request.active if s.num_to_compute == 1] if request.is_forked else []
            has_more = len(ready) < len(request.live)
            self._plan_decode_group(request, ready, plan)
            if has_more and request.status is Status.RUNNING:
                partial.append(request)
        return partial

    def _plan_decode_group(self, request: Request, ready: list[Sequence], plan: StepPlan) -> None:
        """One token for all of `ready` or for none, making room where blocks are short."""
        while ready:
            copies = append_all([s.table for s in ready], [1] * len(ready))
            if copies is not None:
                self._note_copies(ready, copies, plan)
                for sequence in ready:
                    plan.add_decode(sequence)
                return
            if len(self.running) == 1:
                self._end_for_lack_of_blocks(ready.pop(), plan)
                continue
            plan.preempted.append(self.preempt_youngest())
            if plan.preempted[-1] is request:
                return

    # Prompts

    def _plan_chunks(self, partial: Collection[Request], plan: StepPlan, budget: int) -> int:
        """Spend `budget` tokens on the prompts, in order. Returns what is left; 0 once one was cut short."""
        for request in partial:
            for sequence in request.active:
                wanted = (
                    sequence.num_to_compute
                    if request.is_forked
                    else request.num_prompt_tokens - sequence.num_computed
                )
                if sequence.table.num_tokens > sequence.num_computed:
                    continue  # decodes in this step
                num_tokens = min(wanted, budget, self._room_for(sequence, wanted))
                if num_tokens <= 0 or (num_tokens < wanted and not self.config.enable_chunked_prefill):
                    return 0
                copies = sequence.table.append(num_tokens)
                assert copies is not None, "_room_for counted the blocks"
                self._note_copies([sequence], copies, plan)
                plan.add_chunk(sequence, num_tokens)
                budget -= num_tokens
                if num_tokens < wanted:
                    return 0
        return budget

    def _room_for(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens find a slot in the blocks that are free; ≤ 0 for none."""
        table = sequence.table
        missing = table.blocks_to_append(num_tokens) - self.pool.num_free
        if missing <= 0:
            return num_tokens
        return (blocks_for(table.num_tokens + num_tokens, self.block_size) - missing) * self.block_size - (
            table.num_tokens
        )

    # Admission

    def _admit(self, partial: list[Request], plan: StepPlan, budget: int) -> None:
        """Let in the head of the queue, again and again, while it can finish its prompt beside the others.

        It shares the beginning of its prompt with the cache, and with requests that compute it in this step.
        """
        in_flight = BlocksInFlight(plan, self.block_size)
        while self.waiting and budget > 0:
            if any(s.output.token_ids for forking in plan.forks for s in forking.live):
                return  # samples that came back compute their own tokens next, in room that is theirs
            request = self.waiting[0]
            hits = [] if request.status is Status.SWAPPED else self.manager.find_hits(request, in_flight)
            if not self._may_enter(request, hits):
                return
            self.waiting.popleft()
            self.running.append(request)
            self.manager.enter(request, hits)
            plan.admitted.append(request)
            partial.append(request)
            budget = self._plan_chunks([request], plan, budget)

    def _may_enter(self, request: Request, hits: list[int]) -> bool:
        """Whether rows are left, and the blocks of its whole prompt beside the watermark.

        A running request whose prompt is unfinished takes all of the budget, so none exists here and no free
        block is promised to another request. Nor can a request return in the step that preempted it: some of
        the blocks it needs are taken. Into an empty engine a request may always come, for it fits the pool.
        """
        if len(request.live) > self.manager.num_free_rows:
            return False
        if not self.running:
            return True
        taken = request.num_blocks_needed(self.block_size) - len(hits) + self.pool.count_free(hits)
        return taken + self._watermark <= self.pool.num_free

    # Shortage

    def _give_way(self, plan: StepPlan) -> None:
        """Nothing could be planned. That is so when the only request inside has outgrown the pool."""
        if len(self.running) != 1 or not self._outgrows_pool(self.running[0]):
            raise RuntimeError(
                f"the step scheduled nothing: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.pool.num_free} of {self.pool.num_blocks} blocks free"
            )
        self._end_for_lack_of_blocks(self.running[0].live[-1], plan)

    def _outgrows_pool(self, request: Request) -> bool:
        """Whether what is free cannot hold its next chunk; without chunked prefill that may be a lot."""
        return any(self._room_for(s, s.num_to_compute) < s.num_to_compute for s in request.active)

    def _end_for_lack_of_blocks(self, sequence: Sequence, plan: StepPlan) -> None:
        """Alone in the pool and it is full: there is nothing to wait for, so the sequence ends here."""
        request = sequence.request
        sequence.output.finish("length")
        self.manager.retire(sequence)
        if not request.live:
            self.running.remove(request)
            plan.ended.append(request)

    def _note_copies(self, sequences: Collection[Sequence], copies: list[BlockCopy], plan: StepPlan) -> None:
        """A copy replaced the block that the next token goes to: rows must be written again from there."""
        if copies:
            plan.copies.extend(copies)
            for sequence in sequences:
                sequence.row_blocks = min(sequence.row_blocks, sequence.num_computed // self.block_size)


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made or `Engine.reset_stats` was called."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    """Tokens computed in chunks, those of a recomputation included."""
    num_generation_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_recomputes: int = 0
    """Preemptions that gave the blocks up."""
    num_swaps: int = 0
    """Preemptions that moved the blocks to the host."""
    prefix: PrefixStats = field(default_factory=PrefixStats)
    """Prompt tokens of admitted requests, and those of them found in the prefix cache."""

    @property
    def num_preemptions(self) -> int:
        return self.num_recomputes + self.num_swaps


@dataclass(slots=True)
class PreemptionCost:
    """Seconds that each way to preempt takes, measured while the engine runs.

    A request that gives way can be computed again later, which costs model time for every token. Or its
    blocks move to host memory and back: two copies of every block, and small blocks copy slowly
    (PagedAttention paper, section 4.5).
    """

    seconds_per_token: float = 0.0
    """Model time of one token in the steps that computed prompts."""
    seconds_per_block: float = 0.0
    """Time to copy one block to the host and back."""

    def record_prefill(self, seconds: float, num_tokens: int) -> None:
        measured = seconds / num_tokens
        if self.seconds_per_token:
            measured = SMOOTHING * measured + (1 - SMOOTHING) * self.seconds_per_token
        self.seconds_per_token = measured

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving the blocks out and in is cheaper than computing the tokens again."""
        return num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token


def swap_seconds_per_block(swap: SwapSpace, clock: Callable[[], float]) -> float:
    """Measured on an idle engine: move some blocks to the host and back."""
    table = BlockTable(swap.device_pool, swap.device_storage.block_size)
    count = min(32, swap.device_pool.num_blocks, swap.host_pool.num_blocks)
    copies = table.append(count * table.block_size)
    assert copies is not None, "the pool is not idle"
    swap.swap_out([table]), swap.swap_in([table])  # the first time also allocates
    start = clock()
    swap.swap_out([table]), swap.swap_in([table])
    seconds = clock() - start
    table.free()
    return seconds / count
