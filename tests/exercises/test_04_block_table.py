"""The graders of exercise 04 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

ALLOCATOR = Proof(
    task="allocator",
    second='''
from collections import deque

class MyBlockPool:
    """A queue and a list of flags in place of a stack and a set."""

    def __init__(self, num_blocks):
        self.queue = deque(range(num_blocks))
        self.is_held = [False] * num_blocks

    @property
    def num_free(self):
        return len(self.queue)

    def allocate(self, n):
        if len(self.queue) < n:
            return None
        blocks = tuple(self.queue.popleft() for _ in range(n))
        for block in blocks:
            self.is_held[block] = True
        return list(blocks)

    def free(self, blocks):
        seen = set()
        for block in blocks:
            if block in seen or not (0 <= block < len(self.is_held) and self.is_held[block]):
                raise ValueError(block)
            seen.add(block)
        for block in blocks:
            self.is_held[block] = False
            self.queue.append(block)
''',
    wrong=[
        Wrong(
            "takes what it can get", "a shortage answers None", replace=("if n > self.num_free:", "if False:")
        ),
        Wrong(
            "loses the blocks of a refused request",
            "a shortage answers None",
            source="""
class MyBlockPool:
    def __init__(self, num_blocks):
        self.unused = list(range(num_blocks))

    @property
    def num_free(self):
        return len(self.unused)

    def allocate(self, n):
        blocks = []
        for _ in range(n):
            if not self.unused:
                return None
            blocks.append(self.unused.pop())
        return blocks

    def free(self, blocks):
        self.unused += blocks
""",
        ),
        Wrong("frees twice", "a wrong free raises", replace=("if wrong or", "if False and wrong or")),
        Wrong(
            "frees a block twice in one call",
            "a wrong free raises",
            replace=("or len(set(blocks)) < len(blocks)", ""),
        ),
        Wrong(
            "never takes a block back",
            "freed blocks can be given out again",
            replace=("self.unused += blocks", "pass"),
        ),
        Wrong(
            "gives the same block to two requests",
            "gives out different blocks",
            replace=("[self.unused.pop() for _ in range(n)]", "self.unused[:n]"),
        ),
    ],
)

BLOCK_TABLE = Proof(
    task="block_table",
    second='''
import math

class MyBlockTable:
    """Token by token, with divmod, and a list of every slot kept as it grows."""

    def __init__(self, pool, block_size):
        self.pool, self.block_size = pool, block_size
        self.blocks, self._slots = [], []

    @property
    def num_tokens(self):
        return len(self._slots)

    def append(self, n):
        room = len(self.blocks) * self.block_size - self.num_tokens
        more = []
        if n > room:
            more = self.pool.allocate(math.ceil((n - room) / self.block_size))
            if more is None:
                return False
        self.blocks = self.blocks + list(more)
        for position in range(self.num_tokens, self.num_tokens + n):
            index, offset = divmod(position, self.block_size)
            self._slots.append(self.blocks[index] * self.block_size + offset)
        return True

    def slots(self, start, stop):
        return tuple(self._slots[start:stop])

    def free(self):
        if self.blocks:
            self.pool.free(self.blocks)
        self.blocks, self._slots = [], []
''',
    wrong=[
        Wrong(
            "a block too many at exact multiples",
            "takes a block only when a token needs one",
            replace=("-(-total // self.block_size)", "(total // self.block_size + 1)"),
        ),
        Wrong(
            "rounds down",
            "takes a block only when a token needs one",
            replace=("-(-total // self.block_size)", "total // self.block_size"),
        ),
        Wrong(
            "takes the position in the table for the block",
            "token p is in slot",
            replace=(
                "self.blocks[p // self.block_size] * self.block_size",
                "p // self.block_size * self.block_size",
            ),
        ),
        Wrong(
            "forgets the offset in the block",
            "token p is in slot",
            replace=(" + p % self.block_size", ""),
        ),
        Wrong(
            "counts tokens that found no room",
            "a full pool answers False",
            replace=(
                "            return False\n",
                "            self.num_tokens = total\n            return False\n",
            ),
        ),
        Wrong(
            "keeps its blocks after free",
            "free gives every block back once",
            replace=(
                "        self.blocks = []\n        self.num_tokens = 0\n        ### END",
                "        ### END",
            ),
        ),
    ],
)

PROOFS = [ALLOCATOR, BLOCK_TABLE]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
