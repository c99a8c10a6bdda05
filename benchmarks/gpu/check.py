"""Is every kernel right on this card, and how fast is it? One run, under eight minutes, no network.

    benchmarks/gpu_check.sh               on a machine with a GPU; writes benchmarks/results/<card>.json
    benchmarks/gpu_check.sh --dry-run     the same code with tiny shapes in Triton's interpreter; writes
    nothing

Each part runs in a process of its own with a time limit, and what it has found so far is kept when it fails.
Exit code: 0 all right; 1 a kernel computed something wrong, or its check did not finish; 2 another part
failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

# part -> the most seconds it may take; correctness comes first because speed means nothing without it
PARTS = {"correctness": 150, "end_to_end": 45, "decode": 100, "prefill": 60, "beside": 100}
MUST_FINISH = ("correctness", "end_to_end")
TOTAL_SECONDS = 460
DRY_RUN_PATIENCE = 10  # times as long may a dry run take: on any machine, beside whatever else runs there
ROOT = Path(__file__).parents[2]


def run_part(name: str, path: Path, seconds: float, *, dry_run: bool) -> None:
    """The body of a child process."""
    from benchmarks.gpu.part import Part

    import_module(f"benchmarks.gpu.{name}").run(Part.begin(path, seconds, dry_run=dry_run))


def start_part(name: str, path: Path, seconds: float, *, dry_run: bool) -> dict[str, Any]:
    """Run a part as a child process, ended with its children when too slow, and say how it went."""
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--part", name, "--out", str(path)]
    # It plans with a little less: it has to start, and to finish what it is at.
    command += ["--seconds", str(0.9 * seconds)] + (["--dry-run"] if dry_run else [])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = child.wait(seconds)
            status = "finished" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = f"stopped after {seconds:.0f} s"
        log.seek(0)
        tail = log.read()[-3000:]
    if status != "finished":
        print(tail, file=sys.stderr)
    return {"name": name, "status": status, "seconds": round(time.monotonic() - started, 1)}


def run_all(*, dry_run: bool, folder: Path | None = None) -> int:
    """Run every part in turn, record after each, and print the outcome. Returns the exit code."""
    from benchmarks.gpu import results
    from benchmarks.gpu.summary import print_summary

    machine = None if dry_run else results.describe_machine()
    if dry_run:
        print("dry run: tiny shapes in Triton's interpreter, no results file")
    found: results.Found = {}
    parts: list[dict[str, Any]] = []
    patience = DRY_RUN_PATIENCE if dry_run else 1
    deadline = time.monotonic() + TOTAL_SECONDS * patience
    with tempfile.TemporaryDirectory() as scratch:
        for name, limit in PARTS.items():
            path = Path(scratch) / f"{name}.json"
            seconds = min(limit * patience, deadline - time.monotonic())
            parts.append(start_part(name, path, max(1.0, seconds), dry_run=dry_run))
            print(f"{name}: {parts[-1]['status']}, {parts[-1]['seconds']} s", flush=True)
            merge(found, path)
            if machine is not None:
                complete = len(parts) == len(PARTS) and all(p["status"] == "finished" for p in parts)
                written = results.write_result(
                    found, parts, machine, complete=complete, folder=folder or results.FOLDER
                )
    print_summary(found, dry_run=dry_run)
    print(f"written to {written}" if machine else "dry run: no results file was written")
    return exit_code(found, parts)


def merge(found: dict[str, list[Any]], path: Path) -> None:
    """Add what a part has left, however far it came."""
    if path.exists():
        for section, entries in json.loads(path.read_text()).items():
            found.setdefault(section, []).extend(entries)


def exit_code(found: dict[str, list[dict[str, Any]]], parts: list[dict[str, Any]]) -> int:
    unfinished = [part["name"] for part in parts if part["status"] != "finished"]
    wrong = not all(check["passed"] for check in found.get("checks", []))
    if wrong or any(name in MUST_FINISH for name in unfinished):
        return 1
    return 2 if unfinished else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, no GPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args.out, args.seconds, dry_run=args.dry_run)
        return 0
    if not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("there is no GPU here; --dry-run runs the same code without one", file=sys.stderr)
            return 2
    return run_all(dry_run=args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
