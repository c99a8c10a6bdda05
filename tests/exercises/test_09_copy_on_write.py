"""The graders of exercise 09 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

REF_COUNTS = Proof(
    task="ref_counts",
    second='''
from collections import Counter

class MySharedPool:
    """No free list: a counter of holders, searched for what is free."""

    def __init__(self, num_blocks):
        self.everything = range(num_blocks)
        self.count = Counter()

    @property
    def num_free(self):
        return len(self.everything) - sum(1 for block in self.count if self.count[block] > 0)

    def ref_count(self, block):
        return self.count[block]

    def allocate(self, n):
        free = [block for block in self.everything if self.count[block] == 0]
        if len(free) < n:
            return None
        self.count.update(free[:n])
        return free[:n]

    def share(self, blocks):
        self._change(blocks, +1)

    def free(self, blocks):
        self._change(blocks, -1)

    def _change(self, blocks, by):
        new = self.count.copy()
        for block in blocks:
            if new[block] != self.count[block] or new[block] < 1:
                raise ValueError(block)
            new[block] += by
        self.count = new
''',
    wrong=[
        Wrong(
            "starts at zero",
            "a block has one holder when it is given out",
            replace=("self.holders[block] = 1", "self.holders[block] = 0"),
        ),
        Wrong(
            "frees at the first free",
            "a shared block is free only after its last holder",
            replace=("if self.holders[block] == 0:", "if True:"),
        ),
        Wrong(
            "sharing does not count",
            "a shared block is free only after its last holder",
            replace=("self.holders[block] += 1", "pass"),
        ),
        Wrong(
            "frees what nobody holds",
            "a wrong share or free raises ValueError",
            replace=("if len(set(held)) < len(blocks):", "if False:"),
        ),
        Wrong(
            "counts a block named twice as two",
            "a wrong share or free raises ValueError",
            replace=("len(set(held)) < len(blocks)", "len(held) < len(blocks)"),
        ),
        Wrong(
            "gives out what it has",
            "a shortage answers None",
            replace=("            return None\n", "            n = self.num_free\n"),
        ),
    ],
)

FORK = Proof(
    task="fork",
    second='''
import copy

class MyForkingTable:
    """Token by token; undoes everything when the pool runs short."""

    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.blocks, self.num_tokens = pool, block_size, [], 0

    def fork(self):
        self.pool.share(self.blocks)
        twin = copy.copy(self)
        twin.blocks = self.blocks[:]
        return twin

    def append(self, n):
        offset = self.num_tokens % self.block_size
        must_copy = bool(n and offset and self.pool.ref_count(self.blocks[-1]) > 1)
        taken = []
        for position in range(self.num_tokens, self.num_tokens + n):
            if position % self.block_size == 0 or (must_copy and position == self.num_tokens):
                got = self.pool.allocate(1)
                if got is None:
                    if taken:
                        self.pool.free(taken)
                    return None
                taken += got
        self.num_tokens += n
        if not must_copy:
            self.blocks.extend(taken)
            return ()
        old = self.blocks.pop()
        self.pool.free([old])
        self.blocks.extend(taken)
        return ((old, taken[0]),)

    def free(self):
        while self.blocks:
            self.pool.free([self.blocks.pop()])
        self.num_tokens = 0
''',
    wrong=[
        Wrong(
            "writes into the sibling's block",
            "who writes first into a shared last block",
            replace=("self.pool.ref_count(self.blocks[-1]) > 1", "False"),
        ),
        Wrong(
            "shares without counting",
            "a fork takes no block and shares every one",
            replace=("        self.pool.share(self.blocks)\n", ""),
        ),
        Wrong(
            "one list for two tables",
            "who writes first into a shared last block",
            replace=("child.blocks = list(self.blocks)", "child.blocks = self.blocks"),
        ),
        Wrong(
            "keeps hold of what it copied from",
            "who writes first into a shared last block",
            replace=("            self.pool.free([shared])\n", ""),
        ),
        Wrong(
            "copies a full block",
            "a full last block is not copied",
            replace=("n > 0 and has_room and", "n > 0 and bool(self.blocks) and"),
        ),
        Wrong(
            "copies for no tokens",
            "a full last block is not copied",
            replace=("copies_tail = n > 0 and has_room", "copies_tail = has_room"),
        ),
        Wrong(
            "copies at the fork",
            "a fork takes no block and shares every one",
            source="""
class MyForkingTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.blocks, self.num_tokens = pool, block_size, [], 0

    def fork(self):
        child = MyForkingTable(self.pool, self.block_size)
        child.append(self.num_tokens)
        return child

    def append(self, n):
        new = self.pool.allocate(-(-(self.num_tokens + n) // self.block_size) - len(self.blocks))
        if new is None:
            return None
        self.blocks += new
        self.num_tokens += n
        return []

    def free(self):
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0
""",
        ),
        Wrong(
            "takes the copy first and keeps it when the rest is missing",
            "a shortage answers None",
            replace=(
                "        new_blocks = self.pool.allocate(needed + copies_tail)\n",
                "        tail = self.pool.allocate(int(copies_tail))\n"
                "        new_blocks = self.pool.allocate(needed)\n"
                "        new_blocks = None if tail is None or new_blocks is None else tail + new_blocks\n",
            ),
        ),
    ],
)

PROOFS = [REF_COUNTS, FORK]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
