"""A good neighbour: no more threads than the machine is ours for, and those that wait go to sleep.

What OpenMP reads is set before torch is loaded, in each process that serves: commands, lessons, workers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from benchmarks import processes
from minipaged import cgroup, threads

# Says, at the moment when torch begins to load, how it will wait.
WATCH = """
import importlib.abc, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("SEEN", os.environ.get("GOMP_SPINCOUNT"), os.environ.get("KMP_BLOCKTIME"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(f"{text}\n")


def quota(root: Path, *membership: str) -> float | None:
    """What a process in these groups may use."""
    (root / "membership").write_text("".join(f"{line}\n" for line in membership))
    return cgroup.cpu_quota(root, root / "membership")


def test_quota_of_a_container_is_its_time_by_its_period(tmp_path):
    write(tmp_path, max="150000 100000")
    assert quota(tmp_path, "0::/") == 1.5
    assert quota(tmp_path, "0::/docker/0123") == 1.5  # as the host names it: no such folder here
    assert cgroup.cpu_quota(tmp_path, tmp_path / "none") == 1.5


def test_the_tightest_quota_above_a_process_counts(tmp_path):
    write(tmp_path / "user.slice", max="400000 100000")
    write(tmp_path / "user.slice" / "job", max="100000 50000")
    write(tmp_path / "user.slice" / "job" / "step", max="max 100000")
    write(tmp_path / "user.slice" / "other", max="1000 100000")
    assert quota(tmp_path, "0::/user.slice/job/step") == 2
    assert quota(tmp_path, "0::/user.slice") == 4
    assert quota(tmp_path, "0::/") is None


def test_the_quotas_of_version_1_count_as_well(tmp_path):
    write(tmp_path / "cpu" / "job", cfs_quota_us="300000", cfs_period_us="100000")
    write(tmp_path / "cpu", cfs_quota_us="-1", cfs_period_us="100000")  # none
    assert quota(tmp_path, "5:cpu,cpuacct:/job", "4:memory:/", "0::/") == 3
    assert quota(tmp_path, "5:cpu,cpuacct:/", "4:cpuset:/job", "0::/") is None
    write(tmp_path / "cpu", cfs_quota_us="50000", cfs_period_us="100000")
    assert quota(tmp_path, "5:cpu:/docker/0123") == 0.5


@pytest.mark.parametrize("text", ["", "max", "many 100000", "100000 0", "0 100000"])
def test_a_file_that_says_something_else_is_no_limit(tmp_path, text):
    write(tmp_path, max=text)
    assert quota(tmp_path, "0::/") is None


@pytest.mark.parametrize(
    ("pinned", "allowed", "usable"),
    [(16, None, 16), (16, 2.0, 2), (2, 4.0, 2), (16, 1.5, 1), (16, 2.9, 2), (16, 0.2, 1), (1, None, 1)],
)
def test_threads_are_at_most_the_mask_and_the_quota(monkeypatch, pinned, allowed, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(pinned)), raising=False)
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: allowed)
    assert threads.usable_cpus() == usable
    environ: dict[str, str] = {}
    threads.set_defaults(environ)
    # OpenMP sees the mask by itself, and Ray gives workers fewer where nothing is said.
    assert environ.get("OMP_NUM_THREADS") == (str(usable) if usable < pinned else None)


@pytest.mark.parametrize("name", threads.WAITING_NAMES)
def test_what_the_user_has_said_about_waiting_stays_and_nothing_is_added(name):
    environ = {name: "7"}
    assert not threads.set_defaults(environ) & set(threads.WAITING_NAMES)
    assert environ[name] == "7"


def test_a_number_of_threads_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 1.0)
    environ = {"OMP_NUM_THREADS": "5"}
    assert threads.set_defaults(environ) == set(threads.WAITING)
    assert environ["OMP_NUM_THREADS"] == "5"


def start(code: str, *arguments: str, **environ: str) -> str:
    """What a fresh interpreter prints that runs `code` where torch cannot be loaded unseen."""
    kept = {name: value for name, value in os.environ.items() if name not in threads.WAITING_NAMES}
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code, *arguments],
        env=kept | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "SEEN" in done.stdout, done.stderr
    return done.stdout[done.stdout.index("SEEN") :].strip()


EXPECTED = f"SEEN {threads.WAITING['GOMP_SPINCOUNT']} {threads.WAITING['KMP_BLOCKTIME']}"
COMMAND = "import runpy; runpy.run_module('minipaged', run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize(
    ("entry", "code", "arguments"),
    [
        ("a script", "from minipaged import LLM", ()),
        ("doctor", COMMAND, ("doctor",)),
        ("generate", COMMAND, ("generate", "A word")),
        ("chat", COMMAND, ("chat",)),
        ("demo", COMMAND, ("demo", "--quick")),
        ("bench throughput", COMMAND, ("bench", "throughput")),
        ("a lesson", "exec(open('coursekit/publish/first_cell.py').read()); import torch", ()),
        ("a worker of a job", "from minipaged.jobs.cluster import EngineActor; import torch", ()),
        ("our engine in a benchmark", "sys.path.append('benchmarks/engines'); import minipaged_engine", ()),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_how_threads_wait_is_set_before_torch_is_loaded(entry, code, arguments):
    assert start(code, *arguments) == EXPECTED


def test_a_variable_of_the_user_reaches_torch():
    assert start("from minipaged import LLM", OMP_WAIT_POLICY="PASSIVE") == "SEEN None None"
    assert start("from minipaged import LLM", GOMP_SPINCOUNT="7") == "SEEN 7 None"


def test_peers_in_a_benchmark_wait_as_they_are_installed(monkeypatch):
    settings = processes.Settings(threads=1, dtype="float32", preloads=(), foreign_limit=0.1)
    monkeypatch.setattr(threads, "SET_HERE", frozenset({"GOMP_SPINCOUNT"}))
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setenv("KMP_BLOCKTIME", "3")  # by the user: for all
    environ = processes.environment(settings)
    assert "GOMP_SPINCOUNT" not in environ and environ["KMP_BLOCKTIME"] == "3"
