"""Start the engines that are compared, each in a process of its own, and take samples of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engines.common import READY, RESULT
from benchmarks.mixes import Mix
from benchmarks.quiet import FOREIGN_LIMIT, TRIES, NotQuietError, foreign_share, peak_memory, read_tree
from minipaged import threads
from minipaged.machine import torch_facts

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
MODEL = PEERS / "smollm2-135m"
PRELOADS = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # what vLLM recommends; every engine gets those found
STOP_SECONDS = 60  # to obey a stop signal in: it takes microseconds, on a busy machine a little longer
KV_BYTES, MAX_LEN = 1 << 30, 2048  # the same for all: no mix needs more


@dataclass(frozen=True)
class Engine:
    """How to start an engine. script: in benchmarks/engines; every: 2 to take part in every second round.

    environ: variables of its own.
    """

    name: str
    script: str
    python: Path
    option: str = ""
    every: int = 1
    environ: tuple[tuple[str, str], ...] = ()


OURS = Path(sys.executable)
VLLM = PEERS / "vllm" / "bin" / "python"
SPINNING = (("GOMP_SPINCOUNT", "300000"), ("KMP_BLOCKTIME", "200"))  # OpenMP's own defaults
# transformers is several times slower and far from any limit: it takes part in every second round.
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("minipaged", "minipaged_engine.py", OURS),
        Engine("minipaged-spinning", "minipaged_engine.py", OURS, environ=SPINNING),
        Engine("minipaged-torch", "minipaged_engine.py", OURS, "torch"),
        Engine("vllm", "vllm_engine.py", VLLM, "compiled"),
        Engine("vllm-eager", "vllm_engine.py", VLLM, "eager"),
        Engine("transformers", "transformers_engine.py", OURS, "static", every=2),
        Engine("transformers-cb", "transformers_engine.py", OURS, "continuous", every=2),
    )
}


@dataclass(frozen=True)
class Settings:
    """What all engines of a comparison share."""

    threads: int
    dtype: str
    preloads: tuple[str, ...]
    foreign_limit: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `settings_from`."""
    parser.add_argument("--threads", type=int, default=threads.usable_cpus(), help="default: all cores")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="default: bfloat16 where the processor multiplies it, which is faster for every engine",
    )
    parser.add_argument(
        "--no-preload", action="store_true", help="as installed: without tcmalloc and libiomp5"
    )
    parser.add_argument(
        "--foreign-limit",
        type=float,
        default=FOREIGN_LIMIT,
        help=f"share of the processors that others may use during a sample (default: {FOREIGN_LIMIT})",
    )


def settings_from(args: argparse.Namespace) -> Settings:
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if torch_facts()[2] else "float32"
    preloads = () if args.no_preload else find_preloads()
    return Settings(args.threads, dtype, preloads, args.foreign_limit)


def find_preloads() -> tuple[str, ...]:
    """The recommended libraries that are on this machine: Debian's tcmalloc, intel-openmp's libiomp5."""
    folders = [Path("/usr/lib/x86_64-linux-gnu"), PEERS / "vllm" / "lib", OURS.parent.parent / "lib"]
    found = [path for name in PRELOADS for folder in folders for path in sorted(folder.glob(name))[:1]]
    return tuple(dict.fromkeys(map(str, found)))


def installed(names: Sequence[str]) -> list[Engine]:
    """The engines of these names that can run here; the others are named on stderr."""
    engines = []
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"no engine {name!r}; there are {', '.join(ENGINES)}")
        if ENGINES[name].python.exists():
            engines.append(ENGINES[name])
        else:
            print(f"{name} is skipped: `make peers` installs it", file=sys.stderr)
    return engines


def export_model() -> None:
    """Write the model as the one folder that every engine reads; a second call does nothing."""
    subprocess.run([sys.executable, ROOT / "benchmarks" / "peers" / "export_model.py", MODEL], check=True)


def environment(settings: Settings) -> dict[str, str]:
    """Of an engine. What importing minipaged has set here is left out: peers run as they are installed."""
    inherited = {name: value for name, value in os.environ.items() if name not in threads.SET_HERE}
    return inherited | {
        "OMP_NUM_THREADS": str(settings.threads),
        "LD_PRELOAD": ":".join(settings.preloads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


class RunningEngine:
    """An engine that is loaded and waits; between samples its processes are stopped and cost nothing."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Load. Raises RuntimeError with the end of its output if the engine does not start."""
        self.engine, self.settings = engine, settings
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        command = [
            str(engine.python), str(ROOT / "benchmarks" / "engines" / engine.script), "--model", str(MODEL),
            "--dtype", settings.dtype, "--threads", str(settings.threads),
            "--kv-bytes", str(KV_BYTES), "--max-len", str(MAX_LEN), "--option", engine.option,
        ]  # fmt: skip
        self._child = subprocess.Popen(
            command,
            env=environment(settings) | dict(engine.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,  # if we are killed, the system wakes and ends a stopped group of its own
        )
        self._root = psutil.Process(self._child.pid)
        self._wait_for(READY)
        self._each(stop)

    def sample(self, name: str, mix: Mix) -> dict[str, Any]:
        """`serve`, again until the machine is quiet meanwhile.

        Raises RuntimeError if the engine fails, NotQuietError if the machine is never quiet.
        """
        shares = []
        for _ in range(TRIES):
            result = self.serve(mix)
            share = result["foreign_share"]
            if share <= self.settings.foreign_limit:
                return result
            print(f"  {self.engine.name}, {name}: others used {share:.0%}, thrown away", file=sys.stderr)
            shares.append(share)
        raise NotQuietError(shares, self.settings.foreign_limit)

    def serve(self, mix: Mix) -> dict[str, Any]:
        """Serve a mix, whatever else runs: what common.result_of says and more.

        `foreign_share` is what others used of the processors, `cpu_seconds` what the engine did (warming up
        included), `peak_mib` the most memory it has held. Raises RuntimeError if it fails.
        """
        self._each(psutil.Process.resume)
        try:
            first = read_tree(self._root)
            print(json.dumps(mix), file=self._child.stdin, flush=True)
            result = json.loads(self._wait_for(RESULT))
            last = read_tree(self._root)
            return result | {
                "foreign_share": foreign_share(first, last, psutil.cpu_count() or 1),
                "cpu_seconds": last.own - first.own,
                "peak_mib": peak_memory(self._root) // 2**20,
            }
        finally:
            self._each(stop)

    def close(self) -> None:
        """End it; its memory is free afterwards."""
        self._each(psutil.Process.resume)
        self._each(psutil.Process.terminate)
        self._child.communicate()
        self._errors.close()

    def _each(self, action: Callable[[psutil.Process], None]) -> None:
        """Do something to the process and its children; one that has ended is passed over."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    action(process)

    def _wait_for(self, start: str) -> str:
        """The rest of the next line of its output that begins with `start`."""
        for line in self._child.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        self._errors.seek(0)
        status = self._child.wait()
        raise RuntimeError(f"{self.engine.name} ended with {status}: {self._errors.read().strip()[-2000:]}")


def stop(process: psutil.Process) -> None:
    """Suspend it and wait until it is: a signal is sent at once and obeyed a little later.

    Raises TimeoutError if it still runs after `STOP_SECONDS`.
    """
    process.suspend()
    deadline = time.monotonic() + STOP_SECONDS
    while (status := process.status()) not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process.pid} is {status}, {STOP_SECONDS} s after the stop signal")
        time.sleep(0.001)


@contextmanager
def started(engines: Sequence[Engine], settings: Settings) -> Iterator[dict[str, RunningEngine]]:
    """Load engines one after the other. One that fails is named on stderr and left out.

    Meanwhile SIGTERM ends this process by SystemExit, so that `finally` ends theirs.
    """
    running: dict[str, RunningEngine] = {}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        for engine in engines:
            try:
                running[engine.name] = RunningEngine(engine, settings)
            except RuntimeError as error:
                print(f"  {error}", file=sys.stderr)
        yield running
    finally:
        for engine in running.values():
            engine.close()
        signal.signal(signal.SIGTERM, before)
