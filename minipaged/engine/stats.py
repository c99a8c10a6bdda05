"""What the engine counted, and one record per step for lessons and benchmarks to draw."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minipaged.cache import PrefixStats

if TYPE_CHECKING:
    from minipaged.core.scheduler import Scheduler
    from minipaged.engine.plan import StepPlan

TRACE_LENGTH = 100_000  # steps kept; older ones are dropped


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Memory is measured after the model ran, before what ended in this step was freed."""

    index: int
    time: float
    """Seconds of the engine's clock when the step began."""
    duration: float
    """Seconds from planning to sampled tokens."""
    running: int
    """Requests that held blocks."""
    waiting: int
    """Requests without blocks, swapped ones included."""
    swapped: int
    prefill_tokens: int
    decode_tokens: int
    preempted: int
    """Requests preempted in this step."""
    blocks_held: int
    reserved_bytes: int
    """KV memory of the blocks held."""
    used_bytes: int
    """The part of it that holds tokens."""


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


class Recorder:
    """Writes one `StepRecord` per step and the times of the requests in it."""

    def __init__(self, bytes_per_block: int, block_size: int) -> None:
        self.bytes_per_block = bytes_per_block
        self.block_size = block_size
        self.trace: deque[StepRecord] = deque(maxlen=TRACE_LENGTH)

    def record(self, plan: StepPlan, scheduler: Scheduler, start: float, now: float) -> None:
        """Note a step that ran from `start` to `now`; call it before its tokens are added."""
        stats = scheduler.stats
        stats.num_steps += 1
        stats.num_prefill_tokens += plan.num_prefill_tokens
        stats.num_generation_tokens += len(plan.sampled)
        self._record_times(plan, start, now)
        if scheduler.manager.num_sequences > len(scheduler.running):
            self._record_sharing(plan)
        if plan.num_prefill_tokens:
            scheduler.cost.record_prefill(now - start, sum(plan.query_lens))
        held = scheduler.pool.num_blocks - scheduler.pool.num_free
        reserved = held * self.bytes_per_block
        empty_slots = plan.num_empty_slots(self.block_size)
        self.trace.append(
            StepRecord(
                index=stats.num_steps - 1,
                time=start,
                duration=now - start,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                swapped=scheduler.num_swapped,
                prefill_tokens=plan.num_prefill_tokens,
                decode_tokens=sum(plan.query_lens) - plan.num_prefill_tokens,
                preempted=len(plan.preempted),
                blocks_held=held,
                reserved_bytes=reserved,
                used_bytes=reserved - empty_slots * self.bytes_per_block // self.block_size,
            )
        )

    def _record_times(self, plan: StepPlan, start: float, now: float) -> None:
        for request in plan.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = start
        for sequence in [s for s in plan.sampled if not s.output.token_ids]:
            sequence.request.metrics.first_token_time = now

    def _record_sharing(self, plan: StepPlan) -> None:
        for request in {s.request for s in plan.sequences if len(s.request.active) > 1}:
            request.metrics.sharing.count([s.table for s in request.active])
