"""A stream of requests through one memory policy, without a model: how much of the KV budget holds tokens?

All requests wait from the start and are admitted first come, first served, as soon as they fit. A step adds
one token to every running request. A request of p prompt and g generated tokens is admitted with p tokens
stored and runs for g steps; its last token is never stored, so it ends with p + g - 1. What is measured is
the average over the steps in which somebody waits: only then is a byte without a token in it a loss.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from coursekit.contiguous import ContiguousArena, Fit, ReservationRule, reserve
from coursekit.waste import WasteReport
from minipaged.memory import blocks_for


@dataclass(frozen=True)
class Traffic:
    """What a policy did with a stream of requests.

    `waste` is in token slots x steps, `request_steps` in requests x steps, both over the `steps` in which
    somebody waited. `preemptions` counts how often a request gave its blocks back, to be admitted again, and
    `recomputed` the tokens that it held then, each of which is computed a second time.
    """

    waste: WasteReport
    steps: int
    request_steps: int
    preemptions: int
    recomputed: int = 0

    @property
    def running(self) -> float:
        """Mean number of requests in memory."""
        return self.request_steps / self.steps

    @property
    def unused_per_request(self) -> float:
        """Mean number of slots that a request has taken and that hold no token."""
        return (self.waste.to_come + self.waste.never + self.waste.internal) / self.request_steps


def contiguous_traffic(
    lengths: np.ndarray, budget_tokens: int, max_len: int, rule: ReservationRule, *, fit: Fit = "first"
) -> Traffic:
    """Serve `lengths`, int [n, 2] of prompt and generated tokens, from strips reserved by `rule`.

    Nothing grows beyond its strip, so only admissions and ends are looked at; the steps between are summed.
    Raises ValueError when a request exceeds `max_len`, or when nobody ever has to wait.
    """
    arena = ContiguousArena(budget_tokens, fit=fit)
    ends: list[tuple[int, int, int, int]] = []  # (last step + 1, start, size, final tokens): a heap
    now = request_steps = stored = final = reserved = 0
    total = WasteReport(0, 0, 0, 0, 0, 0, 0)
    waiting = deque(map(tuple, lengths.tolist()))
    while waiting:
        prompt, generated = waiting[0]
        size = reserve(rule, prompt, generated - 1, max_len)
        start = arena.allocate(size)
        if start is not None:
            waiting.popleft()
            heapq.heappush(ends, (now + generated, start, size, prompt + generated - 1))
            stored, final, reserved = stored + prompt, final + prompt + generated - 1, reserved + size
            continue
        if not ends:
            raise ValueError(f"a request reserves {size} slots, the budget is {budget_tokens}")
        steps, running = ends[0][0] - now, len(ends)
        used = steps * stored + running * steps * (steps - 1) // 2  # every request gains a token a step
        total += WasteReport(
            budget=steps * budget_tokens,
            used=used,
            to_come=steps * final - used,
            never=steps * (reserved - final),
            internal=0,
            external=steps * arena.unusable(size),
            free=0,
        )
        request_steps += steps * running
        now, stored = now + steps, stored + steps * running
        while ends and ends[0][0] == now:
            _, start, size, tokens = heapq.heappop(ends)
            arena.free(start)
            # it gained a token in each of its steps but the last stored none
            stored, final, reserved = stored - tokens - 1, final - tokens, reserved - size
    return _traffic(total, budget_tokens, request_steps, preemptions=0)


def paged_traffic(lengths: np.ndarray, budget_tokens: int, block_size: int) -> Traffic:
    """Serve `lengths`, int [n, 2] of prompt and generated tokens, from blocks taken when a token needs one.

    When a step needs more blocks than are free, the request admitted last gives all of its own back and waits
    at the head of the queue; it returns with the tokens it had (preemption by recomputation).
    Raises ValueError when a request does not fit the budget, or when nobody ever has to wait.
    """
    num_blocks = budget_tokens // block_size
    finals = lengths.sum(axis=1) - 1
    if blocks_for(int(finals.max()), block_size) > num_blocks:
        raise ValueError(f"a request stores {finals.max()} tokens, the budget is {budget_tokens}")
    waiting = deque(zip(lengths[:, 0].tolist(), finals.tolist(), strict=True))  # (tokens to store, final)
    tokens = np.empty(0, dtype=np.int64)  # stored by each running request, in order of admission
    final = np.empty(0, dtype=np.int64)
    total = WasteReport(0, 0, 0, 0, 0, 0, 0)
    request_steps = preemptions = recomputed = 0
    while waiting:
        running = tokens < final
        tokens, final = tokens[running] + 1, final[running]
        held = -(-tokens // block_size)
        free = num_blocks - int(held.sum())
        preempted = free < 0
        while free < 0:
            stored = int(tokens[-1]) - 1  # without the token of this step, which it does not compute
            waiting.appendleft((stored, int(final[-1])))
            recomputed += stored
            free += int(held[-1])
            tokens, final, held = tokens[:-1], final[:-1], held[:-1]
            preemptions += 1
        admitted = []
        while waiting and not preempted and blocks_for(waiting[0][0], block_size) <= free:
            free -= blocks_for(waiting[0][0], block_size)
            admitted.append(waiting.popleft())
        if admitted:
            new = np.array(admitted, dtype=np.int64)
            tokens, final = np.concatenate([tokens, new[:, 0]]), np.concatenate([final, new[:, 1]])
        if waiting:
            used = int(tokens.sum())
            total += WasteReport(
                budget=budget_tokens,
                used=used,
                to_come=0,
                never=0,
                internal=(num_blocks - free) * block_size - used,
                external=budget_tokens - num_blocks * block_size,
                free=free * block_size,
            )
            request_steps += len(tokens)
    return _traffic(total, budget_tokens, request_steps, preemptions, recomputed)


def _traffic(
    total: WasteReport, budget_tokens: int, request_steps: int, preemptions: int, recomputed: int = 0
) -> Traffic:
    if not total.budget:
        raise ValueError(f"a budget of {budget_tokens} tokens holds every request at once: nobody waits")
    return Traffic(total, total.budget // budget_tokens, request_steps, preemptions, recomputed)
