# %% [markdown]
# # 04 · Exercise: an allocator and a block table
#
# The lesson is [04 · Blocks and block tables](../../notebooks/04_block_tables.ipynb). There you saw a pool hand out
# blocks, and a table that says where a sequence's tokens lie. Here you write both.
#
# Each task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own: an import or a helper that you need must stand in the same cell. Run the check as often as
# you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
from coursekit.checks import attempt, check
from coursekit.given.pools import ScatteredPool
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · A block allocator
#
# *About 12 lines · difficulty 2 of 5 · 15 minutes · 3 points*
#
# A pool owns blocks `0 … num_blocks - 1` and knows which are free. It knows nothing of tokens or requests.
#
# **Contract.**
# - `num_free`: how many blocks are free, an int.
# - `allocate(n)`: a list of `n` different free blocks, which are held from then on; in any order you like. When
#   fewer than `n` are free it answers `None`, and nothing has changed.
# - `free(blocks)`: those blocks are free again; the list itself is the caller's and stays as it is. A block that is not held, that does not exist, or that is named twice
#   in one call raises `ValueError`, and nothing has changed.
#
# **Example.** A pool of 4 blocks. `allocate(3)` answers, say, `[3, 2, 1]` and leaves `num_free` at 1. `allocate(2)` now
# answers `None`, and `num_free` is still 1. After `free([3, 1])` it is 3. `free([3])` a second time raises `ValueError`.
#
# <details><summary>Hint 1</summary>
#
# A list of free blocks is enough to allocate: taking from its end and adding to its end cost the same however long it is.
#
# <details><summary>Hint 2</summary>
#
# To notice a wrong `free` you must know what is held. A set answers "is this block held?" at once.
#
# <details><summary>Hint 3</summary>
#
# Check everything first, change afterwards: in `allocate` compare `n` with `num_free` before the first block is taken;
# in `free` look for blocks that are not held, and compare `len(set(blocks))` with `len(blocks)`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "allocator", "solution": true}
class MyBlockPool:
    """Blocks 0 … num_blocks - 1, each free or held."""

    def __init__(self, num_blocks):
        ### BEGIN SOLUTION
        self.unused = list(range(num_blocks))
        self.held = set()
        ### END SOLUTION

    @property
    def num_free(self):
        """Blocks that are free."""
        ### BEGIN SOLUTION
        return len(self.unused)
        ### END SOLUTION

    def allocate(self, n):
        """`n` blocks, or None when fewer are free; then nothing has changed."""
        ### BEGIN SOLUTION
        if n > self.num_free:
            return None
        blocks = [self.unused.pop() for _ in range(n)]
        self.held.update(blocks)
        return blocks
        ### END SOLUTION

    def free(self, blocks):
        """Take blocks back; ValueError, and no change, when one is not held or named twice."""
        ### BEGIN SOLUTION
        wrong = [block for block in blocks if block not in self.held]
        if wrong or len(set(blocks)) < len(blocks):
            raise ValueError(f"free({blocks}): {wrong} are not held, or one is named twice")
        self.held.difference_update(blocks)
        self.unused += blocks
        ### END SOLUTION

# %%
with attempt():
    pool = MyBlockPool(4)
    print("allocate(3) takes", len(pool.allocate(3)), "blocks and leaves", pool.num_free)
    print("allocate(2) answers", pool.allocate(2), "and leaves", pool.num_free)

# %% nbgrader={"grade_id": "allocator-check", "grade": true}
check.allocator(MyBlockPool)

# %% [markdown]
# ## Task 2 · A block table and its slots
#
# *About 12 lines · difficulty 2 of 5 · 20 minutes · 4 points*
#
# A table belongs to one sequence. It lists the blocks that hold the sequence's tokens, in the order of the tokens. The pool is
# given this time, so that this task does not depend on the first:

# %%
show_source(ScatteredPool)

# %% [markdown]
# **Contract.**
# - `blocks`: the blocks in use, a list of ints, and `num_tokens`: both empty at first.
# - `append(n)`: make room for `n` more tokens and answer `True`. Take from the pool only what these tokens need beyond the
#   room that the last block still has. When the pool is short answer `False`, and nothing has changed.
# - `slots(start, stop)`: for each token `start … stop - 1` the slot where its keys and values lie, as a list of ints. Slots number
#   the whole pool: block `b` has the slots `b * block_size … b * block_size + block_size - 1`.
# - `free()`: every block goes back to the pool, and the table is empty again.
#
# **Example.** Block size 4, and the pool hands out block 7, then block 2. `append(5)` takes both, and the five tokens are in the
# slots `[28, 29, 30, 31, 8]`: four in block 7 (7 × 4 = 28), one in block 2 (2 × 4 = 8). Three more tokens fit without a new
# block; the ninth needs one.
#
# <details><summary>Hint 1</summary>
#
# How many blocks do `t` tokens need? Try 1, 4, 5 and 8 tokens with block size 4 before you write it down: 1, 1, 2, 2.
#
# <details><summary>Hint 2</summary>
#
# What to take is what the tokens need *afterwards* less what the table has already. Ask the pool once for all of it: its
# answer is then all or nothing, and so is yours.
#
# <details><summary>Hint 3</summary>
#
# Token `p` is in entry `p // block_size` of the table, at offset `p % block_size`. The slot is
# `blocks[p // block_size] * block_size + p % block_size`. Rounding up is `-(-t // block_size)`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "block_table", "solution": true}
class MyBlockTable:
    """The blocks of one sequence, taken from `pool` when a token needs one."""

    def __init__(self, pool, block_size):
        self.pool = pool
        self.block_size = block_size
        self.blocks = []
        self.num_tokens = 0

    def append(self, n):
        """Room for `n` more tokens: True; False, and no change, when the pool is short."""
        ### BEGIN SOLUTION
        total = self.num_tokens + n
        blocks = self.pool.allocate(-(-total // self.block_size) - len(self.blocks))
        if blocks is None:
            return False
        self.blocks += blocks
        self.num_tokens = total
        return True
        ### END SOLUTION

    def slots(self, start, stop):
        """The slots of the tokens `start` … `stop` - 1, a list of ints."""
        ### BEGIN SOLUTION
        return [
            self.blocks[p // self.block_size] * self.block_size + p % self.block_size
            for p in range(start, stop)
        ]
        ### END SOLUTION

    def free(self):
        """Give every block back and be empty."""
        ### BEGIN SOLUTION
        self.pool.free(self.blocks)
        self.blocks = []
        self.num_tokens = 0
        ### END SOLUTION

# %%
with attempt():
    table = MyBlockTable(ScatteredPool(8), block_size=4)
    table.append(5)
    print("5 tokens lie in blocks", table.blocks, "and slots", table.slots(0, 5))

# %% nbgrader={"grade_id": "block_table-check", "grade": true}
check.block_table(MyBlockTable)

# %% [markdown]
# ## Where this leads
#
# The engine's own pool is [block_pool.py](../../minipaged/cache/block_pool.py), its table
# [block_table.py](../../minipaged/cache/block_table.py). Open them: the free list is there, and two things that later lessons add.
# A block may be held by several tables (exercise 09), and a freed block may keep its contents until it is needed (exercise 10).
