# %% [markdown]
# # 09 · Exercise: fork and copy-on-write
#
# The lesson is [09 · Copy-on-write](../../notebooks/09_copy_on_write.ipynb). There one prompt was answered several times, and
# the answers shared the prompt's blocks. Here you write what makes that safe: counts that say how many hold a
# block, and a table that copies a block at the last moment, when somebody writes into it.
#
# Each task has one cell for your answer and a check below it. The check runs that cell alone, in a process of its own: an
# import or a helper that you need must stand in the same cell.

# %%
from coursekit.checks import attempt, check
from coursekit.given.shared_pool import SharedPool

# %% [markdown]
# ## Task 1 · Reference counts
#
# *About 15 lines · difficulty 2 of 5 · 20 minutes · 3 points*
#
# A pool like that of exercise 04, whose blocks may have several holders.
#
# **Contract.**
# - `num_free`: how many blocks nobody holds. `ref_count(block)`: how many hold this one, 0 when it is free.
# - `allocate(n)`: a list of `n` different free blocks, each with one holder from now on; `None` when fewer are free, and then
#   nothing has changed.
# - `share(blocks)`: one more holder for each block. It takes no free block.
# - `free(blocks)`: one holder less for each block. A block is free again when its last holder has freed it.
# - In `share` and `free`, a block that nobody holds, that does not exist, or that is named twice in one call raises
#   `ValueError`, and nothing has changed.
#
# **Example.** A pool of 4. `allocate(2)` answers, say, `[3, 1]`; 2 are free. After `share([3])` block 3 has two holders, and still 2
# blocks are free. `free([3, 1])` leaves block 3 with one holder and block 1 free: 3 are free. A second `free([3])` makes it 4.
#
# <details><summary>Hint 1</summary>
#
# One list of counts, one number a block, says everything: a block is free exactly when its count is 0.
#
# <details><summary>Hint 2</summary>
#
# A block that was just given out has one holder, not none: the first `free` must bring it back.
#
# <details><summary>Hint 3</summary>
#
# `share` and `free` begin with the same question, so write it once: raise `ValueError` if
# `len(set(blocks)) < len(blocks)` or if a block is outside `range(num_blocks)` or has count 0. Only then change the counts.
#
# </details></details></details>

# %% nbgrader={"grade_id": "ref_counts", "solution": true}
class MySharedPool:
    """Blocks 0 … num_blocks - 1, each with any number of holders."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.unused = list(range(num_blocks))
        self.holders = [0] * num_blocks

    @property
    def num_free(self):
        """Blocks that nobody holds."""
        return len(self.unused)

    def ref_count(self, block):
        """Holders of `block`; 0 when it is free."""
        return self.holders[block]

    def allocate(self, n):
        """`n` free blocks with one holder each; None, and no change, when fewer are free."""
        ### BEGIN SOLUTION
        if n > self.num_free:
            return None
        blocks = [self.unused.pop() for _ in range(n)]
        for block in blocks:
            self.holders[block] = 1
        return blocks
        ### END SOLUTION

    def share(self, blocks):
        """One more holder for each of `blocks`."""
        ### BEGIN SOLUTION
        self.require_held(blocks)
        for block in blocks:
            self.holders[block] += 1
        ### END SOLUTION

    def free(self, blocks):
        """One holder less for each of `blocks`."""
        ### BEGIN SOLUTION
        self.require_held(blocks)
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.unused.append(block)

    def require_held(self, blocks):
        """ValueError for blocks that nobody holds or that are named twice."""
        held = [b for b in blocks if 0 <= b < self.num_blocks and self.holders[b]]
        if len(set(held)) < len(blocks):
            raise ValueError(f"{blocks}: not held, or named twice")
        ### END SOLUTION

# %%
with attempt():
    pool = MySharedPool(4)
    first, second = pool.allocate(2)
    pool.share([first])
    pool.free([first, second])
    print("free:", pool.num_free, "of 4; holders of the shared block:", pool.ref_count(first))

# %% nbgrader={"grade_id": "ref_counts-check", "grade": true}
check.ref_counts(MySharedPool)

# %% [markdown]
# ## Task 2 · Fork and copy-on-write
#
# *About 20 lines · difficulty 4 of 5 · 40 minutes · 5 points*
#
# A block table that can be forked. Its pool is a given one, `SharedPool`, which does what task 1 asks for: `allocate`, `share`,
# `free`, `ref_count`, `num_free`.
#
# **Contract.**
# - `blocks`, `num_tokens`: as in exercise 04.
# - `fork()`: a second table of the same class with the same tokens. It takes no block: every block has one more holder.
# - `append(n)`: make room for `n` more tokens. Answer the list of copies that must be done before the tokens are written: pairs
#   `(source block, destination block)`. The list has one pair when the first new token goes into a half-filled last block
#   that others hold too; the table then owns the destination and has given up the source. Otherwise the list is empty. When
#   the pool is short, answer `None`, and nothing has changed.
# - `free()`: give every block up, and be empty.
#
# **Example.** Block size 4, a table of 6 tokens in blocks `[9, 5]`, and a fork of it. The fork appends one token. The token belongs
# after tokens 4 and 5 in block 5, which the parent holds too. So the fork takes block 2, say, and answers `[(5, 2)]`; its blocks are
# now `[9, 2]`, the parent's still `[9, 5]`. Now the parent appends a token: it alone holds block 5 by now, and answers `[]`.
#
# <details><summary>Hint 1</summary>
#
# Full blocks are never written again, so only the last block can need a copy, and only when it has room left.
#
# <details><summary>Hint 2</summary>
#
# Whether to copy: `n > 0`, the last block is not full (`num_tokens % block_size`), and `pool.ref_count(blocks[-1]) > 1`. The copy needs
# a block as well. Ask the pool once, for it and the new blocks together: that makes a shortage harmless.
#
# <details><summary>Hint 3</summary>
#
# With the new blocks in hand: if a copy is needed, the first of them takes the place of the last block in the table, and the old
# last block is freed once (`pool.free([old])`). The rest is appended. Without that `free`, the last sharer would copy too.
#
# </details></details></details>

# %% nbgrader={"grade_id": "fork", "solution": true}
class MyForkingTable:
    """The blocks of one sequence, some of which other tables hold too."""

    def __init__(self, pool, block_size):
        self.pool = pool
        self.block_size = block_size
        self.blocks = []
        self.num_tokens = 0

    def fork(self):
        """A second table with the same tokens; takes no block."""
        ### BEGIN SOLUTION
        self.pool.share(self.blocks)
        child = MyForkingTable(self.pool, self.block_size)
        child.blocks = list(self.blocks)
        child.num_tokens = self.num_tokens
        return child
        ### END SOLUTION

    def append(self, n):
        """Room for `n` more tokens: the copies to do first, or None and nothing has changed."""
        ### BEGIN SOLUTION
        has_room = self.num_tokens % self.block_size > 0
        copies_tail = n > 0 and has_room and self.pool.ref_count(self.blocks[-1]) > 1
        total = self.num_tokens + n
        needed = -(-total // self.block_size) - len(self.blocks)
        new_blocks = self.pool.allocate(needed + copies_tail)
        if new_blocks is None:
            return None
        copies = []
        if copies_tail:
            shared, own = self.blocks[-1], new_blocks.pop(0)
            copies.append((shared, own))
            self.pool.free([shared])
            self.blocks[-1] = own
        self.blocks += new_blocks
        self.num_tokens = total
        return copies
        ### END SOLUTION

    def free(self):
        """Give every block up and be empty."""
        ### BEGIN SOLUTION
        self.pool.free(self.blocks)
        self.blocks = []
        self.num_tokens = 0
        ### END SOLUTION

# %%
with attempt():
    parent = MyForkingTable(SharedPool(12), block_size=4)
    parent.append(6)
    child = parent.fork()
    print("both hold", parent.blocks)
    print("the fork appends: copies", child.append(1), "and holds", child.blocks)
    print("the parent appends: copies", parent.append(1), "and holds", parent.blocks)

# %% nbgrader={"grade_id": "fork-check", "grade": true}
check.fork(MyForkingTable)

# %% [markdown]
# ## Where this leads
#
# [block_table.py](../../minipaged/cache/block_table.py) is this table with a name for each step: `tail_is_shared`,
# `blocks_to_append`, `append`, `fork`. Several tables that append in one step are counted by `append_all` at its end: of n tables
# that alone share a block, only n - 1 need a new one, so adding up what each would need asks for one block too many.
