"""A model of a card that runs the programs of a kernel: which multiprocessor runs which, and when.

Each multiprocessor runs one program at a time and reads keys at the same rate as every other; a program goes
to the one that is free first. Real multiprocessors hold several programs at once and share the memory's
bandwidth, so the model tells who has work, not how long it takes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramRun:
    """One program on one multiprocessor; times are in keys read."""

    multiprocessor: int
    start: int
    stop: int


def run_programs(num_keys: Sequence[int], num_multiprocessors: int) -> list[ProgramRun]:
    """Give each program, in order, to the multiprocessor that is free first.

    Args:
        num_keys: keys that each program reads; programs without keys end at once and are left out.
        num_multiprocessors: of the card.
    """
    free = [(0, index) for index in range(num_multiprocessors)]
    runs = []
    for keys in filter(None, num_keys):
        start, index = heapq.heappop(free)
        runs.append(ProgramRun(index, start, start + keys))
        heapq.heappush(free, (start + keys, index))
    return runs


def busy_share(runs: Sequence[ProgramRun], num_multiprocessors: int) -> float:
    """Share of all multiprocessors' time, until the last program ends, in which they had work; 0 … 1."""
    end = max((run.stop for run in runs), default=0)
    work = sum(run.stop - run.start for run in runs)
    return work / (end * num_multiprocessors) if end else 0.0


def decode_programs(context_lens: Sequence[int], num_kv_heads: int, part_len: int) -> list[int]:
    """Keys of each program of a decode step: one per KV head, sequence and part of `part_len` keys.

    With `part_len` at least as long as the longest context every sequence is one part, as without a split.
    """
    parts = -(-max(context_lens, default=0) // part_len)
    return [
        max(0, min(part_len, context - part * part_len))
        for part in range(parts)
        for context in context_lens
        for _ in range(num_kv_heads)
    ]
