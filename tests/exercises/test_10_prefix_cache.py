"""The graders of exercise 10 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

BLOCK_HASH = Proof(
    task="block_hash",
    second='''
from hashlib import blake2b
from struct import pack

def my_block_hashes(token_ids, block_size, salt=None):
    """One running hash over everything, read off at the end of each block."""
    running = blake2b(digest_size=32)
    running.update(b"no salt" if salt is None else b"salt " + pack("<Q", len(salt.encode())) + salt.encode())
    names = []
    for count, token in enumerate(token_ids, start=1):
        running.update(pack("<q", token))
        if count % block_size == 0:
            names.append(running.copy().hexdigest())
    return tuple(names)
''',
    wrong=[
        Wrong(
            "hashes the block alone",
            "the same tokens after another past",
            replace=("hashlib.sha256(parent + ", "hashlib.sha256("),
        ),
        Wrong(
            "hashes the half-filled block too",
            "one hash for every full block",
            replace=("len(token_ids) - block_size + 1", "len(token_ids)"),
        ),
        Wrong(
            "misses the last block of an exact multiple",
            "one hash for every full block",
            replace=("len(token_ids) - block_size + 1", "len(token_ids) - block_size"),
        ),
        Wrong(
            "forgets the salt",
            "a salt keeps customers apart",
            replace=("repr(salt).encode()", 'b""'),
        ),
        Wrong(
            "takes no salt for an empty one",
            "a salt keeps customers apart",
            replace=("repr(salt).encode()", '(salt or "").encode()'),
        ),
        Wrong(
            "uses Python's own hash",
            "equal beginnings have equal hashes, in every process",
            source="""
def my_block_hashes(token_ids, block_size, salt=None):
    hashes, parent = [], hash(salt or "no salt")
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash((parent, *token_ids[start : start + block_size]))
        hashes.append(parent)
    return hashes
""",
        ),
        Wrong(
            "runs tokens together",
            "different tokens are different blocks",
            replace=("repr(list(block)).encode()", '"".join(map(str, block)).encode()'),
        ),
        Wrong(
            "keeps one byte of a token",
            "different tokens are different blocks",
            replace=("repr(list(block)).encode()", "bytes(token % 256 for token in block)"),
        ),
    ],
)

PREFIX_CACHE = Proof(
    task="prefix_cache",
    second='''
from dataclasses import dataclass

@dataclass
class Block:
    number: int
    holders: int = 0
    key: str = ""
    free_since: int = 0

class MyPrefixCache:
    """A record for each block and a clock; everything is found by searching."""

    def __init__(self, num_blocks):
        self.blocks = [Block(number, free_since=number) for number in range(num_blocks)]
        self.clock = num_blocks

    def _free(self):
        return sorted((b for b in self.blocks if b.holders == 0), key=lambda b: (bool(b.key), b.free_since))

    @property
    def num_free(self):
        return len(self._free())

    def _with_key(self, key):
        return next((b for b in self.blocks if key and b.key == key), None)

    def allocate(self, n):
        chosen = self._free()[:n]
        if len(chosen) < n:
            return None
        for block in chosen:
            block.holders, block.key = 1, ""
        return [block.number for block in chosen]

    def publish(self, block, key):
        if self._with_key(key) is None:
            self.blocks[block].key = key

    def lookup(self, keys):
        found = [self._with_key(key) for key in keys]
        if None in found:
            found = found[: found.index(None)]
        return tuple(block.number for block in found)

    def share(self, blocks):
        for number in blocks:
            self.blocks[number].holders += 1

    def free(self, blocks):
        for number in blocks:
            self.blocks[number].holders -= 1
            self.blocks[number].free_since = self.clock
            self.clock += 1
''',
    wrong=[
        Wrong(
            "keeps the key of a block that is handed out",
            "a block that is handed out again is forgotten",
            replace=("                del self.block_of[key]\n", "                pass\n"),
        ),
        Wrong(
            "forgets what is freed",
            "a published block is found",
            replace=(
                "                self.unused[block] = None\n",
                "                self.unused[block] = None\n"
                "                self.block_of.pop(self.key_of.pop(block, None), None)\n",
            ),
        ),
        Wrong(
            "takes hits behind a gap",
            "a lookup stops at the first key",
            replace=("                break\n", "                continue\n"),
        ),
        Wrong(
            "hands out a block that is shared",
            "a cached block that somebody shares",
            replace=("            self.unused.pop(block, None)\n", ""),
        ),
        Wrong(
            "gives up the block that was freed last",
            "the block that was free for longest",
            replace=("sorted(self.unused, key", "sorted(reversed(self.unused), key"),
        ),
        Wrong(
            "moves the key to the newest block",
            "a key stays with the block that offered it first",
            replace=(
                "if key not in self.block_of:\n            self.block_of[key] = block",
                "if True:\n            self.block_of[key] = block",
            ),
        ),
        Wrong(
            "takes what there is",
            "a cached block that somebody shares",
            replace=("            return None\n", "            n = self.num_free\n"),
        ),
    ],
)

PROOFS = [BLOCK_HASH, PREFIX_CACHE]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
