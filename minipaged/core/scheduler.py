"""The scheduler: before each step it decides which requests compute which tokens, wait, or give way.

First come, first served. There are two queues. Read one after the other, they are in order of arrival:

    running   holds device blocks; its end is the youngest request, the first to give way
    waiting   preempted and swapped requests, then those that never ran; only its head may enter

Decodes before prompts, and prompts in chunks, is Sarathi-Serve (Agrawal et al. 2024); preemption by recompute
or by swap is section 4.5 of the PagedAttention paper; one rule for both phases is vLLM's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import takewhile

from minipaged.config import EngineConfig
from minipaged.core.kv_cache_manager import KVCacheManager
from minipaged.core.request import EngineStats, Request, Status, StepPlan
from minipaged.memory import blocks_for


class Scheduler:
    """Policy only: it knows queues, budgets and block counts, no model and no tensor."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = EngineStats()

    def schedule(self) -> StepPlan:
        """Plan the next step and take its blocks.

        There is no prefill phase and no decode phase. Each request has tokens and computed tokens, and a step
        lets the second catch up with the first:

        1. Running requests go first, oldest first: each computes what it misses, within the step's budget of
           tokens. A decoding one misses one token. Only the youngest can be in the middle of its prompt.
        2. If one finds no block for its next token, the youngest is preempted, even if that is itself.
        3. Then the head of the queue enters, again and again, while it can finish beside the others.

        No request starves. The budget is at least `max_num_seqs`, so it reaches the youngest. A preempted
        request is older than all that wait: at the head of the queue it returns before a new one enters.

        Raises RuntimeError when requests exist and nothing can be done for any of them: a bug, never a wait.
        """
        plan = StepPlan()
        budget = self.config.max_num_batched_tokens
        for request in self.running:  # a preemption shortens the list from its end
            budget -= self._compute(request, budget, plan)
        while self.waiting and budget and not plan.preempted:
            request = self.waiting[0]
            hits = self.manager.find_hits(request)
            if not self._may_enter(request, hits, budget):
                break
            self._start(self.waiting.popleft(), plan)
            self.manager.enter(request, hits)
            budget -= self._compute(request, budget, plan)
        if not plan.requests and not plan.ended and self.has_unfinished:
            raise RuntimeError(
                f"the step scheduled nothing: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.manager.pool.num_free} of {self.manager.pool.num_blocks} blocks free"
            )
        return plan

    def _compute(self, request: Request, budget: int, plan: StepPlan) -> int:
        """Take the blocks of the tokens a request misses, of fewer where the budget or blocks are short.

        Returns how many tokens: none of one that has just forked, for this step computes its prompt.
        """
        missing = request.num_missing
        num_tokens = min(missing, budget)
        if not num_tokens:
            return 0
        copies = request.table.append(num_tokens)
        if copies is None:
            num_tokens = self._make_room(request, num_tokens, plan)
            if not num_tokens:
                return 0
            copies = request.table.append(num_tokens)
            assert copies is not None, "the blocks were counted"
        if copies:  # the block that the next token goes to was replaced: its row is written again from there
            plan.copies += copies
            request.row_blocks = min(request.row_blocks, request.num_computed // self.manager.block_size)
        plan.add(request, num_tokens, is_sampled=num_tokens == missing)
        self.manager.index(request)
        if num_tokens == missing and not request.output.token_ids:
            for sibling in request.waiting_siblings():
                self.waiting.remove(sibling)
                self._start(sibling, plan)
                self.manager.fork(request, sibling)
                plan.add_fork(sibling)
        return num_tokens

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """How many of a request's next tokens find a slot, at least one: for it the youngest give way.

        0 if the request gave way itself, or ended: alone in a full pool it has nothing to wait for.
        """
        while (room := self._room_for(request, num_tokens)) <= 0:
            if len(self.running) == 1:
                request.output.finish("length")
                plan.ended.append(request)
                return 0
            plan.preempted.append(self.preempt_youngest())
            if plan.preempted[-1] is request:
                return 0
        return min(room, num_tokens)

    def _room_for(self, request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens find a slot in the blocks that are free; ≤ 0 for none."""
        stored, block_size = request.table.num_tokens, self.manager.block_size
        short = request.table.blocks_to_append(num_tokens) - self.manager.pool.num_free
        return (blocks_for(stored + num_tokens, block_size) - short) * block_size - stored

    def _may_enter(self, request: Request, hits: list[int], budget: int) -> bool:
        """Whether it can finish its prompt: rows and blocks are left for it and the siblings that will fork.

        No running request is in the middle of its prompt, for that one takes all that is left of the budget.
        So no free block is promised. Into an empty engine a request may always come, for it fits the pool.
        """
        pool, block_size = self.manager.pool, self.manager.block_size
        siblings = len(request.waiting_siblings())
        if 1 + siblings > self.manager.num_free_rows:
            return False
        missing = request.num_missing - len(hits) * block_size
        if missing > budget and not self.config.enable_chunked_prefill:
            return False
        if not self.running:
            return True
        copies = siblings if len(request.tokens) % block_size else 0  # of the part-filled last block
        blocks = blocks_for(len(request.tokens), block_size) + copies
        taken = blocks - len(hits) + pool.count_free(hits)
        return taken + int(self.config.watermark * pool.num_blocks) <= pool.num_free

    def _start(self, request: Request, plan: StepPlan) -> None:
        self.running.append(request)
        plan.admitted.append(request)

    def preempt_youngest(self) -> Request:
        """Put the youngest running request back at the head of the queue, its blocks freed or swapped out."""
        request = self.running.pop()
        request.parent.metrics.num_preemptions += 1
        if self.config.preemption == "swap" and self.manager.leave_by_swap(request):
            self.stats.num_swaps += 1
        else:
            self.manager.leave_by_recompute(request)
            self.stats.num_recomputes += 1
        self.waiting.appendleft(request)
        return request

    def end(self, request: Request) -> None:
        """Take a request off the queue it is in, and its blocks back."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self.manager.retire(request)

    def requeue_all(self, requests: Collection[Request]) -> None:
        """After a step was cut short: every unfinished request waits again, holding nothing but its tokens.

        An error or Ctrl-C may come in the middle of planning or committing, or of this. So no queue, row or
        table is believed; only the tokens are, and all else is computed again.

        requests: all there are, in order of arrival.
        """
        self.manager.take_all_back(requests)
        self.running.clear()
        self.waiting.clear()
        for request in requests:
            request.restart(self.manager.new_table())
            if request.status is Status.FINISHED:
                continue
            if request.status is Status.RUNNING:
                request.parent.metrics.num_preemptions += 1
                self.stats.num_recomputes += 1
            if request.status is not Status.WAITING:
                request.status = Status.PREEMPTED
            self.waiting.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_swapped(self) -> int:
        """Swapped requests; they are all before the requests that never ran."""
        ran_before = takewhile(lambda request: request.status is not Status.WAITING, self.waiting)
        return sum(request.status is Status.SWAPPED for request in ran_before)
