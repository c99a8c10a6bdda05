"""What an engine does step by step, request by request: for Gantt charts, steppers and counts.

`Engine.trace` has totals; this keeps who did what. For requests with one sequence each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minipaged.core.request import ParentRequest, Status, StepPlan
from minipaged.engine.engine import Engine

State = Literal["waiting", "prefill", "decode", "preempted", "swapped"]

OUTSIDE: dict[Status, State] = {
    Status.WAITING: "waiting",
    Status.PREEMPTED: "preempted",
    Status.SWAPPED: "swapped",
}


@dataclass(frozen=True)
class Moment:
    """One request in one step."""

    state: State
    tokens: int
    """Tokens computed for it in this step."""
    again: int
    """Those of them that had been computed before, and were given up."""
    stored: int
    """Tokens that its blocks hold, those of this step included."""
    blocks: tuple[int, ...]
    """Its block table; for a swapped request these are blocks of the host's pool."""


@dataclass(frozen=True)
class StepView:
    """One step. `requests` is in order of arrival; those that have finished are no longer there."""

    requests: dict[str, Moment]
    free: int
    """Blocks that nobody holds."""
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]


class Timeline:
    """Watches an engine from now on. A step that raises is not seen."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[StepView] = []
        self.blocks_moved = 0
        """Blocks copied to the host, and those copied back."""
        self._reached: dict[str, int] = {}
        engine.on_step = self._record

    @property
    def computed(self) -> int:
        """Tokens computed in all steps."""
        return sum(moment.tokens for step in self.steps for moment in step.requests.values())

    @property
    def again(self) -> int:
        """Tokens computed a second time, or a third."""
        return sum(moment.again for step in self.steps for moment in step.requests.values())

    @property
    def preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.steps)

    def states(self) -> dict[str, list[State | None]]:
        """Request -> its state in each step; None before it came and after it ended."""
        names = dict.fromkeys(name for step in self.steps for name in step.requests)
        return {
            name: [step.requests[name].state if name in step.requests else None for step in self.steps]
            for name in names
        }

    def _record(self, plan: StepPlan) -> None:
        last = self.steps[-1].requests if self.steps else {}
        for request in plan.admitted:
            moment = last.get(request.request_id)
            if moment is not None and moment.state == "swapped":
                self.blocks_moved += len(moment.blocks)
        self.blocks_moved += sum(
            len(request.table.blocks) for request in plan.preempted if request.status is Status.SWAPPED
        )
        tokens = {
            request.request_id: query_len
            for request, query_len in zip(plan.requests, plan.query_lens, strict=True)
        }
        self.steps.append(
            StepView(
                requests={
                    name: self._moment(request, tokens.get(name, 0))
                    for name, request in self.engine.requests.items()
                },
                free=self.engine.pool.num_free,
                preempted=tuple(request.request_id for request in plan.preempted),
                admitted=tuple(request.request_id for request in plan.admitted),
            )
        )

    def _moment(self, parent: ParentRequest, tokens: int) -> Moment:
        (request,) = parent.samples
        name, start = request.request_id, request.num_computed
        reached = self._reached.get(name, 0)
        again = max(0, min(reached, start + tokens) - start) if tokens else 0
        if tokens:
            self._reached[name] = max(reached, start + tokens)
        state = OUTSIDE.get(request.status)
        if state is None:
            decodes = tokens == 1 and start >= parent.num_prompt_tokens
            state = "decode" if decodes else "prefill"
        return Moment(state, tokens, again, request.table.num_tokens, tuple(request.table.blocks))
