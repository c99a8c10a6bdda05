"""Many engines for one job, on this machine or on a cluster, through Ray Data.

Every worker is a Ray actor with a whole model (data parallelism); it takes a batch of tasks, serves it and
gives the results back. When a worker dies, Ray starts another one, and what it had not finished is served
again. The process that started the job is the only one that writes: see `results.py`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from minipaged import threads
from minipaged.engine.args import EngineArgs
from minipaged.extras import how_to_install
from minipaged.jobs.batch import JobError
from minipaged.jobs.lines import Task

OBJECT_STORE = 256 * 2**20  # bytes: a local cluster only carries text


class EngineActor:
    """What runs in a worker process: loads an engine once, then serves batch after batch."""

    def __init__(self, engine_args: EngineArgs) -> None:
        from minipaged.jobs.worker import Worker

        self._worker = Worker.load(engine_args)

    def __call__(self, batch: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """A column of tasks to a column of results, both as JSON: Ray keeps tables, not objects."""
        tasks = [Task(**json.loads(text)) for text in batch["task"]]
        return {"result": [json.dumps(result) for result in self._worker.run(tasks)]}


@contextmanager
def ray_cluster(num_workers: int, *, device: str = "auto", address: str | None = None) -> Iterator[int]:
    """A cluster with room for `num_workers`; gives the number of GPUs that a worker gets, 0 or 1.

    device: what the workers' engines ask for; "auto" takes GPUs where the cluster has any.
    address: of a cluster that runs ("auto" finds the one that `ray start` began on this machine), else what
        RAY_ADDRESS says, else one is started here and ended afterwards, with all its files.

    Raises ImportError without Ray, ConnectionError where no cluster answers, ValueError for too small a one.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: nothing is sent anywhere
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what matters comes back as an exception
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"many workers need Ray: {how_to_install('scale')} ({error})") from error

    if "OMP_NUM_THREADS" in threads.SET_HERE:  # workers inherit it, and Ray gives each of them fewer
        os.environ.pop("OMP_NUM_THREADS", None)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = address or os.environ.get("RAY_ADDRESS")
    # A folder of its own: Ray leaves its logs behind. Not below TMPDIR, as a socket's path must be short.
    short = "/tmp" if os.name == "posix" else None
    with tempfile.TemporaryDirectory(prefix="ray-", dir=short, ignore_cleanup_errors=True) as folder:
        if address is None:
            options |= {"num_cpus": max(num_workers, threads.usable_cpus()), "_temp_dir": folder}
            options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        else:
            _require_answer(address)
        try:
            ray.init(address or "local", **options)
            yield _gpus_per_worker(ray.cluster_resources(), num_workers, device)
        finally:
            ray.shutdown()


def _require_answer(address: str) -> None:
    """ConnectionError unless somebody listens at host:port; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from error


def _gpus_per_worker(resources: Mapping[str, float], num_workers: int, device: str) -> int:
    """0 or 1. Ray would wait for ever for a machine that does not exist, so this asks whether all have
    room."""
    gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
    kind, room = ("GPUs", gpus) if gpus else ("CPUs", int(resources.get("CPU", 0)))
    if room < num_workers:
        raise ValueError(f"{num_workers} workers take one of the cluster's {kind} each, it has {room}")
    return 1 if gpus else 0


def serve_on_ray(
    tasks: Iterable[Task],
    engine_args: EngineArgs,
    *,
    num_workers: int,
    address: str | None = None,
    batch_size: int = 64,
    actor: type = EngineActor,
) -> Iterator[dict[str, Any]]:
    """Serve the tasks on `num_workers` engines of a `ray_cluster`; results as they finish.

    All tasks are held in memory. batch_size: tasks that a worker takes at once, and that are served again
    when it dies; fewer where there would not be a batch for each worker. Larger ones keep its engine fuller.

    Raises JobError when a worker cannot start, or fails by an exception and not by dying.
    """
    rows = [{"task": json.dumps(asdict(task))} for task in tasks]
    if not rows:
        return
    num_workers = min(num_workers, len(rows))
    batch_size = min(batch_size, -(-len(rows) // num_workers))
    with ray_cluster(num_workers, device=str(engine_args.device), address=address) as num_gpus:
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # we raise what it would print
        # A block is a batch: one that is lost, is lost alone.
        dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // batch_size))
        served = dataset.map_batches(
            actor,
            fn_constructor_args=(engine_args,),
            batch_size=batch_size,
            compute=ActorPoolStrategy(size=num_workers),
            num_cpus=0 if num_gpus else 1,
            num_gpus=num_gpus,
        )
        try:
            for row in served.iter_rows():
                yield json.loads(row["result"])
        except ray.exceptions.RayError as error:
            raise JobError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from error
