# %% [markdown]
# # 01 · Exercise: attention with a cache
#
# The lesson is [01 · Why keep K and V](../../notebooks/01_why_cache.ipynb). There the model read a text again for each new
# token, or kept keys and values and read only the new one. Here you count what that saves, and then write the step that keeps
# them.
#
# Each task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own: an import or a helper that you need must stand in the same cell. Run the check as often as
# you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
import torch

from coursekit.checks import attempt, check
from coursekit.given.rotary import rotate
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · Multiplications saved
#
# *About 6 lines · difficulty 1 of 5 · 15 minutes · 2 points*
#
# A score compares one query with one key: `head_size` multiplications. A model is given a prompt and writes some tokens after
# it, one a step. How many multiplications do all scores of one head take, in all steps together?
#
# **Contract.** `multiplications(prompt_tokens, new_tokens, head_size)` answers the pair `(again, kept)`, two whole numbers.
# - Writing `new_tokens` tokens takes as many steps. The first step's text is the prompt, at least 1 token; that of each later
#   step is one token longer. The last new token is written and never read.
# - A query is compared with the key of its own token and of all tokens before it, not with later ones.
# - `again`: each step computes the scores of all tokens of its text.
# - `kept`: the first step does the same; each later step computes the scores of its newest token only.
# - With `new_tokens` 0 there is no step, and the answer is `(0, 0)`.
#
# **Example.** A prompt of 3 tokens, 3 new ones, head size 2. The three texts have 3, 4 and 5 tokens. Again: 1 + 2 + 3 = 6
# comparisons, then 10, then 15, so 31, and 62 multiplications. Kept: 6, then 4, then 5, so 15, and 30 multiplications.
#
# <details><summary>Hint 1</summary>
#
# Draw a square for one step: a row for each query, a column for each key. Which of its fields are computed, and which of them
# were computed in the step before?
#
# <details><summary>Hint 2</summary>
#
# A text of `n` tokens makes a triangle of 1 + 2 + … + n fields. Reading everything again means a triangle for each step; keeping
# means one triangle, then one row for each step.
#
# <details><summary>Hint 3</summary>
#
# The lengths of the texts are `range(prompt_tokens, prompt_tokens + new_tokens)`. A triangle has `n * (n + 1) // 2` fields, the
# lowest row of it `n`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "multiplications", "solution": true}
def multiplications(prompt_tokens, new_tokens, head_size):
    """(again, kept): multiplications of queries with keys, in one head, in all steps together."""
    ### BEGIN SOLUTION
    again = kept = 0
    for n in range(prompt_tokens, prompt_tokens + new_tokens):
        triangle = n * (n + 1) // 2
        again += triangle
        kept += triangle if n == prompt_tokens else n
    return again * head_size, kept * head_size
    ### END SOLUTION

# %%
with attempt():
    print("the example:", tuple(multiplications(3, 3, 2)))
    for tokens in (16, 64, 256, 1024):
        again, kept = multiplications(tokens, tokens, 64)
        times = again / kept
        print(f"{tokens:>4} tokens after a prompt of {tokens:>4}: {times:6.1f} times as many")

# %% nbgrader={"grade_id": "multiplications-check", "grade": true}
check.multiplications(multiplications)

# %% [markdown]
# ## Task 2 · A step with a cache
#
# *About 10 lines · difficulty 3 of 5 · 30 minutes · 4 points*
#
# Now the step itself, in one layer. Where a token stands in the text is put into its query and its key by rotary embedding, which
# is given (and imported where your answer is checked, like `torch`):

# %%
show_source(rotate)

# %% [markdown]
# **Contract.** `step(query, key, value)` takes the next token of a text: float32 `query` `[num_query_heads, head_size]`, `key` and
# `value` `[num_kv_heads, head_size]`, none of them rotated yet.
# - The first token has position 0, the next one 1, and so on. Query and key are rotated to the position of their token; the value
#   is not.
# - `keys` and `values` hold what is kept, float32 `[num_tokens, num_kv_heads, head_size]`, in the order of the text: the rotated
#   key and the value of each token so far. After the step the new token is among them.
# - The answer is float32 `[num_query_heads, head_size]`: for each query head the softmax of the scores
#   $q \cdot k / \sqrt{\text{head size}}$ over all tokens so far, the new one too, then the sum of their values with these weights.
#   `num_query_heads` is a multiple of `num_kv_heads`; query head `h` reads KV head `h // (num_query_heads // num_kv_heads)`.
# - One object holds one text, and knows nothing of other objects.
#
# All answers must be those of reading the whole text again.
#
# **Example.** One head of size 2, and queries of 0, so that all weights of a step are equal. The values of three tokens are
# `[1, 0]`, `[3, 0]` and `[8, 3]`. The three steps answer `[1, 0]`, then `[2, 0]`, then `[4, 1]`.
#
# <details><summary>Hint 1</summary>
#
# Three things in this order: rotate, keep, attend. What is kept is never touched again; an old key was rotated in the step of its
# own token.
#
# <details><summary>Hint 2</summary>
#
# The position of the new token is how many tokens are kept *before* it is added: `len(self.keys)`, not 0. In each step of a model
# with a cache there is one new token, and a position that starts anew in each step is the bug of the lesson.
#
# <details><summary>Hint 3</summary>
#
# `self.keys = torch.cat((self.keys, rotate(key, position)[None]))`, and the same for the value without `rotate`. To attend,
# `self.keys.repeat_interleave(query.shape[0] // key.shape[0], dim=1)` gives each query head its key; what is kept stays as it is.
# Scores: `torch.einsum("hd,thd->ht", …)`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "cached_attention", "solution": true}
class MyCachedAttention:
    """Attention of one layer for one text, token by token, with the keys and values kept."""

    def __init__(self, num_kv_heads, head_size):
        self.keys = torch.empty(0, num_kv_heads, head_size)  # [num_tokens, num_kv_heads, head_size]
        self.values = torch.empty(0, num_kv_heads, head_size)

    def step(self, query, key, value):
        """Keep the next token's key and value, and attend to all so far: as `query`."""
        ### BEGIN SOLUTION
        position = len(self.keys)
        query, key = rotate(query, position), rotate(key, position)
        self.keys = torch.cat((self.keys, key[None]))
        self.values = torch.cat((self.values, value[None]))
        group = len(query) // len(key)
        keys = self.keys.repeat_interleave(group, dim=1)
        values = self.values.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", query, keys) / query.shape[-1] ** 0.5
        return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
        ### END SOLUTION

# %%
with attempt():
    attention = MyCachedAttention(num_kv_heads=1, head_size=2)
    for value in ([[1.0, 0.0]], [[3.0, 0.0]], [[8.0, 3.0]]):
        output = attention.step(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor(value))
        print("output", [round(x, 3) for x in output[0].tolist()], "kept", len(attention.keys))

# %% nbgrader={"grade_id": "cached_attention-check", "grade": true}
check.cached_attention(MyCachedAttention)

# %% [markdown]
# ## Where this leads
#
# A cache that grows by `torch.cat` makes two new tensors in each step and copies everything into them. And a server holds the caches of
# many texts, each of another length. How the engine holds them all without copying is the subject of exercises 04 to 06:
# `Attention.forward` in [llama.py](../../minipaged/model/llama.py) writes the new keys and values into slots of one large
# [cache](../../minipaged/cache/storage.py), and then attends, for all texts at once.
