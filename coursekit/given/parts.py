"""What exercises 04, 10 and 11 ask for, under their names: the check of exercise 12 puts a step between them.

So a mistake that it finds is one of the step, not of an older exercise.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

TASKS = ("block_table", "block_hash", "prefix_cache", "scheduler_step")


def my_block_hashes(token_ids: Sequence[int], block_size: int, salt: str | None = None) -> list[bytes]:
    """One hash for each full block, of its tokens and of all before them."""
    hashes: list[bytes] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        text = (
            f"{hashes[-1].hex() if hashes else salt!r} {[int(t) for t in token_ids[end - block_size : end]]}"
        )
        hashes.append(hashlib.sha256(text.encode()).digest())
    return hashes


class MyPrefixCache:
    """Blocks 0 … num_blocks - 1 with their holders; a free one keeps its contents until it is handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.unused = dict.fromkeys(range(num_blocks))  # from the block that was free for longest on
        self.holders = dict.fromkeys(range(num_blocks), 0)
        self.block_of: dict[Any, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.unused)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self.unused):
            return None
        known = {block: key for key, block in self.block_of.items()}
        blocks = sorted(self.unused, key=known.__contains__)[:n]
        for block in blocks:
            del self.unused[block]
            self.holders[block] = 1
            if block in known:
                del self.block_of[known[block]]
        return blocks

    def publish(self, block: int, key: Any) -> None:
        if block not in self.block_of.values():
            self.block_of.setdefault(key, block)

    def lookup(self, keys: Sequence[Any]) -> list[int]:
        hits = []
        for key in keys:
            if key not in self.block_of:
                break
            hits.append(self.block_of[key])
        return hits

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.unused.pop(block, None)
            self.holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.holders[block] < 1:
                raise ValueError(f"free({list(blocks)}): nobody holds block {block}")
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unused[block] = None


class MyBlockTable:
    """The blocks of one sequence, taken from `pool` when a token needs one."""

    def __init__(self, pool: Any, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.blocks: list[int] = []
        self.num_tokens = 0

    def append(self, n: int) -> bool:
        blocks = self.pool.allocate(-(-(self.num_tokens + n) // self.block_size) - len(self.blocks))
        if blocks is None:
            return False
        self.blocks += blocks
        self.num_tokens += n
        return True

    def slots(self, start: int, stop: int) -> list[int]:
        size = self.block_size
        return [self.blocks[p // size] * size + p % size for p in range(start, stop)]

    def free(self) -> None:
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0


class MyScheduler:
    """Who runs in each step; it counts blocks, one token ahead, and has none."""

    def __init__(self, num_blocks: int, block_size: int, max_running: int) -> None:
        self.num_blocks, self.block_size, self.max_running = num_blocks, block_size, max_running
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.tokens: dict[str, int] = {}
        self.last: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(-(-self.tokens[name] // self.block_size) for name in self.running)

    def fits(self, names: Sequence[str]) -> bool:
        """Whether all of `names` can have one token more."""
        needed = sum(self.tokens[name] // self.block_size + 1 for name in names)
        return len(names) <= self.max_running and needed <= self.num_blocks

    def add(self, name: str, prompt: int, output: int) -> None:
        if prompt + output > self.num_blocks * self.block_size:
            raise ValueError(f"{name} has {prompt} + {output} tokens, the pool {self.num_blocks} blocks")
        self.tokens[name], self.last[name] = prompt, prompt + output
        self.waiting.append(name)

    def step(self) -> list[str]:
        while not self.fits(self.running):
            self.waiting.insert(0, self.running.pop())
        while self.waiting and self.fits([*self.running, self.waiting[0]]):
            self.running.append(self.waiting.pop(0))
        served = list(self.running)
        for name in served:
            self.tokens[name] += 1
            if self.tokens[name] == self.last[name]:
                self.running.remove(name)
        return served
