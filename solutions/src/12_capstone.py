# %% [markdown]
# # 12 · Exercise: your parts in the engine
#
# The lesson is [12 · The engine, whole](../../notebooks/12_engine.ipynb). This is the last exercise. What you wrote one by one comes together
# here: your pool, your block table and your kernel go **into the real engine**, and SmolLM2 answers from memory that is yours.
#
# Write the parts once more, without looking if you can: you will find that you know them. Each task has one cell for your answer and a
# check below it. The check runs that cell alone, in a process of its own: an import or a helper that you need must stand in the same cell.
# It takes half a minute, for it runs the model.

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

from minipaged import LLM, SamplingParams, load_model
from coursekit.capstone import plug_in_attention, plug_in_memory
from coursekit.checks import attempt, check
from coursekit.given.launches import launch_decode
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · Your memory in the engine
#
# *About 25 lines · difficulty 3 of 5 · 40 minutes · 6 points*
#
# The engine asks for memory in three places: before a step it makes room for the step's tokens, it reads where they lie, and it gives the
# blocks of a finished request back. This is how your classes get there:

# %%
show_source(plug_in_memory)

# %% [markdown]
# **Contract.** `MyBlockPool(num_blocks)`, as in exercise 04:
# - `num_free`; `allocate(n)`, a list of `n` different free blocks, or `None` and nothing has changed; `free(blocks)`.
#
# `MyBlockTable(pool, block_size)`, as in exercise 04, of which the engine computes the slots itself:
# - `blocks`, the list of block numbers in the order of the tokens.
# - `append(n)`: room for `n` more tokens, with no block more than they need. `True`, or `False` and nothing has changed.
# - `free()`: every block goes back, and the table is empty.
#
# **Example.** A pool of 4 blocks of 4. One table appends 4 tokens, another 3: 2 blocks are free. Each appends one more: the first takes a block, the
# second does not, and 1 is free. Now `append(5)` to the second asks for 2 blocks more: `False`, and 1 block is still free.
#
# <details><summary>Hint 1</summary>
#
# The pool is a list of free blocks. The table is a list of its blocks and a number of tokens.
#
# <details><summary>Hint 2</summary>
#
# `append` asks the pool once, for the blocks of all tokens less those that it has. `t` tokens need `-(-t // block_size)` blocks.
#
# <details><summary>Hint 3</summary>
#
# Count the tokens only after the pool has given the blocks. In `allocate` compare before you take. In `free` of the table, hand the blocks to the pool and
# start a new list: a list that is handed over and then cleared would be empty for the pool, too.
#
# </details></details></details>

# %% nbgrader={"grade_id": "engine_memory", "solution": true}
class MyBlockPool:
    """Blocks 0 … num_blocks - 1, each free or held."""

    def __init__(self, num_blocks):
        ### BEGIN SOLUTION
        self.unused = list(range(num_blocks))
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
        if n > len(self.unused):
            return None
        return [self.unused.pop() for _ in range(n)]
        ### END SOLUTION

    def free(self, blocks):
        """Take blocks back."""
        ### BEGIN SOLUTION
        self.unused.extend(blocks)
        ### END SOLUTION


class MyBlockTable:
    """The blocks of one request."""

    def __init__(self, pool, block_size):
        ### BEGIN SOLUTION
        self.pool, self.block_size = pool, block_size
        self.blocks, self.num_tokens = [], 0
        ### END SOLUTION

    def append(self, n):
        """Room for `n` more tokens: True; False, and no change, when the pool is short."""
        ### BEGIN SOLUTION
        total = self.num_tokens + n
        blocks = self.pool.allocate(-(-total // self.block_size) - len(self.blocks))
        if blocks is None:
            return False
        self.blocks.extend(blocks)
        self.num_tokens = total
        return True
        ### END SOLUTION

    def free(self):
        """Give every block back and be empty."""
        ### BEGIN SOLUTION
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0
        ### END SOLUTION

# %% [markdown]
# The model in float32, and an engine with 24 blocks of 16 tokens. With your classes in it, it answers:

# %%
model = load_model("smollm2-135m", dtype=torch.float32, device="cpu")


def make_engine(num_blocks, block_size=16):
    """Without prefix caching no block is shared: then a pool like yours is all that it needs."""
    return LLM(
        model, device="cpu", num_blocks=num_blocks, block_size=block_size, max_model_len=256,
        enable_prefix_caching=False, attention_backend="torch",
    )


with attempt():
    llm = make_engine(num_blocks=24)
    pool = plug_in_memory(llm, MyBlockPool, MyBlockTable)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    for output in llm.generate(["Paris is", "Water boils at"], greedy, use_tqdm=False):
        print(output.prompt + output.outputs[0].text)
    print(pool.num_free, "of 24 blocks are free again")

# %% nbgrader={"grade_id": "engine_memory-check", "grade": true}
check.engine_memory(MyBlockPool, MyBlockTable)

# %% [markdown]
# What that is worth: the same memory, 512 token slots, once as two strips of 256 and once as 32 of your blocks, and ten requests.

# %%
def most_at_once(num_blocks, block_size):
    """Serve ten requests from your memory, and count how many ran together at most."""
    llm = make_engine(num_blocks, block_size)
    plug_in_memory(llm, MyBlockPool, MyBlockTable)
    counts = []
    llm.engine.on_step = lambda plan: counts.append(len(llm.engine.scheduler.running))
    prompts = [f"{number} is a number that" for number in range(10)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return max(counts)


with attempt():
    strips, blocks = most_at_once(2, block_size=256), most_at_once(32, block_size=16)
    print("two strips of 256 tokens:", strips, "at once")
    print("32 blocks of 16 tokens:  ", blocks, "at once")
    assert strips == 2 and blocks == 10

# %% [markdown]
# ## Task 2 · Your kernel in the engine
#
# *About 20 lines · difficulty 4 of 5 · 40 minutes · 6 points*
#
# After the prompt every step brings one token a request, and its attention reads through your table. Here your kernel does that, in all 30
# layers. It is the kernel of exercise 07 once more. The check needs your answer to task 1 as well: model, memory and kernel run together.
#
# **Contract.** The cell below loads the query, scaled, and stores `result` [`HEAD_PADDED`]; compute it in between.
# - `result` is the softmax of the scores `query · key` over the first `context_len` tokens, times their values.
# - The token at position `p` is in block `table_ptr[p // BLOCK_SIZE]` (int32), at offset `p % BLOCK_SIZE`.
# - Block `b`, offset `o`, KV head `h` is at `b * stride_block + o * stride_slot + h * stride_head`; the `HEAD_SIZE` numbers lie one behind the
#   other. `GROUP` neighbouring query heads share a KV head: 3 in SmolLM2, of 9.
# - What lies in places that are not the sequence's tokens does not matter, even if it is NaN. Read nothing outside of the tensors.
#
# **Example.** Blocks of 16 tokens, a table `[3, 1]` and 20 tokens. Token 17 is in block 1 at offset 1. With tiles of 16 the second tile
# has 4 live lanes, for the tokens 16 to 19, and 12 lanes that must count for nothing. Query head 5 reads KV head 5 // 3 = 1.
#
# <details><summary>Hint 1</summary>
#
# Keep three things from tile to tile: the largest score, the sum of the weights, the weighted sum of the values.
#
# <details><summary>Hint 2</summary>
#
# Mask every load, with `other=0.0`: an unused slot may hold NaN, and 0 times NaN is NaN. Scores of lanes beyond the end become minus infinity by `tl.where`.
#
# <details><summary>Hint 3</summary>
#
# When the largest score grows from `maximum` to `new_maximum`, what was summed so far shrinks by `tl.exp(maximum - new_maximum)`. Divide once, at the end.
#
# </details></details></details>

# %% nbgrader={"grade_id": "engine_kernel", "solution": true}
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
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for first in range(0, context_len, TILE):
        positions = first + tl.arange(0, TILE)
        live = positions < context_len
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        rows = blocks * stride_block + positions % BLOCK_SIZE * stride_slot
        places = (rows + head // GROUP * stride_head)[:, None] + dims[None, :]
        real = live[:, None] & in_head[None, :]
        key = tl.load(key_cache_ptr + places, mask=real, other=0.0)
        value = tl.load(value_cache_ptr + places, mask=real, other=0.0)
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

# %%
def attend(query, key_cache, value_cache, block_tables, context_lens, scale):
    """What the engine calls in each layer; a tile holds a block."""
    return launch_decode(
        my_decode_kernel, query.contiguous(), key_cache, value_cache, block_tables, context_lens,
        scale, tile=16,
    )


with attempt():
    llm = make_engine(num_blocks=6)
    plug_in_memory(llm, MyBlockPool, MyBlockTable)
    backend = plug_in_attention(llm, attend)
    prompt = "Blocks are"
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print(prompt + output.outputs[0].text)
    print("the kernel was called", backend.num_calls, "times")

# %% nbgrader={"grade_id": "engine_kernel-check", "grade": true}
check.engine_kernel(my_decode_kernel)

# %% [markdown]
# ## Where this leads
#
# Everything that a request's memory goes through in this engine you have now written yourself. What is left in
# [minipaged/](../../minipaged) is sharing (exercises 09 and 10), the scheduler (exercise 11), and speed. Read
# [engine.py](../../minipaged/engine/engine.py): nothing in it should surprise you.
