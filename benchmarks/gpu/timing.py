"""Timing device work: warmed up, many samples, medians, and alternatives sampled in turn.

Each call takes the index of an input set, and a sample goes through all of them: sets that together are far
larger than the cache, so that no call finds its inputs there. On a GPU a sample is one replay of a captured
graph, which leaves the launches' cost on the host out; a call that cannot be captured is timed between events
instead.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[int], Any]
WARM_UP, FEWEST, MOST = 3, 10, 60


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, and the quartiles on either side of it."""

    median: float
    low: float
    high: float
    samples: int
    how: str  # "graph", "events" or "host clock"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(seconds: list[float], how: str) -> Timing:
    """The timing that a list of samples amounts to."""
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return Timing(median, low, high, len(seconds), how)


class Sampler:
    """Takes samples of one call: `sample()` gives seconds per call."""

    def __init__(self, call: Call, num_sets: int, device: torch.device) -> None:
        self.call, self.num_sets, self.device = call, num_sets, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.how = "host clock"
        for _ in range(WARM_UP if device.type == "cuda" else 1):
            self._run_all()
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.how = "graph" if self._capture() else "events"

    def _run_all(self) -> None:
        for index in range(self.num_sets):
            self.call(index)

    def _capture(self) -> bool:
        """Capture one pass over the sets; False if the call does something a graph cannot hold."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._run_all()
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        self.graph = graph
        return True

    def sample(self) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            self._run_all()
            return (time.perf_counter() - start) / self.num_sets
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run_all()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / self.num_sets


def compare(calls: dict[str, Call], num_sets: int, device: torch.device, seconds: float) -> dict[str, Timing]:
    """Time calls against each other, one sample of each in turn, for about `seconds`.

    A card's clocks drift; taking turns lets the drift meet all alternatives alike.
    """
    samplers = {name: Sampler(call, num_sets, device) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    fewest = FEWEST if device.type == "cuda" else 1
    deadline = time.perf_counter() + seconds
    for count in range(MOST):
        if count >= fewest and (device.type != "cuda" or time.perf_counter() > deadline):
            break
        for name, sampler in samplers.items():
            found[name].append(sampler.sample())
    return {name: summarise(samples, samplers[name].how) for name, samples in found.items()}


def copy_bandwidth(device: torch.device, num_bytes: int, seconds: float) -> tuple[float, Timing]:
    """Bytes per second of a device-to-device copy, each byte counted once read and once written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = compare({"copy": lambda _: target.copy_(source)}, 1, device, seconds)["copy"]
    return 2 * num_bytes / timing.median, timing


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype, seconds: float) -> tuple[float, Timing]:
    """Operations per second of one large square product of random matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    timing = compare({"matmul": lambda _: torch.mm(a, b, out=out)}, 1, device, seconds)["matmul"]
    return 2 * size**3 / timing.median, timing
