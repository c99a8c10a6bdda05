"""Linux's control groups, version 1 and 2: what a container, a batch system or systemd lets a process use.

A limit holds for all groups below it, so the tightest from the process's own group up to the root counts.
Only the standard library is imported: this runs before torch is loaded.
"""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> set[Path]:
    """The groups of this process whose files for `controller` ("cpu", "memory") count, those above included.

    Some of them may not exist: a container sees its own group as the root, whatever the host calls it.
    """
    found = {root, root / controller}  # where version 2 and version 1 begin
    try:
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                # Version 1 has a hierarchy for each controller; where two share one, each name leads there.
                own = (root / controller if controllers else root) / path.lstrip("/")
                found.update((own, *own.parents))
    except (OSError, ValueError):
        pass  # a system without control groups
    return found


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Processors whose full time this process may use, 1.5 for one and a half; None without a limit."""
    quotas = (_quota(folder) for folder in folders("cpu", root, membership))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """The limit of one group. Version 2 writes "max" for none, version 1 -1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
