"""The job on a cluster. A cluster of two workers takes some twenty seconds to start and end, so one test
holds what needs one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from minipaged.engine.args import EngineArgs
from minipaged.jobs.batch import run_job
from minipaged.jobs.cluster import EngineActor, _gpus_per_worker, ray_cluster, serve_on_ray
from minipaged.jobs.worker import serve_here
from tests.jobs.tiny_jobs import JOB, engine_args, prompts, read, write

ray = pytest.importorskip("ray", reason="ray is not installed: make scale")
pytestmark = pytest.mark.extra


def mortal_actor(folder: Path) -> type:
    """Workers of which one dies in the middle of a batch, once. Ray carries the code of a class that is made
    here, and finds what it needs of this file only inside it. The first to start waits for the second, which
    on a busy machine would find nothing left to do."""

    class MortalActor(EngineActor):
        def __call__(self, batch):
            (folder / f"pid-{os.getpid()}").touch()
            while len(list(folder.glob("pid-*"))) < 2:
                time.sleep(0.01)
            tasks = list(batch["task"])
            if json.loads(tasks[0])["line"] > 24:
                try:
                    (folder / "killed").touch(exist_ok=False)
                except FileExistsError:
                    pass  # one has died
                else:
                    super().__call__({"task": tasks[:3]})  # done, and lost with it
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    return MortalActor


def test_two_workers_one_killed_half_way_answer_each_line_once_as_one_process_does(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # else it kills workers where memory is short
    settings = engine_args(tmp_path)
    source = write(tmp_path / "in", [*prompts(20), "no object", *prompts(48)[20:]])

    def on_ray(tasks):
        return serve_on_ray(tasks, settings, num_workers=2, batch_size=6, actor=mortal_actor(tmp_path))

    summary = run_job(source, tmp_path / "out", on_ray, JOB, chunk=4)
    assert (summary.answered, summary.failed) == (48, 1)
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("pid-*"))) == 3  # two, and the one that came instead
    run_job(source, tmp_path / "one", lambda tasks: serve_here(tasks, settings), JOB)
    assert read(tmp_path / "out") == read(tmp_path / "one")
    assert [r["id"] for r in read(tmp_path / "out") if r["id"]] == [f"r{n}" for n in range(48)]
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("resources", "device", "each"),
    [({"CPU": 2}, "auto", 0), ({"CPU": 8, "GPU": 2}, "auto", 1), ({"CPU": 2, "GPU": 1}, "cpu", 0)],
)
def test_a_worker_gets_a_gpu_where_there_are_any(resources, device, each):
    assert _gpus_per_worker(resources, 2, device) == each


@pytest.mark.parametrize("resources", [{}, {"CPU": 2.0}, {"CPU": 64, "GPU": 2}])
def test_more_workers_than_the_cluster_has_room_for_are_refused(resources):
    with pytest.raises(ValueError, match=r"3 workers take one of the cluster's [CG]PUs each, it has [02]"):
        _gpus_per_worker(resources, 3, "auto")


def test_a_cluster_that_does_not_answer_is_said_at_once():
    with (
        pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: "),
        ray_cluster(2, address="127.0.0.1:1"),
    ):
        pass


def test_no_task_starts_no_cluster(monkeypatch):
    monkeypatch.setattr(ray, "init", None)
    assert list(serve_on_ray([], EngineArgs(), num_workers=2)) == []
