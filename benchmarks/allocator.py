"""What handing out blocks costs, in pure Python, side by side in one run, and how it grows with the pool.

    python benchmarks/allocator.py                 pools of 1e3 to 1e6 blocks
    python benchmarks/allocator.py --json --sizes 1000 100000

Three measures, each the best of several rounds in which the pools take turns:
    batch    allocate 32 blocks and free them, nanoseconds a block
    single   allocate 1 block and free it, nanoseconds
    hit      a prompt of 512 tokens that is cached whole, in a pool full of cached blocks: name its 32 blocks
             (a chained sha256), look them up, take them, free them; microseconds
The pools: minipaged's; a plain list used as a stack, the least that any pool can cost; a deque from whose
middle a hit is removed, the usual small-engine way; vLLM's, in its own environment (`make peers`).
"""

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".peers" / "vllm" / "bin" / "python"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
BLOCK_SIZE, PROMPT = 16, list(range(512))
ROUNDS = 7


class Minipaged:
    name = "minipaged"

    def __init__(self, num_blocks: int) -> None:
        from minipaged.cache import BlockPool, hash_blocks

        self.pool, self.hash_blocks = BlockPool(num_blocks), hash_blocks
        self.allocate, self.free = self.pool.allocate, self.pool.free

    def fill_cache(self) -> None:
        blocks = self.pool.allocate(self.pool.num_blocks)
        prompt = self.hash_blocks(PROMPT, BLOCK_SIZE)
        for block, block_hash in zip(blocks, names(prompt, len(blocks)), strict=True):
            self.pool.publish(block, block_hash)
        self.pool.free(blocks[::-1])

    def hit(self) -> None:
        hits = self.pool.lookup(self.hash_blocks(PROMPT, BLOCK_SIZE))
        self.pool.share(hits)
        self.pool.free(hits[::-1])


class ListStack:
    """No reference counts, no checks, no prefix cache."""

    name = "list stack"

    def __init__(self, num_blocks: int) -> None:
        self.blocks = list(range(num_blocks))

    def allocate(self, n: int) -> list[int]:
        blocks = self.blocks[-n:]
        del self.blocks[-n:]
        return blocks

    def free(self, blocks: list[int]) -> None:
        self.blocks += blocks


class Deque:
    """Free ids in a deque, oldest first; a hit that is free is removed from wherever it is."""

    name = "deque"

    def __init__(self, num_blocks: int) -> None:
        self.free_ids = deque(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.index: dict[bytes, int] = {}

    def allocate(self, n: int) -> list[int]:
        blocks = [self.free_ids.popleft() for _ in range(n)]
        for block in blocks:
            self.ref_counts[block] = 1
            if self.index.get(self.hashes[block]) == block:
                del self.index[self.hashes[block]]
            self.hashes[block] = None
        return blocks

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_ids.append(block)

    def fill_cache(self) -> None:
        for block, block_hash in enumerate(names(self.hash_blocks(), len(self.hashes))):
            self.hashes[block] = block_hash
            self.index[block_hash] = block
        self.free_ids.rotate(len(self.hashes) // 2)  # the prompt's blocks lie in the middle, as in a server

    def hash_blocks(self) -> list[bytes]:
        digests, parent = [], b""
        for start in range(0, len(PROMPT), BLOCK_SIZE):
            parent = sha256(parent + repr(PROMPT[start : start + BLOCK_SIZE]).encode()).digest()
            digests.append(parent)
        return digests

    def hit(self) -> None:
        hits = [self.index[block_hash] for block_hash in self.hash_blocks()]
        for block in hits:
            if not self.ref_counts[block]:
                self.free_ids.remove(block)
            self.ref_counts[block] += 1
        self.free(hits[::-1])


class Vllm:
    """vLLM's own pool and hashing. Filling its cache goes past its `Request`; the measured calls do not."""

    name = "vLLM"

    def __init__(self, num_blocks: int) -> None:
        from vllm.utils.hashing import sha256 as vllm_sha256
        from vllm.v1.core import kv_cache_utils as utils
        from vllm.v1.core.block_pool import BlockPool

        utils.init_none_hash(vllm_sha256)
        self.utils, self.sha256 = utils, vllm_sha256
        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)  # it keeps one block as a null block
        self.num_blocks = num_blocks
        self.allocate, self.free = self.pool.get_new_blocks, self.pool.free_blocks

    def hash_blocks(self) -> list[bytes]:
        digests: list[Any] = []
        for start in range(0, len(PROMPT), BLOCK_SIZE):
            parent = digests[-1] if digests else None
            tokens = PROMPT[start : start + BLOCK_SIZE]
            digests.append(self.utils.hash_block_tokens(self.sha256, parent, tokens))
        return digests

    def fill_cache(self) -> None:
        blocks = self.pool.get_new_blocks(self.num_blocks)
        for block, block_hash in zip(blocks, names(self.hash_blocks(), self.num_blocks), strict=True):
            key = self.utils.make_block_hash_with_group_id(block_hash, 0)
            self.pool._insert_block_hash(key, block, num_tokens=BLOCK_SIZE)
        self.pool.free_blocks(reversed(blocks))

    def hit(self) -> None:
        hits = [self.pool.get_cached_block(block_hash, [0])[0] for block_hash in self.hash_blocks()]
        self.pool.touch(hits)
        self.pool.free_blocks(reversed(hits))


OURS = (Minipaged, ListStack, Deque)


def names(prompt: list[bytes], n: int) -> Iterator[bytes]:
    """The names of the prompt's blocks, then made-up ones, `n` in all."""
    for i in range(n):
        yield prompt[i] if i < len(prompt) else i.to_bytes(32, "little")


def time_cycle(pool: Any, n: int, times: int) -> float:
    """Nanoseconds a block to allocate `n` blocks and free them."""
    allocate, free = pool.allocate, pool.free
    start = time.perf_counter()
    for _ in range(times):
        free(allocate(n))
    return (time.perf_counter() - start) / times / n * 1e9


def time_hit(pool: Any) -> float:
    start = time.perf_counter()
    for _ in range(10):
        pool.hit()
    return (time.perf_counter() - start) / 10 * 1e6


MEASURES = {
    "batch": ("ns a block", lambda pool: time_cycle(pool, 32, 500)),
    "single": ("ns", lambda pool: time_cycle(pool, 1, 5000)),
    "hit": ("us", time_hit),
}


def measure(kinds: tuple[type, ...], num_blocks: int) -> dict[str, dict[str, float]]:
    pools = [kind(num_blocks) for kind in kinds]
    best: dict[str, dict[str, float]] = {pool.name: {} for pool in pools}
    for name, (_, take) in MEASURES.items():
        if take is time_hit:
            pools = [pool for pool in pools if hasattr(pool, "hit")]
            for pool in pools:
                pool.fill_cache()
        for _ in range(ROUNDS):
            for pool in pools:
                best[pool.name][name] = min(take(pool), best[pool.name].get(name, float("inf")))
    return best


def measure_vllm(python: Path, num_blocks: int) -> dict[str, dict[str, float]]:
    """The same measures under the interpreter that has vLLM; empty where it is missing or another version."""
    command = [str(python), __file__, "--only-vllm", "--json", "--sizes", str(num_blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"vLLM left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])[str(num_blocks)]


def print_growth(results: dict[int, dict[str, dict[str, float]]]) -> None:
    """One table a measure: a row a pool, a column a size, and how many times the last is the first."""
    sizes = list(results)
    for measure_name, (unit, _) in MEASURES.items():
        heading = f"\n{measure_name} ({unit})"
        print(heading.ljust(19) + "".join(f"{size:>11,}" for size in sizes) + "     growth")
        for name in results[sizes[0]]:
            values = [results[size].get(name, {}).get(measure_name) for size in sizes]
            if None not in values:
                row = "".join(f"{value:>11.1f}" for value in values)
                print(f"  {name:<16}{row}{values[-1] / values[0]:>10.1f}x")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks in the pool, at least 33")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, help="an interpreter that has vLLM")
    parser.add_argument("--only-vllm", action="store_true", help="vLLM's pool alone, in this interpreter")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    for size in args.sizes:
        results[size] = measure((Vllm,) if args.only_vllm else OURS, size)
        if not args.only_vllm and args.vllm_python.exists():
            results[size] |= measure_vllm(args.vllm_python, size)
    if not args.only_vllm and not args.vllm_python.exists():
        print(f"vLLM left out: there is no {args.vllm_python} (make peers)", file=sys.stderr)
    if args.json:
        print(json.dumps(results))
    else:
        print_growth(results)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
