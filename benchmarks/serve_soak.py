"""Ten thousand requests with random hang-ups: at the end every block is free, and memory has stopped growing.

    python benchmarks/serve_soak.py [--requests 10000]

The server is a process of its own with a tiny random model, so this proves bookkeeping, not speed. Its memory
is read after every 250 requests. What it keeps on purpose (the trace of the last steps, caches, a heap with
free places) fills up in the first half; the slope of the second, by least squares, is what a request leaks.
"""

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import psutil

SERVER = Path(__file__).resolve().parent.parent / "tests/serve/tiny.py"
ALLOWED = 256  # bytes a request: one that is kept whole takes several kilobytes
AT_ONCE, BETWEEN_READINGS = 50, 250


async def one(client: httpx.AsyncClient, chance: random.Random) -> str:
    """A request that is read whole, or left at a random moment."""
    body = {
        "prompt": "p" * chance.randint(1, 200),
        "max_tokens": chance.randint(1, 40),
        "n": chance.choice([1, 1, 1, 4]),
        "stream": chance.random() < 0.7,
    }
    try:
        async with asyncio.timeout(chance.choice([None, None, chance.random() * 0.2])):
            (await client.post("/v1/completions", json=body)).raise_for_status()
    except TimeoutError:
        return "left"
    return "read"


async def soak(port: int, number: int, server: psutil.Process) -> tuple[Counter[str], list[tuple[int, int]]]:
    """How requests ended; and after how many of them the server held how many bytes."""
    chance, ends, readings = random.Random(1), Counter[str](), []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        while ends.total() < number:
            ends.update(await asyncio.gather(*[one(client, chance) for _ in range(AT_ONCE)]))
            if ends.total() % BETWEEN_READINGS == 0:
                readings.append((ends.total(), server.memory_info().rss))
                print(f"{ends.total():7} requests, {readings[-1][1] / 2**20:.1f} MiB", flush=True)
    return ends, readings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="at least 1000 (default: %(default)s)")
    args = parser.parse_args()
    if args.requests < 1000:
        parser.error(f"--requests is {args.requests}, fewer than 1000 say nothing about memory")
    command = [sys.executable, str(SERVER), "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ends, readings = asyncio.run(
            soak(int(child.stdout.readline()), args.requests, psutil.Process(child.pid))
        )
        child.send_signal(signal.SIGTERM)
        said = child.stdout.read().strip()  # "free 128 of 128, told 0"
    late = readings[len(readings) // 2 :]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope
    print(
        f"{ends['read']} read whole, {ends['left']} left; {said}; "
        f"{slope:.0f} bytes a request in the second half"
    )
    free, total = said.removeprefix("free ").partition(",")[0].split(" of ")
    return 0 if free == total and slope < ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
