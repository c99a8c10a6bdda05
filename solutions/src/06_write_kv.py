# %% [markdown]
# # 06 · Exercise: a kernel that writes keys and values
#
# The lesson is [06 · A first Triton kernel](../../notebooks/06_first_triton_kernel.ipynb). There the engine's kernel was
# read, run and compiled. Here you write the first of them yourself. It needs Triton, which exists for Linux and Windows, and
# no GPU: the kernel runs in Triton's interpreter.
#
# The task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own: an import or a helper that you need must stand in the same cell. Run the check as often as
# you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
# Triton decides when it is imported whether it compiles or interprets, so this comes first.
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This exercise runs on Linux and Windows, where Triton exists.")

import torch
import triton
import triton.language as tl

from coursekit.checks import attempt, check
from coursekit.given.launches import launch_write_kv
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · Write keys and values to their slots
#
# *About 14 lines · difficulty 3 of 5 · 35 minutes · 5 points*
#
# In every step the model computes keys and values of new tokens, and each token has a slot. One program of your kernel moves
# one token's rows, of all KV heads, into both caches. Who starts the programs, and with which arguments:

# %%
show_source(launch_write_kv)

# %% [markdown]
# **Contract.** Program `t` writes token `t`. All counts and strides are in elements, not in bytes.
# - Head `h` of the token's keys is at `key_ptr + t * stride_token + h * stride_head`: `HEAD_SIZE` numbers, one after the other.
#   The token's values lie the same way after `value_ptr`. Between two tokens there may be numbers that are not yours.
# - The token's slot is `slots_ptr[t]`, an int32. Slot `s` is in block `s // BLOCK_SIZE`, at offset `s % BLOCK_SIZE`.
#   A negative slot means padding: nothing is written.
# - Block `b`, offset `o`, head `h` of a cache is at `b * stride_block + o * stride_slot + h * stride_cache_head` after the cache's
#   pointer, for keys and values alike. Between two blocks there may be other layers.
# - Nothing else in memory changes, not one number. Neither `NUM_HEADS` nor `HEAD_SIZE` need be powers of two; `HEADS_PADDED`
#   and `HEAD_PADDED` are the powers of two that hold them. A cache may have more than 2³¹ numbers.
# - The kernel must also compile for a card: no `break` or `continue`, and no `return` inside a loop. Call it in other cells
#   only: in the process that compiles this one nothing can run.
#
# **Example.** Blocks of 4 slots, 2 heads of 4 numbers, everything side by side: `stride_cache_head` is 4, `stride_slot` is 8 and
# `stride_block` is 32. A token with slot 9 goes to block 2, offset 1. Its head 0 is at 2 × 32 + 1 × 8 = 72, its head 1 at 76:
# it fills the numbers 72 to 79 of each cache.
#
# <details><summary>Hint 1</summary>
#
# Two things to find: where the rows come from, and where they go. Both are sums of an index times a stride. The first depends on the
# token only, the second on the slot only; and both are the same for keys and for values.
#
# <details><summary>Hint 2</summary>
#
# `tl.arange(0, HEADS_PADDED)[:, None]` is a column of heads, `tl.arange(0, HEAD_PADDED)[None, :]` a row of numbers; their
# sum is a tile of both. The tile has more lanes than there are numbers: a mask must switch off heads *and* numbers that do not exist, in the
# load and in the store. The last head's padding would fall on somebody else's slot.
#
# <details><summary>Hint 3</summary>
#
# `slot = tl.load(slots_ptr + token).to(tl.int64)`: widened before it is multiplied, because `block * stride_block` is a 32-bit
# product otherwise. Then `if slot >= 0:` around `tl.load(key_ptr + source, mask=real, other=0.0)` and
# `tl.store(key_cache_ptr + target, …, mask=real)`, and the same once more for values.
#
# </details></details></details>

# %% nbgrader={"grade_id": "write_kv", "solution": true}
@triton.jit
def my_write_kv(
    key_ptr,  # [num_tokens, NUM_HEADS, HEAD_SIZE]
    value_ptr,
    slots_ptr,  # [num_tokens] int32
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE]
    value_cache_ptr,
    stride_token,
    stride_head,
    stride_block,
    stride_slot,
    stride_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    ### BEGIN SOLUTION
    slot = tl.load(slots_ptr + token).to(tl.int64)  # widened before it is multiplied
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_PADDED)[None, :]
    real = (head < NUM_HEADS) & (dims < HEAD_SIZE)
    source = token * stride_token + head * stride_head + dims
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = block * stride_block + offset * stride_slot + head * stride_cache_head + dims
    key = tl.load(key_ptr + source, mask=real, other=0.0)
    tl.store(key_cache_ptr + target, key, mask=real)
    value = tl.load(value_ptr + source, mask=real, other=0.0)
    tl.store(value_cache_ptr + target, value, mask=real)
    ### END SOLUTION

# %% [markdown]
# The example: one token of ones, slot 9. (Here, too, an address outside of the tensors is an `IndexError`; on a card it would be
# somebody else's memory.)

# %%
with attempt():
    ones, caches = torch.ones(1, 2, 4), torch.zeros(2, 3, 4, 2, 4)
    slots = torch.tensor([9], dtype=torch.int32)
    launch_write_kv(my_write_kv, ones, ones, slots, caches[0], caches[1])
    print("numbers of the key cache:  ", caches[0].flatten().nonzero().flatten().tolist())
    print("numbers of the value cache:", caches[1].flatten().nonzero().flatten().tolist())

# %% nbgrader={"grade_id": "write_kv-check", "grade": true}
check.write_kv(my_write_kv)

# %% [markdown]
# ## Where this leads
#
# The engine's kernel is [write_kv.py](../../minipaged/attention/kernels/write_kv.py). It has your lines and a few more: its caches may
# hold 8-bit numbers, so it also computes a scale for each head (lesson 13). Its slots are 64-bit already, because
# [batch.py](../../minipaged/attention/batch.py) makes them so. The check compiled your kernel for two cards; `minipaged kernels` shows what
# the compiler makes of the engine's.
