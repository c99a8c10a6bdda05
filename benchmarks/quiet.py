"""Whether the machine was quiet while something was measured, and how much memory it took.

A figure taken beside other work says nothing: with two threads, one stall of either holds both. So the
processor time of everything else is counted along with every measurement, and one during which it was more
than a tenth of the machine is taken again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from minipaged.machine import busy_seconds

FOREIGN_LIMIT = 0.10
TRIES = 5

T = TypeVar("T")


class NotQuietError(RuntimeError):
    """Others worked during every try."""

    def __init__(self, shares: Sequence[float], limit: float) -> None:
        used = ", ".join(f"{share:.0%}" for share in shares)
        super().__init__(
            f"others used {used} of the processors in {len(shares)} tries, at most {limit:.0%} are allowed"
        )


@dataclass(frozen=True)
class Reading:
    """Counters at one moment. Seconds; `at` is time.monotonic(): the time of day may be set back."""

    at: float
    busy: float
    """Processor seconds of the whole machine since it started."""
    own: float
    """Processor seconds of the process that is measured, with its children."""


def foreign_share(first: Reading, last: Reading, cores: int) -> float:
    """Share of all processors' time that others used between two readings, 0 … 1."""
    elapsed = last.at - first.at
    if elapsed <= 0:
        raise ValueError(f"the readings are {elapsed} s apart, more than 0 are needed")
    foreign = (last.busy - first.busy) - (last.own - first.own)
    return min(max(foreign / (elapsed * cores), 0.0), 1.0)


def read_tree(root: psutil.Process) -> Reading:
    """Raises psutil.Error if the process has ended."""
    own = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
    return Reading(time.monotonic(), busy_seconds(), own)


def peak_memory(root: psutil.Process) -> int:
    """Most bytes that a process and its children have held since each started; the sum of their own peaks.

    Memory that processes share counts once (proportional set size). Linux only.
    """
    return sum(_peak(process) for process in [root, *root.children(recursive=True)])


def _peak(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        held = process.memory_full_info().pss
    except (OSError, psutil.NoSuchProcess):
        return 0  # it has just ended
    status = dict(line.split(":", 1) for line in lines)
    peak, now = (int(status[key].split()[0]) * 1024 for key in ("VmHWM", "VmRSS"))  # the kernel says kB
    return held + peak - now


def when_quiet(measure: Callable[[], T], limit: float = FOREIGN_LIMIT) -> tuple[T, float]:
    """Measure in this process until others used at most `limit` of the processors: (result, their share).

    Raises NotQuietError after `TRIES` tries.
    """
    own = psutil.Process()
    shares = []
    for _ in range(TRIES):
        first = read_tree(own)
        result = measure()
        shares.append(foreign_share(first, read_tree(own), psutil.cpu_count() or 1))
        if shares[-1] <= limit:
            return result, shares[-1]
    raise NotQuietError(shares, limit)
