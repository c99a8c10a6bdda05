"""Ten thousand requests with random hang-ups: at the end every block is free and memory has not grown.

    python benchmarks/serve_soak.py [--requests 10000]

It serves a tiny random model, so it proves bookkeeping, not speed. Memory is compared after half of the
requests and at the end: by then the trace, which keeps the last steps, is full.
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/serve"))
from tiny import running, tiny_llm

ALLOWED_GROWTH = 32 * 2**20  # bytes: Python's arenas, not a leak of a kilobyte a request
AT_ONCE = 50


async def one(client: httpx.AsyncClient, chance: random.Random) -> None:
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
        pass


async def send(url: str, number: int, chance: random.Random) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for _ in range(number // AT_ONCE):
            await asyncio.gather(*[one(client, chance) for _ in range(AT_ONCE)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    chance, memory = random.Random(1), psutil.Process()
    with running(tiny_llm(num_blocks=200)) as server:
        asyncio.run(send(server.url, args.requests // 2, chance))
        server.wait_until_idle()
        before = memory.memory_info().rss
        asyncio.run(send(server.url, args.requests - args.requests // 2, chance))
        server.wait_until_idle()
        grown = memory.memory_info().rss - before
        stats, pool = server.llm.stats, server.llm.engine.pool
        print(
            f"{stats.num_finished} finished, {stats.num_aborted} hung up, "
            f"{stats.num_preemptions} preemptions; "
            f"{pool.num_free} of {pool.num_blocks} blocks free, memory grew by {grown / 2**20:.1f} MiB"
        )
    return 1 if grown > ALLOWED_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
