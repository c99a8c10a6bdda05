"""Every engine on the same requests, side by side in one run: output tokens per second, TTFT and memory.

    python benchmarks/throughput.py                        what is installed, both mixes
    python benchmarks/throughput.py --engines minipaged,vllm --mix chat48 --repeat 5
    make peers                                             installs vLLM's CPU build in .peers/

Each sample is a process of its own, under the engine's own interpreter; the engines take turns, so a machine
that slows down slows all of them. All requests arrive at once and run to their exact length. A sample during
which other processes used more than 10 % of the processor is thrown away and taken again.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from minipaged.machine import busy_seconds

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
MIXES = ROOT / "minipaged" / "workloads"
PRELOADS = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # what vLLM recommends; every engine gets those found
FOREIGN_SHARE = 0.10
TRIES = 5


@dataclass(frozen=True)
class Engine:
    """How to start one engine. `script` is in benchmarks/engines."""

    name: str
    script: str
    python: Path
    option: str = ""
    dtype: str = "bfloat16"


OURS = Path(sys.executable)
VLLM = PEERS / "vllm" / "bin" / "python"
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("minipaged", "minipaged_engine.py", OURS),
        Engine("minipaged-torch", "minipaged_engine.py", OURS, "torch"),
        Engine("minipaged-float32", "minipaged_engine.py", OURS, dtype="float32"),
        Engine("transformers", "transformers_engine.py", OURS, "static"),
        Engine("transformers-cb", "transformers_engine.py", OURS, "continuous"),
        Engine("vllm", "vllm_engine.py", VLLM, "compiled"),
        Engine("vllm-eager", "vllm_engine.py", VLLM, "eager"),
    )
}


def find_preloads() -> list[str]:
    """The recommended libraries that are on this machine: Debian's tcmalloc, intel-openmp's libiomp5."""
    folders = [Path("/usr/lib/x86_64-linux-gnu"), PEERS / "vllm" / "lib", OURS.parent.parent / "lib"]
    found = [path for name in PRELOADS for folder in folders for path in sorted(folder.glob(name))[:1]]
    return list(dict.fromkeys(map(str, found)))


def environment(threads: int, preloads: list[str]) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": ":".join(preloads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def run_watched(command: list[str], env: dict[str, str]) -> tuple[int, str, str, int]:
    """Run to the end: exit status, stdout, stderr, and the peak memory of its process tree in bytes.

    Memory that processes share counts once (proportional set size), looked at four times a second.
    """
    peak = 0
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        while True:
            try:
                out, err = child.communicate(timeout=0.25)
                return child.returncode, out, err, peak
            except subprocess.TimeoutExpired:
                peak = max(peak, tree_memory(psutil.Process(child.pid)))


def tree_memory(root: psutil.Process) -> int:
    """Bytes of a process and its children."""
    total = 0
    with contextlib.suppress(psutil.Error):  # one of them may have just ended
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_full_info().pss
    return total


def sample(engine: Engine, mix: str, model: Path, threads: int, preloads: list[str]) -> dict:
    """One run of one engine. Raises RuntimeError with the end of its output when it fails."""
    command = [
        str(engine.python), str(ROOT / "benchmarks" / "engines" / engine.script), "--model", str(model),
        "--mix", str(MIXES / f"{mix}.json"), "--dtype", engine.dtype, "--threads", str(threads),
        "--option", engine.option,
    ]  # fmt: skip
    for _ in range(TRIES):
        wall, busy, before = time.perf_counter(), busy_seconds(), os.times()
        status, out, err, peak = run_watched(command, environment(threads, preloads))
        after = os.times()
        own = sum(after[:4]) - sum(before[:4])
        wall = time.perf_counter() - wall
        foreign = max(0.0, busy_seconds() - busy - own) / (wall * (psutil.cpu_count() or 1))
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if status or not lines:
            raise RuntimeError((err or out).strip()[-2000:])
        if foreign <= FOREIGN_SHARE:
            return json.loads(lines[-1].removeprefix("RESULT ")) | {"peak_mib": peak // 2**20}
        print(
            f"  {engine.name}: others used {foreign:.0%} of the processor, sample thrown away",
            file=sys.stderr,
        )
    raise RuntimeError(f"the machine was not quiet in {TRIES} tries")


def summarise(samples: list[dict]) -> dict:
    rates = [s["output_tokens"] / s["seconds"] for s in samples]
    ttft = [s["ttft_mean"] for s in samples if s["ttft_mean"] is not None]
    return {
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "ttft_mean": statistics.median(ttft) if ttft else None,
        "peak_mib": statistics.median(s["peak_mib"] for s in samples),
        "samples": samples,
    }


def compare(engines: list[Engine], mixes: list[str], args: argparse.Namespace) -> dict:
    """{mix: {engine: summary}}; an engine that fails is named on stderr and left out."""
    preloads = [] if args.no_preload else find_preloads()
    results: dict[str, dict] = {}
    for mix in mixes:
        taken: dict[str, list[dict]] = {engine.name: [] for engine in engines}
        for round_ in range(args.repeat):
            for engine in engines:
                if len(taken[engine.name]) < round_:
                    continue  # it failed before
                try:
                    taken[engine.name].append(sample(engine, mix, args.model, args.threads, preloads))
                except RuntimeError as error:
                    print(f"  {engine.name} on {mix} failed: {error}", file=sys.stderr)
        results[mix] = {name: summarise(samples) for name, samples in taken.items() if samples}
        print_table(mix, results[mix])
    return {"threads": args.threads, "preloads": [Path(p).name for p in preloads], "mixes": results}


def print_table(mix: str, results: dict[str, dict]) -> None:
    if not results:
        return
    best = next(iter(results.values()))["tokens_per_second"]
    print(f"\n{mix:<20}{'tokens/s':>10}{'spread':>16}{'TTFT (s)':>10}{'peak MiB':>10}{'first / this':>14}")
    for name, r in results.items():
        ttft = f"{r['ttft_mean']:.2f}" if r["ttft_mean"] is not None else "-"
        spread = f"{r['spread'][0]:.0f} - {r['spread'][1]:.0f}"
        rate = r["tokens_per_second"]
        print(f"{name:<20}{rate:>10.0f}{spread:>16}{ttft:>10}{r['peak_mib']:>10.0f}{best / rate:>13.2f}x")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (default: all)")
    parser.add_argument("--mix", default="chat48,instruct64", help="comma-separated (default: both)")
    parser.add_argument("--repeat", type=int, default=3, help="samples of each engine (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=len(psutil.Process().cpu_affinity()), help="default: all cores"
    )
    parser.add_argument(
        "--no-preload", action="store_true", help="as installed: without tcmalloc and libiomp5"
    )
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    args = parser.parse_args()
    args.model = PEERS / "smollm2-135m"
    unknown = [name for name in args.engines.split(",") if name not in ENGINES]
    if unknown:
        parser.error(f"no engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    engines = [ENGINES[name] for name in args.engines.split(",")]
    for engine in engines:
        if not engine.python.exists():
            print(
                f"{engine.name} is skipped: {engine.python} is missing, `make peers` builds it",
                file=sys.stderr,
            )
    engines = [engine for engine in engines if engine.python.exists()]
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "peers" / "export_model.py", args.model], check=True
    )
    results = compare(engines, args.mix.split(","), args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
