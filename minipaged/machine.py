"""What this machine has: the facts that `minipaged doctor` prints and that commands check before they start.

Importing this module imports neither torch nor triton.
"""

import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from minipaged import cgroup, threads
from minipaged.cpu.build import find_compiler

if TYPE_CHECKING:
    import torch

MIB = 2**20
DEFAULT_MODEL = "smollm2-135m"
# Peak of a process that serves it, rounded up: torch itself, the weights twice while they load, the cache.
SERVING_MEMORY = 2048 * MIB
# Limit, memory taken, and what of it is file cache, in version 2 and version 1 of Linux's control groups.
CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
NO_LIMIT = 2**62  # version 1 has no word for it, only a number that no machine reaches


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; `capability` is CUDA's, for example (9, 0). `memory` in bytes.

    `bfloat16` says whether it has matrix units for that format.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bfloat16: bool


@dataclass(frozen=True)
class Machine:
    """Facts about this machine. A version is None where the package is missing. Memory is in bytes."""

    system: str
    python: str
    torch: str | None
    torch_error: str | None
    triton: str | None
    gpu: Gpu | None
    cpu_bfloat16: bool
    cores: int
    cpu_quota: float | None
    """Processors whose full time the container may use; None without a limit."""
    threads: int | None
    """That torch and our kernels use."""
    waiting: dict[str, str]
    """The environment variables that say how threads wait."""
    busy_share: float
    """Of all processors' time, what other programs take just now, 0 … 1."""
    compiler: str | None
    total_memory: int
    available_memory: int
    model_file: str | None
    jupyterlab: str | None
    ipywidgets: str | None
    matplotlib: str | None
    pytest: str | None
    nbval: str | None
    products: tuple[str, ...]
    """What serves the CPU's matrix products, a line a dtype, with the figures that say why."""


def version(package: str) -> str | None:
    """Installed version of a distribution, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cgroup_available(root: Path = cgroup.ROOT, membership: Path = cgroup.MEMBERSHIP) -> int | None:
    """Bytes this process may still take under the memory limits of its control groups; None without a limit.

    psutil sees the host's memory, not what a container, a batch system or systemd allows.
    """
    folders = cgroup.folders("memory", root, membership)
    found = [available for folder in folders if (available := _left_in_group(folder)) is not None]
    return min(found, default=None)


def _left_in_group(folder: Path) -> int | None:
    """Bytes left under the limit of one control group; None where it has none.

    File cache counts as used but is given back under pressure, also what was read more than once ("active"),
    so it is added again.
    """
    for limit_file, used_file, caches in CGROUP_FILES:
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max" and int(limit) < NO_LIMIT:
                return max(0, int(limit) - used + sum(int(statistics.get(name, 0)) for name in caches))
        except (OSError, ValueError):
            continue
    return None


def available_memory() -> int:
    """Bytes that a process started now can take without swapping."""
    limits = (int(psutil.virtual_memory().available), cgroup_available(), addresses_left())
    return min(limit for limit in limits if limit is not None)


def addresses_left() -> int | None:
    """Bytes of address space that `ulimit -v` or a batch system leave this process; None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def gpu_memory(device: "torch.device") -> tuple[int, int]:
    """(free, total) bytes of a GPU. Imports torch."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def find_device(device: "str | torch.device") -> "torch.device":
    """What "auto" means: the GPU where torch sees one, else the CPU. Imports torch.

    Raises ValueError for a device that is not there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}, give 'auto', 'cpu' or 'cuda'") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {str(found)!r}, torch sees {torch.cuda.device_count()} GPUs here")
    return found


def require_memory(needed: int, purpose: str) -> None:
    """Raise MemoryError, with both numbers, if fewer than `needed` bytes are available for `purpose`."""
    available = available_memory()
    if available < needed:
        raise MemoryError(
            f"{purpose} needs about {needed // MIB} MiB of free memory, {available // MIB} MiB are free: "
            "close other programs, or give the container or virtual machine more."
        )


def busy_seconds() -> float:
    """Processor seconds that the whole machine has spent on anything but waiting, since it started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def busy_share(seconds: float = 0.2) -> float:
    """Share of all processors' time that is used while this process sleeps, 0 … 1."""
    before = busy_seconds()
    start = time.monotonic()
    time.sleep(seconds)
    used = (busy_seconds() - before) / (time.monotonic() - start)
    return min(1.0, max(0.0, used / (psutil.cpu_count() or 1)))


def torch_threads() -> int:
    """Threads of a step on the CPU. Imports torch."""
    import torch

    return torch.get_num_threads()


def find_model_file() -> str | None:
    """Where the default model lies, None if it is not installed. Imports torch."""
    from minipaged.checkpoints.loading import ModelLoadError, find_model

    try:
        return str(find_model(DEFAULT_MODEL))
    except ModelLoadError:
        return None


def torch_facts() -> tuple[str | None, Gpu | None, bool]:
    """(error, GPU, CPU has bfloat16 products). Imports torch, which takes a second or two."""
    try:
        import torch

        from minipaged.dtypes import cpu_has_bfloat16, gpu_has_bfloat16
    except Exception as error:  # a broken wheel raises OSError and worse, not only ImportError
        return f"{type(error).__name__}: {error}", None, False
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        gpu = Gpu(properties.name, capability, properties.total_memory, gpu_has_bfloat16(0))
    return None, gpu, cpu_has_bfloat16()


def cpu_products() -> tuple[str, ...]:
    """Which products of a CPU are the fastest here; empty without kernels of our own. Imports torch.

    Where the kernels have not been built or nothing has been measured yet, both happen now.
    """
    from minipaged.cpu import kernels

    try:
        found = kernels.load()
    except ValueError as error:  # an environment variable that names what is not there
        return (str(error),)
    return () if found is None else tuple(found.choice.lines())


def inspect() -> Machine:
    """Collect the facts."""
    torch_error, gpu, cpu_bfloat16 = torch_facts()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=sys.version.split()[0],
        torch=version("torch"),
        torch_error=torch_error,
        triton=version("triton") or version("triton-windows"),
        gpu=gpu,
        cpu_bfloat16=cpu_bfloat16,
        cores=threads.pinned_cpus(),
        cpu_quota=cgroup.cpu_quota(),
        threads=None if torch_error else torch_threads(),
        waiting=threads.waiting(os.environ),
        busy_share=busy_share(),
        compiler=find_compiler(),
        total_memory=int(psutil.virtual_memory().total),
        available_memory=available_memory(),
        model_file=None if torch_error else find_model_file(),
        jupyterlab=version("jupyterlab"),
        ipywidgets=version("ipywidgets"),
        matplotlib=version("matplotlib"),
        pytest=version("pytest"),
        nbval=version("nbval"),
        products=() if torch_error else cpu_products(),
    )
