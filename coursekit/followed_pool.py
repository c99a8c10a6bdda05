"""A pool whose states are kept while requests come and go, for the picture of eviction in lesson 10."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from minipaged.cache import BlockPool, BlockTable, hash_blocks, usable_hits


def admit(pool: BlockPool, tokens: Sequence[int], block_size: int) -> BlockTable:
    """What the engine does with a prompt: look up, adopt, take the rest, compute, publish.

    RuntimeError, with nothing changed, when the pool is short.
    """
    hashes = hash_blocks(tokens, block_size)
    hits = pool.lookup(hashes[: usable_hits(len(tokens), block_size)])
    one = BlockTable(pool, block_size)
    if not one.begin(hits, len(tokens)):
        raise RuntimeError(
            f"{len(tokens)} tokens in blocks of {block_size} do not fit: {pool.num_free} are free"
        )
    one.publish(hashes, len(tokens))
    return one


@dataclass(frozen=True)
class PoolState:
    """What happened, each block's state ("held", "cached", "blank") and label, and the order of taking."""

    title: str
    blocks: list[tuple[str, str]]
    order: list[int]


class FollowedPool:
    """A prefix cache of `num_blocks` blocks, and in `history` its state after every event."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.history: list[PoolState] = []
        self._labels: dict[bytes | str, str] = {}  # hash, or name for a tail -> the request that filled it
        self._contents: dict[int, str] = {}

    def note(self, title: str) -> None:
        """Keep the state of every block, and the order in which free ones would be taken."""
        states = []
        for block in range(self.pool.num_blocks):
            free = "cached" if self.pool.is_published(block) else "blank"
            state = "held" if self.pool.ref_count(block) else free
            states.append((state, "" if state == "blank" else self._contents[block]))
        order = deepcopy(self.pool).allocate(self.pool.num_free) or []  # ask a copy for all that is free
        self.history.append(PoolState(title, states, order))

    def run(self, name: str, tokens: Sequence[int]) -> BlockTable:
        """Admit a request, and label its blocks by the request that filled them."""
        one = admit(self.pool, tokens, self.block_size)
        keys: list[bytes | str] = [*hash_blocks(tokens, self.block_size), name]  # a tail has no hash
        for place, block in enumerate(one.blocks):
            self._contents[block] = self._labels.setdefault(keys[place], f"{name}{place}")
        return one
