# %% [markdown]
# # 10 · Exercise: a prefix cache
#
# The lesson is [10 · Sharing prefixes](../../notebooks/10_sharing_prefixes.ipynb). There a system prompt was stored once for many
# requests. Here you write the two parts that do it: the name under which a block can be found again, and a pool
# that keeps the contents of freed blocks for as long as it can.
#
# Each task has one cell for your answer and a check below it. The check runs that cell alone, in a process of its own: an
# import or a helper that you need must stand in the same cell.

# %%
from coursekit.checks import attempt, check

# %% [markdown]
# ## Task 1 · A hash that contains the past
#
# *About 8 lines · difficulty 2 of 5 · 20 minutes · 3 points*
#
# Two requests may share a block only if its keys and values are the same for both. These depend on the block's tokens **and on
# all tokens before it**. So the name of a block is a hash of its tokens and of the name of the block before.
#
# **Contract.** `my_block_hashes(token_ids, block_size, salt=None)` answers a list with one hash for each *full* block, in order.
# - `token_ids`: a list of ints, each from 0 to a million or so. `salt`: `None`, or text that keeps customers apart: with different
#   salts no block has the same hash. `None` and `""` are different, too.
# - A hash is `bytes` or text. Two blocks have the same hash exactly when they, everything before them, and the salt are the same;
#   by accident only as seldom as with sha256. It is the same in every process.
#
# **Example.** `my_block_hashes([1, 2, 3, 4, 5], 2)` has two hashes, and token 5 is in none of them. The first is also the first
# of `my_block_hashes([1, 2, 9, 9], 2)`. The second is *not* the second of `my_block_hashes([8, 8, 3, 4], 2)`: the same tokens, another past.
#
# <details><summary>Hint 1</summary>
#
# `hashlib.sha256(data).digest()` turns bytes into 32 bytes. Feed it everything that must make a difference.
#
# <details><summary>Hint 2</summary>
#
# Keep a variable for the hash of the block before, and start it with the salt. `repr` tells `None` from `""` and from `"None"`.
#
# <details><summary>Hint 3</summary>
#
# In a loop over the full blocks: `parent = hashlib.sha256(parent + repr(block).encode()).digest()`, where `block` is the list of its
# tokens. `repr` of a list has brackets and commas, so `[1, 23]` and `[12, 3]` stay apart. Then append `parent` to the answer.
#
# </details></details></details>

# %% nbgrader={"grade_id": "block_hash", "solution": true}
import hashlib


def my_block_hashes(token_ids, block_size, salt=None):
    """One hash for every full block, which depends on all tokens up to its end and on the salt."""
    ### BEGIN SOLUTION
    hashes = []
    parent = repr(salt).encode()
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        parent = hashlib.sha256(parent + repr(list(block)).encode()).digest()
        hashes.append(parent)
    return hashes
    ### END SOLUTION

# %%
with attempt():
    one = my_block_hashes([1, 2, 3, 4, 5], 2)
    two = my_block_hashes([8, 8, 3, 4], 2)
    print(len(one), "hashes of 5 tokens in blocks of 2")
    print("[3, 4] after [1, 2] and after [8, 8] are one block:", one[1] == two[1])

# %% nbgrader={"grade_id": "block_hash-check", "grade": true}
check.block_hash(my_block_hashes)

# %% [markdown]
# ## Task 2 · A prefix cache with LRU eviction
#
# *About 25 lines · difficulty 4 of 5 · 45 minutes · 5 points*
#
# A pool of blocks with holders, as in exercise 09, that also remembers what is in a block. In this task a block's name is some text,
# its *key*; where it comes from does not matter.
#
# **Contract.**
# - `num_free`: blocks that nobody holds, whether or not something is still known to be in them.
# - `allocate(n)`: a list of `n` free blocks with one holder each, `None` when fewer are free and then nothing has changed. It takes
#   **blank** blocks first, in which nothing is known to be, then cached ones; among each kind those that have been free **for
#   longest**, longest first. In a new pool that is 0, 1, 2, …. What was in them is forgotten: their keys are found no more.
# - `publish(block, key)`: this held block now contains what `key` names. If the key is already known, it stays with the block that has it.
# - `lookup(keys)`: the blocks of the leading keys that are known, up to the first that is not. It changes nothing.
# - `share(blocks)`: one more holder for each; a free one among them is free no longer.
# - `free(blocks)`: one holder less for each, in the order given; a block without holders is free, and keeps its contents.
#
# You need not guard against wrong calls here.
#
# **Example.** A pool of 3. `allocate(2)` answers `[0, 1]`, which are published as `"a"` and `"ab"` and then freed as `free([1, 0])`. All 3 blocks are
# free, and `lookup(["a", "ab"])` answers `[0, 1]`. Block 2 is blank; of the cached ones 1 is free for longer. `allocate(2)` takes 2 and 1, and with that
# `"ab"` is forgotten: `lookup(["a", "ab"])` answers `[0]`.
#
# <details><summary>Hint 1</summary>
#
# A `dict` keeps the order in which keys came in, and any key can be taken out at once. A dict whose keys are the free blocks is a queue from
# whose middle one can take.
#
# <details><summary>Hint 2</summary>
#
# You need both directions: from a key to its block for `lookup`, and from a block to its key to forget it in `allocate`. Keep both in step:
# whatever enters one enters the other, whatever leaves one leaves the other.
#
# <details><summary>Hint 3</summary>
#
# `allocate`: `list(self.unused)[:n]` are the longest free ones; to have the blank ones first, sort the list by whether a block is in
# `key_of` (`sorted` leaves equals in their order) before you cut it. Each leaves `unused`, gets one holder, and loses its key: `pop` it from
# `key_of` with a default, and if there was one, take it out of `block_of` as well. `share`: take the block out of `unused` if it is there,
# and add a holder. `free`: take a holder away, and at 0 put the block at the end: `self.unused[block] = None`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "prefix_cache", "solution": true}
class MyPrefixCache:
    """Blocks 0 … num_blocks - 1; a free one keeps its contents until it is handed out again."""

    def __init__(self, num_blocks):
        self.unused = dict.fromkeys(range(num_blocks))  # its keys are the free blocks, in order
        self.holders = [0] * num_blocks
        self.block_of = {}  # key -> block
        self.key_of = {}  # block -> key

    @property
    def num_free(self):
        """Blocks that nobody holds."""
        return len(self.unused)

    def allocate(self, n):
        """`n` free blocks, or None: blank ones first, of each kind the longest free."""
        ### BEGIN SOLUTION
        if n > self.num_free:
            return None
        blocks = sorted(self.unused, key=lambda block: block in self.key_of)[:n]
        for block in blocks:
            del self.unused[block]
            self.holders[block] = 1
            key = self.key_of.pop(block, None)
            if key is not None:
                del self.block_of[key]
        return blocks
        ### END SOLUTION

    def publish(self, block, key):
        """`block` contains what `key` names, unless another block is known to."""
        ### BEGIN SOLUTION
        if key not in self.block_of:
            self.block_of[key] = block
            self.key_of[block] = key
        ### END SOLUTION

    def lookup(self, keys):
        """The blocks of the leading keys that are known."""
        ### BEGIN SOLUTION
        hits = []
        for key in keys:
            if key not in self.block_of:
                break
            hits.append(self.block_of[key])
        return hits
        ### END SOLUTION

    def share(self, blocks):
        """One more holder for each of `blocks`."""
        ### BEGIN SOLUTION
        for block in blocks:
            self.unused.pop(block, None)
            self.holders[block] += 1
        ### END SOLUTION

    def free(self, blocks):
        """One holder less for each of `blocks`, in order; a block without one is free."""
        ### BEGIN SOLUTION
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.unused[block] = None
        ### END SOLUTION

# %%
with attempt():
    cache = MyPrefixCache(3)
    first, second = cache.allocate(2)
    cache.publish(first, "a")
    cache.publish(second, "ab")
    cache.free([second, first])
    print("freed, and still found:", cache.lookup(["a", "ab"]))
    print("allocate(2) takes", cache.allocate(2), "and leaves", cache.lookup(["a", "ab"]))

# %% nbgrader={"grade_id": "prefix_cache-check", "grade": true}
check.prefix_cache(MyPrefixCache)

# %% [markdown]
# ## Where this leads
#
# [prefix.py](../../minipaged/cache/prefix.py) hashes blocks as in task 1, with a tag in front of every field so that none can be mistaken for
# another. [block_pool.py](../../minipaged/cache/block_pool.py) is the pool of exercises 04, 09 and this one in one class. Why does
# a request free its blocks last one first? Then the end of a chain is given up before its beginning, and what is left can still be hit.
