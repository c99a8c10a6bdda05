# %% [markdown]
# # 07 · Exercise: a decode kernel, and its parts put together
#
# The lesson is [07 · A fast decode kernel](../../notebooks/07_fast_decode.ipynb). There softmax was taken in one pass and in
# pieces. Here you write both: the pass as a Triton kernel that reads keys and values through the block table, and the sum of the
# pieces in torch. Triton exists for Linux and Windows; no GPU is needed, the kernel runs in Triton's interpreter.
#
# Each task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own: an import or a helper that you need must stand in the same cell. Run the check as often as
# you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
# Triton decides when it is imported whether it compiles or interprets, so this comes first.
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This exercise runs on Linux and Windows, where Triton exists.")

import math

import torch
import triton
import triton.language as tl

from coursekit.checks import attempt, check
from coursekit.given.launches import launch_decode
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · Attention through the block table, in one pass
#
# *About 20 lines · difficulty 4 of 5 · 60 minutes · 6 points*
#
# Each sequence has one new token, with one query for each query head. Your program works for one query head of one sequence. It
# walks over the sequence's keys tile by tile and never holds all scores. This starts the programs:

# %%
show_source(launch_decode)

# %% [markdown]
# **Contract.** The cell below loads the query, scaled, and stores `result` [`HEAD_PADDED`]; compute it in between. Counts and strides
# are in elements.
# - `result` is the attention of the query over the first `context_len` tokens of the sequence: the softmax of the scores
#   `query · key`, times the values. Of a sequence without tokens it is 0.
# - The token at position `p` is in block `table_ptr[p // BLOCK_SIZE]`, at offset `p % BLOCK_SIZE`. Entries are int32; those
#   beyond the last block that the sequence needs hold anything.
# - Block `b`, offset `o`, KV head `h` of a cache is at `b * stride_block + o * stride_slot + h * stride_head`, `HEAD_SIZE` numbers one
#   after the other. `GROUP` neighbouring query heads share a KV head. A cache may have more than 2³¹ numbers.
# - What lies in places that are not the sequence's tokens does not matter, even if it is NaN. Read nothing outside of the tensors.
# - `TILE` and `HEAD_PADDED` are powers of two; `HEAD_SIZE`, `BLOCK_SIZE` and `GROUP` need not be.
# - Any score of float32 is possible: 1000 must not overflow, and -60000 must count.
# - The kernel must also compile for a card: no `break` or `continue`, no `return` inside a loop, and a variable that the loop
#   changes keeps its type. Call it in other cells only: in the process that compiles this one nothing can run.
#
# **Example.** Three keys with the scores 0, ln 3 and ln 6, their values 10, 20 and 40, tiles of 2. Softmax weighs them 1 : 3 : 6, so
# the result is (10 + 60 + 240) / 10 = 31. In one pass: after the first tile the maximum is ln 3, the sum of weights 1/3 + 1 = 4/3, and
# the weighted sum 10/3 + 20 = 70/3. The second tile has one live lane, with the larger score ln 6. What was there is multiplied by 3/6,
# and the key itself has weight 1: 2/3 + 1 = 5/3, and 35/3 + 40 = 155/3. The quotient is 31.
#
# <details><summary>Hint 1</summary>
#
# Three things go from tile to tile: the largest score so far, the sum of the weights, and the weighted sum of the values. They begin as
# `float("-inf")`, `0.0` and `tl.zeros([HEAD_PADDED], tl.float32)`. A tile begins at each of `range(0, context_len, TILE)`.
#
# <details><summary>Hint 2</summary>
#
# In a tile: positions, which of them are live, the block of each (widen it: `.to(tl.int64)`), the address of each row. Rows down and
# dimensions across make a tile `rows[:, None] + dims[None, :]`. Mask keys *and* values by both, with `other=0.0`. A lane that is not
# live gets the score minus infinity by `tl.where`.
#
# <details><summary>Hint 3</summary>
#
# The new maximum, `tl.maximum(maximum, tl.max(scores, axis=0))`, is finite, as each tile has a live lane. Weights are
# `tl.exp(scores - new_maximum)`, and what was there is multiplied by `tl.exp(maximum - new_maximum)`: 0 in the first tile.
# A dot product of every key with the query is `tl.sum(key * query[None, :], axis=1)`, the weighted sum of values
# `tl.sum(weights[:, None] * value, axis=0)`. At the end divide by the total, or by 1 where it is 0.
#
# </details></details></details>

# %% nbgrader={"grade_id": "decode_kernel", "solution": true}
@triton.jit
def my_decode_kernel(
    output_ptr,  # [num_seqs, num_query_heads, HEAD_SIZE] float32
    query_ptr,  # the same
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE] float32
    value_cache_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    scale,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    TILE: tl.constexpr,
):
    head, seq = tl.program_id(0), tl.program_id(1)
    row = (seq * tl.num_programs(0) + head) * HEAD_SIZE  # where the query is, and the result goes
    dims = tl.arange(0, HEAD_PADDED)
    in_head = dims < HEAD_SIZE
    query = tl.load(query_ptr + row + dims, mask=in_head, other=0.0) * scale
    table_ptr = block_tables_ptr + seq * stride_table
    context_len = tl.load(context_lens_ptr + seq)
    ### BEGIN SOLUTION
    kv_head = head // GROUP
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for first in range(0, context_len, TILE):
        positions = first + tl.arange(0, TILE)
        live = positions < context_len
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        rows = blocks * stride_block + positions % BLOCK_SIZE * stride_slot + kv_head * stride_head
        real = live[:, None] & in_head[None, :]
        key = tl.load(key_cache_ptr + rows[:, None] + dims[None, :], mask=real, other=0.0)
        value = tl.load(value_cache_ptr + rows[:, None] + dims[None, :], mask=real, other=0.0)
        scores = tl.where(live, tl.sum(key * query[None, :], axis=1), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights = tl.exp(scores - new_maximum)
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(weights[:, None] * value, axis=0)
        maximum = new_maximum
    result = acc / tl.where(total > 0.0, total, 1.0)
    ### END SOLUTION
    tl.store(output_ptr + row + dims, result, mask=in_head)

# %% [markdown]
# The example. Its three tokens lie in the blocks 4 and 1, of two slots each; everything else in the cache is NaN.

# %%
with attempt():
    keys, values = torch.full((2, 5, 2, 1, 1), torch.nan)  # five blocks of two slots
    for slot, score, value in [(8, 0.0, 10), (9, math.log(3), 20), (2, math.log(6), 40)]:
        keys.view(-1)[slot], values.view(-1)[slot] = score, value
    tables, lengths = torch.tensor([[4, 1]]).int(), torch.tensor([3]).int()
    query = torch.ones(1, 1, 1)
    result = launch_decode(my_decode_kernel, query, keys, values, tables, lengths, 1.0, tile=2)
    print("result:", round(result.item(), 4))

# %% nbgrader={"grade_id": "decode_kernel-check", "grade": true}
check.decode_kernel(my_decode_kernel)

# %% [markdown]
# ## Task 2 · Put the parts together
#
# *About 6 lines · difficulty 3 of 5 · 25 minutes · 3 points*
#
# One long conversation keeps few programs busy, so its keys are cut into parts and each part gets programs of its own. Every program
# stores its three numbers, and this function makes the result of them. No Triton here.
#
# **Contract.** `my_combine(maximum, total, acc)` gets three tensors of float32 and returns one, [`num_heads`, `head_size`].
# - `maximum` [`num_parts`, `num_heads`]: the largest score of the part.
# - `total` [`num_parts`, `num_heads`]: the sum of exp(score − maximum) over the keys of the part.
# - `acc` [`num_parts`, `num_heads`, `head_size`]: the sum of exp(score − maximum) · value. Not divided by `total`.
# - An empty part has −∞, 0 and zeros. There may be any number of them, and a head without any key at all has the result 0.
# - The result is the attention over all keys of all parts, for any scores of float32, whatever their range from head to head.
#
# **Example.** The keys of task 1, the first two in one part, the third in another: `maximum` is [ln 3, ln 6], `total` [4/3, 1] and `acc`
# [70/3, 40]. Relative to ln 6 the first part weighs half: the sum of weights is 2/3 + 1 = 5/3, the weighted sum 35/3 + 40 = 155/3, and
# the result is 31 again. A third part, empty, changes nothing.
#
# <details><summary>Hint 1</summary>
#
# It is the step from tile to tile once more, for all parts at once: bring all sums to the same maximum, then add.
#
# <details><summary>Hint 2</summary>
#
# The factor of a part is exp(its maximum − the largest maximum of the head). It is at most 1, and 0 for an empty part. Only where
# *all* parts of a head are empty is the difference −∞ − −∞, which is NaN.
#
# <details><summary>Hint 3</summary>
#
# The largest of each head is `maximum.max(dim=0).values`; where it is −∞, `torch.where` can put 0 in its place. The factor is
# [`num_parts`, `num_heads`]; for `acc` it needs one more dimension at its end, `factor[:, :, None]`. Divide by the total, or by 1 where
# it is 0.
#
# </details></details></details>

# %% nbgrader={"grade_id": "combine", "solution": true}
def my_combine(maximum, total, acc):
    """Attention [num_heads, head_size] over all parts; 0 for a head without keys."""
    ### BEGIN SOLUTION
    largest = maximum.max(dim=0).values
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    factor = torch.exp(maximum - shift)
    total = (factor * total).sum(dim=0)
    acc = (factor[:, :, None] * acc).sum(dim=0)
    return acc / torch.where(total > 0, total, 1.0)[:, None]
    ### END SOLUTION

# %%
with attempt():
    maximum = torch.tensor([[math.log(3)], [math.log(6)], [-math.inf]])  # three parts, one head
    total, acc = torch.tensor([[4 / 3], [1], [0]]), torch.tensor([[[70 / 3]], [[40]], [[0]]])
    print("together:", round(my_combine(maximum, total, acc).item(), 4))

# %% nbgrader={"grade_id": "combine-check", "grade": true}
check.combine(my_combine)

# %% [markdown]
# ## Where this leads
#
# The engine's readable kernel, [decode.py](../../minipaged/attention/kernels/decode.py), is nearly yours. The fast ones share
# [attend.py](../../minipaged/attention/kernels/attend.py): there the query heads of a group are rows of one tile, so that each key is read
# once. [decode_split.py](../../minipaged/attention/kernels/decode_split.py) cuts, and
# [decode_combine.py](../../minipaged/attention/kernels/decode_combine.py) puts together. It stores two numbers of a part in place of three:
# the average `acc / total`, and the log-sum-exp `maximum + log(total)`, which says how much it weighs.
