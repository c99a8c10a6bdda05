# %% [markdown]
# # 05 · Exercise: attention through a block table
#
# The lesson is [05 · Attention through the table](../../notebooks/05_paged_attention.ipynb). There the keys and values of a
# request lay scattered over a pool, and attention did not mind. Here you write that attention, in plain torch.
#
# The task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own, with `torch` imported: any other import or helper that you need must stand in the same cell. Run
# the check as often as you like; it shows the input, what was expected, what your code answered, and what usually
# causes that.

# %%
import math

import torch

from coursekit.checks import attempt, check

# %% [markdown]
# ## Task 1 · Attention through a block table
#
# *About 12 lines · difficulty 3 of 5 · 40 minutes · 5 points*
#
# One decode step: each sequence of a batch brings the query of its newest token, which sees all tokens of the sequence. Their
# keys and values are in the cache already, its own among them.
#
# **Contract.** `paged_attention(query, key_cache, value_cache, block_tables, context_lens)` answers float32
# `[num_seqs, num_query_heads, head_size]`.
# - `query`: float32 `[num_seqs, num_query_heads, head_size]`.
# - `key_cache` and `value_cache`: float32 `[num_blocks, block_size, num_kv_heads, head_size]`. They are read, not changed, as is every argument.
# - `block_tables`: int32 `[num_seqs, max_blocks]`. Token `p` of sequence `i` is in block `block_tables[i, p // block_size]`, at
#   offset `p % block_size`.
# - `context_lens`: int32 `[num_seqs]`, how many tokens each sequence has.
# - For each query head: softmax of the scores $q \cdot k / \sqrt{\text{head size}}$ over the tokens of the sequence, then the sum
#   of their values with these weights. `num_query_heads` is a multiple of `num_kv_heads`; query head `h` reads KV head
#   `h // (num_query_heads // num_kv_heads)`.
# - Nothing but the tokens of the sequence may matter. Other slots hold anything, NaN too. Entries of `block_tables` beyond those
#   that a sequence needs are padding and can be any number, also one that is no block.
# - A sequence of 0 tokens is padding of the batch. Its output is 0.
#
# **Example.** Block size 2, head size 1, one head. The table of the sequence is `[2, 0, 99]` and it has 3 tokens: two in block
# 2, one in block 0. Their values are 1, 2 and 6. With a query of 0 all scores are 0, the three weights 1/3, and the output is
# (1 + 2 + 6) / 3 = 3. With a query of 1 and keys 0, 0 and ln 2 the weights are 1/4, 1/4 and 2/4, and the output is 3.75. The second
# slot of block 0 may hold NaN, and block 99 does not exist.
#
# <details><summary>Hint 1</summary>
#
# Take the sequences one by one. Of each, gather the keys and values of its tokens into two small tensors
# `[length, num_kv_heads, head_size]`; after that it is the attention of any textbook.
#
# <details><summary>Hint 2</summary>
#
# Do not read whole blocks and mask what is too much: a weight of 0 times a value of NaN is NaN. Compute the slots of exactly the
# positions `0 … length - 1`. They index a cache in which blocks and offsets are one axis: `cache.flatten(0, 1)`. So padding of the
# table is never looked at either.
#
# <details><summary>Hint 3</summary>
#
# With `p = torch.arange(length)` the slots are `block_tables[i, p // block_size] * block_size + p % block_size`. Query heads 0, 1, 2
# share KV head 0 when there are three to one: `keys.repeat_interleave(3, dim=1)` (and not `repeat`, which gives 0, 1, 2, 0, 1, 2).
# Scores: `torch.einsum("hd,khd->hk", query[i], keys)`. `torch.softmax` does not overflow. Sums over no tokens are 0 by
# themselves.
#
# </details></details></details>

# %% nbgrader={"grade_id": "paged_attention", "solution": true}
def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
    """One decode step for each sequence: float32 [num_seqs, num_query_heads, head_size]."""
    ### BEGIN SOLUTION
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    output = torch.zeros_like(query)
    for i, length in enumerate(context_lens.tolist()):
        p = torch.arange(length)
        slots = block_tables[i, p // block_size] * block_size + p % block_size
        keys = key_cache.flatten(0, 1)[slots].repeat_interleave(group, dim=1)
        values = value_cache.flatten(0, 1)[slots].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", query[i], keys) / head_size**0.5
        output[i] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values)
    return output
    ### END SOLUTION

# %%
with attempt():
    key_cache, value_cache = torch.full((2, 3, 2, 1, 1), torch.nan)  # 3 blocks of 2 slots
    key_cache[2, :, 0, 0] = torch.tensor([0.0, 0.0])
    key_cache[0, 0] = math.log(2)
    value_cache[2, :, 0, 0] = torch.tensor([1.0, 2.0])
    value_cache[0, 0] = 6.0
    tables = torch.tensor([[2, 0, 99]], dtype=torch.int32)
    for query in (0.0, 1.0):
        rest = key_cache, value_cache, tables, torch.tensor([3], dtype=torch.int32)
        output = paged_attention(torch.full((1, 1, 1), query), *rest)
        print(f"query {query}: output {output.item():g}")

# %% nbgrader={"grade_id": "paged_attention-check", "grade": true}
check.paged_attention(paged_attention)

# %% [markdown]
# ## Beside the engine
#
# The engine's own attention, on a pool full of NaN in which four sequences of SmolLM2's shape (9 query heads, 3 KV heads) have
# their tokens in random blocks. Both must answer the same.

# %%
from minipaged import AttentionBatch, KVSpec, KVStorage
from minipaged.attention.torch_backend import TorchBackend

LENGTHS, BLOCK_SIZE = [1, 16, 17, 40], 16
generator = torch.Generator().manual_seed(5)
storage = KVStorage(KVSpec(1, num_kv_heads=3, head_size=64, dtype=torch.float32), 12, BLOCK_SIZE)
for tensor in storage.tensors:
    tensor.fill_(torch.nan)
order = iter(torch.randperm(12, generator=generator).tolist())
blocks = [[next(order) for _ in range(-(-length // BLOCK_SIZE))] for length in LENGTHS]
fill = AttentionBatch.build(blocks, LENGTHS, LENGTHS, BLOCK_SIZE)
keys, values = torch.randn(2, sum(LENGTHS), 3, 64, generator=generator)
engine, layer = TorchBackend(), storage.layer(0)
engine.write_kv(layer, keys, values, fill.slot_mapping)

# %%
with attempt():
    step = AttentionBatch.build(blocks, [1] * len(LENGTHS), LENGTHS, BLOCK_SIZE)
    query = torch.randn(len(LENGTHS), 9, 64, generator=generator)
    mine = paged_attention(query, layer.key, layer.value, step.block_tables, step.context_lens)
    engines = engine.paged_attention(query, layer, step, scale=64**-0.5)
    print("the same within 1e-5:", torch.allclose(mine, engines, atol=1e-5))

# %% [markdown]
# ## Where this leads
#
# The engine's version without a kernel is in [torch_backend.py](../../minipaged/attention/torch_backend.py): the same gathering,
# for many sequences in one product. Both copy every key before they use it once. A kernel follows the table while it reads, and
# copies nothing: exercises 06 and 07.
