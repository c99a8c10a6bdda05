"""How many threads work, and how those wait that have nothing to do, so that other programs are not slowed.

OpenMP runs the threads of torch and of our own kernels. It reads environment variables once, when torch loads
it, so they are set on the first import of minipaged. That has to come before torch's; if it comes after, they
hold only for the processes that this one starts. What the user has set stays as it is.

Only the standard library is imported here.
"""

import math
import os
from collections.abc import Mapping, MutableMapping

from minipaged import cgroup

# A waiting thread first spins: it looks again and again whether the others are done. Then it sleeps until it
# is woken, which takes some 50 us. A spinning thread notices at once, but keeps the processor from those who
# would work, on a busy machine often from the very thread it waits for: by default for some 10 ms each time.
# benchmarks/NOTES.md has what was measured.
WAITING = {
    "GOMP_SPINCOUNT": "1000",  # GNU's OpenMP, which torch brings on Linux: times it looks, some 40 us
    "KMP_BLOCKTIME": "1",  # LLVM's and Intel's, elsewhere: ms, in which it lets others run
}
WAITING_NAMES = (*WAITING, "OMP_WAIT_POLICY")


def usable_cpus() -> int:
    """Processors that this process may keep busy: those it is pinned to, and no more than its quota pays for.

    At least 1. Of a quota of 1.5 processors a second thread would be stopped half of the time, and the first
    would wait for it, so fractions do not count.
    """
    quota = cgroup.cpu_quota()
    return pinned_cpus() if quota is None else max(1, min(pinned_cpus(), math.floor(quota)))


def pinned_cpus() -> int:
    """Processors that the system may run this process on; fewer than the machine has if it is pinned."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_defaults(environ: MutableMapping[str, str]) -> frozenset[str]:
    """Set what OpenMP is to read, unless it is set; returns the names that were set."""
    before = set(environ)
    if not before.intersection(WAITING_NAMES):
        environ.update(WAITING)
    if usable_cpus() < pinned_cpus():  # OpenMP knows of pinning, not of quotas
        environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    return frozenset(set(environ) - before)


def waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables about waiting that are set, by us or by the user."""
    return {name: environ[name] for name in WAITING_NAMES if name in environ}


SET_HERE = set_defaults(os.environ)
"""The variables that this process has by our choice, not by its user's: others' programs get them removed."""
