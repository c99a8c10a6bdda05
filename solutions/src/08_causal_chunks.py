# %% [markdown]
# # 08 · Exercise: the corner of the mask, and a prompt in pieces
#
# The lesson is [08 · Prefill and chunks](../../notebooks/08_prefill_and_chunks.ipynb). There a mask in the wrong corner gave a
# fluent, wrong answer, and a prompt computed in chunks gave the right one. Here you write the mask, and then the chunks.
#
# Each task has one cell for your answer, and a check below it. The check takes that cell and runs it in a process of its own
# (for task 2 with your answer to task 1): an import or a helper that you need must stand in the same cell. Run the check as often
# as you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
import torch

from coursekit.checks import attempt, check
from coursekit.given.tiny_model import TinyModel
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · The corner of the mask
#
# *About 3 lines · difficulty 2 of 5 · 15 minutes · 2 points*
#
# A step computes the last tokens of a sequence: the queries. The keys are those of *all* its tokens, computed now or
# before. Which key may which query see?
#
# **Contract.** `my_chunk_mask(num_queries, num_keys)` returns a mask [`num_queries`, `num_keys`] of booleans, a tensor or nested lists. Entry
# [i][j] is true when query `i` sees key `j`.
# - Key `j` stands at position `j` of the text. The last query stands at the last key.
# - A query sees the keys at its own position and before.
# - A query that stands before the first key sees none: its row is all false. There may be no key at all.
#
# **Example.** 2 queries, 5 keys. The queries stand at positions 3 and 4, so the first row is true for keys 0 to 3, the second for 0 to 4. With
# equal scores and the values 1, 2, 3, 4, 5 they get the averages 2.5 and 3. With 3 queries and 2 keys the rows have 0, 1 and 2 true entries.
#
# <details><summary>Hint 1</summary>
#
# Write the mask of 2 queries and 5 keys down by hand before you write code. Where does the diagonal of ones end: in which corner?
#
# <details><summary>Hint 2</summary>
#
# Query `i` is not at position `i`. It is as far from the last query as its position is from the last key.
#
# <details><summary>Hint 3</summary>
#
# The position of query `i` is `num_keys - num_queries + i`. A column of these positions compared with a row of key positions is
# the whole mask: `torch.arange(…)[:, None]` and `torch.arange(…)[None, :]`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "chunk_mask", "solution": true}
def my_chunk_mask(num_queries, num_keys):
    """Which key each query sees, [num_queries, num_keys]; the last query stands at the last key."""
    ### BEGIN SOLUTION
    query = torch.arange(num_queries)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys)[None, :]
    return key <= query
    ### END SOLUTION

# %%
with attempt():
    mask = torch.as_tensor(my_chunk_mask(2, 5)).double()
    print(mask.int().tolist())
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).double()
    print("averages:", (mask @ values / mask.sum(dim=1)).tolist())

# %% nbgrader={"grade_id": "chunk_mask-check", "grade": true}
check.chunk_mask(my_chunk_mask)

# %% [markdown]
# ## Task 2 · A prompt in pieces
#
# *About 14 lines · difficulty 3 of 5 · 35 minutes · 5 points*
#
# A prompt is computed chunk by chunk, and what is known at the end must be the same as if it had been computed at once. The model is given. It is small,
# but has what counts: two layers, three query heads for each KV head, and positions that turn queries and keys.

# %%
show_source(TinyModel)

# %% [markdown]
# **Contract.** `my_chunked_prefill(model, tokens, chunk_lens, cache, slots)` returns the logits after the prompt's last token, [32], as `model.logits` gives them.
# - `tokens` [n], int64: the prompt. `chunk_lens`: a list of lengths, each at least 1; together they are n. Chunks are computed in this
#   order, and each token goes through the model once.
# - `cache` [2 layers, 2, number of slots, 2 KV heads, 8]: `cache[layer, 0]` are the keys of a layer, `cache[layer, 1]` its values. What is in it at first is
#   not yours, and may be NaN.
# - `slots` [n], int64: token `p` keeps its keys and values in slot `slots[p]`. Afterwards those of every token are there, and no other slot
#   has changed.
# - In each layer: `project`, `attend`, `finish`. `my_chunk_mask` of task 1 is there.
#
# **Example.** 5 tokens, slots [6, 7, 1, 4, 5], chunks [2, 3]. The first chunk has positions 0 and 1, writes to slots 6 and 7, and its 2 queries see these
# 2 keys. The second has positions 2, 3, 4 and writes to slots 1, 4, 5. Its 3 queries see the 5 keys in slots 6, 7, 1, 4, 5, through the mask of 3
# queries and 5 keys. The logits are those of position 4.
#
# <details><summary>Hint 1</summary>
#
# Two loops: over chunks, and inside over layers. A chunk begins where the one before has ended; keep a `start` and a `stop`.
#
# <details><summary>Hint 2</summary>
#
# The positions of a chunk go on from the chunk before. In a layer first write, then read, so that a token also sees itself: writing takes
# `slots[start:stop]`, reading `slots[:stop]`.
#
# <details><summary>Hint 3</summary>
#
# Keys are assigned to `cache[layer, 0, slots[start:stop]]` and read from `cache[layer, 0, slots[:stop]]`, in the order of the text. The mask is
# `my_chunk_mask(stop - start, stop)`. After the last chunk: `model.logits(hidden[-1])`, the logits of one row.
#
# </details></details></details>

# %% nbgrader={"grade_id": "chunked_prefill", "solution": true}
def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    """Compute a prompt in chunks, its keys and values kept in `cache`; the last token's logits."""
    ### BEGIN SOLUTION
    start = 0
    for length in chunk_lens:
        stop = start + length
        positions = torch.arange(start, stop)
        hidden = model.embed(tokens[start:stop])
        for layer in range(model.num_layers):
            query, key, value = model.project(layer, hidden, positions)
            cache[layer, 0, slots[start:stop]] = key
            cache[layer, 1, slots[start:stop]] = value
            keys, values = cache[layer, :, slots[:stop]]
            attended = model.attend(query, keys, values, my_chunk_mask(length, stop))
            hidden = model.finish(layer, hidden, attended)
        start = stop
    return model.logits(hidden[-1])
    ### END SOLUTION

# %% [markdown]
# A prompt of ten tokens in three ways. Does the model say the same next?

# %%
with attempt():
    tokens, slots = torch.arange(10) * 7 % 32, torch.tensor([9, 8, 3, 4, 5, 0, 1, 2, 11, 10])
    for chunk_lens in ([10], [4, 4, 2], [1] * 10):
        cache = torch.full((2, 2, 12, 2, 8), torch.nan)
        logits = my_chunked_prefill(TinyModel(), tokens, chunk_lens, cache, slots)
        print(f"chunks {chunk_lens}: next word {int(logits.argmax())}")

# %% nbgrader={"grade_id": "chunked_prefill-check", "grade": true}
check.chunked_prefill(my_chunked_prefill)

# %% [markdown]
# ## Where this leads
#
# The engine never builds the mask. Its kernel, [prefill.py](../../minipaged/attention/kernels/prefill.py), computes how many keys a row sees, from the same
# difference of lengths. Positions and slots of a step with many sequences come from `new_token_slots` in
# [batch.py](../../minipaged/attention/batch.py). How long the chunks are is the scheduler's business,
# [scheduler.py](../../minipaged/core/scheduler.py), and exercise 11's.
