"""What is left of the requests when a step is cut short: their tokens. All else is computed again.

An error or Ctrl-C may come in the middle of planning or committing, so no queue, row or table is believed.
"""

from __future__ import annotations

from collections.abc import Collection

from minipaged.cache import BlockTable
from minipaged.core.request import Request, Sequence, Status
from minipaged.core.scheduler import Scheduler


def start_over(requests: Collection[Request], scheduler: Scheduler) -> list[Request]:
    """Let every unfinished request wait, in the order given and holding nothing; returns those that ended.

    requests: all that the scheduler may know. Cached prefixes stay, unless the pool's books are wrong too.
    """
    manager = scheduler.manager
    manager.take_all_back([s.table for r in requests for s in r.sequences])
    scheduler.running.clear()
    scheduler.waiting.clear()
    ended = []
    for request in requests:
        for sequence in request.sequences:
            sequence.table = BlockTable(manager.pool, manager.block_size)
            keep_tokens(sequence)
        request.live = [s for s in request.sequences if s.output.finish_reason is None]
        request.start_over()
        if not request.live:
            request.active, request.status = request.live, Status.FINISHED
            ended.append(request)
            continue
        if request.status is Status.RUNNING:
            request.metrics.num_preemptions += 1
            scheduler.stats.num_recomputes += 1
        if request.status is not Status.WAITING:
            request.status = Status.PREEMPTED
        scheduler.waiting.append(request)
    return ended


def keep_tokens(sequence: Sequence) -> None:
    """Make all that a sequence knows of its output agree with the output's tokens."""
    output = sequence.output
    is_open = output.finish_reason in (None, "length")  # the latter gives way to a stop string
    if output.token_ids and is_open:
        output.check_end()
    sequence.tokens[sequence.request.num_prompt_tokens :] = output.token_ids
    sequence.num_computed, sequence.row, sequence.row_blocks, sequence.hashes = 0, -1, 0, []
    if sequence.logprobs is not None:  # a token's entry comes before the token
        del sequence.logprobs[len(output.token_ids) :]
        chosen = [next(iter(entry.values())).logprob for entry in sequence.logprobs]
        sequence.cumulative_logprob = sum(chosen) if chosen else None
