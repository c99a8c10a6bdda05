"""Requests in contiguous memory, for the exercise that accounts for what they waste."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Strip:
    """What one request has, in slots: reserved, holding a token now, and holding one at its end."""

    reserved: int
    num_tokens: int
    final_tokens: int


def moments(
    arena: Any, requests: Iterable[tuple[int, int]], reserve: Callable[[int, int], int]
) -> Iterator[tuple[list[Strip], int]]:
    """Serve `requests` first come, first served; each step in which one waits gives (strips, next_size).

    A request of p prompt and g generated tokens reserves `reserve(p, g)` slots, starts with p tokens and
    gains one a step; its last token is never stored. Raises ValueError for one that fits no empty arena.
    """
    waiting = deque(requests)
    running: list[tuple[int, Strip]] = []
    while waiting:
        prompt, generated = waiting[0]
        size = reserve(prompt, generated)
        start = arena.allocate(size)
        if start is not None:
            waiting.popleft()
            running.append((start, Strip(size, prompt, prompt + generated - 1)))
            continue
        if not running:
            raise ValueError(f"a request reserves {size} slots, which is more than the arena has")
        yield [strip for _, strip in running], size
        for start, strip in running:
            if strip.num_tokens == strip.final_tokens:
                arena.free(start)
        running = [
            (start, Strip(strip.reserved, strip.num_tokens + 1, strip.final_tokens))
            for start, strip in running
            if strip.num_tokens < strip.final_tokens
        ]
