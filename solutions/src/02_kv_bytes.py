# %% [markdown]
# # 02 · Exercise: bytes of the cache, and what fits
#
# The lesson is [02 · How the cache grows](../../notebooks/02_kv_growth.ipynb). There the prediction and the measurement
# agreed to the byte. Here you write the prediction, and the plan that a server makes from it before it starts.
#
# Each task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own: an import or a helper that you need must stand in the same cell. Run the check as often as
# you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
from coursekit.checks import attempt, check
from coursekit.given.models import LLAMA_70B, OPT_13B, SMOLLM2_135M, ModelShape
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · Bytes per token
#
# *About 3 lines · difficulty 1 of 5 · 10 minutes · 2 points*
#
# How many bytes of keys and values does a model keep for one token? What its configuration says comes in this form:

# %%
show_source(ModelShape)

# %% [markdown]
# **Contract.** `bytes_per_token(model, bits_per_number, scale_bytes)` answers a whole number of bytes.
# - In each layer every KV head keeps two vectors for a token, a key and a value, of `head_size` numbers each.
# - `bits_per_number` is 4, 8, 16 or 32. The bits of a vector always fill whole bytes.
# - `scale_bytes`: each *vector* brings this many bytes beside its numbers. Small formats need such a scale; for 16 and 32
#   bits it is 0.
#
# **Example.** 2 layers, 4 query heads, 2 KV heads, head size 8: that makes 2 × 2 × 2 = 8 vectors a token. In 16 bits a vector
# takes 8 × 2 = 16 bytes, so a token takes 128. In 8 bits with a scale of 4 bytes a vector takes 8 + 4 = 12, a token 96: more
# than half of 128.
#
# <details><summary>Hint 1</summary>
#
# Count vectors first, then the bytes of one vector, then multiply. Which of the model's five numbers does a stored vector not
# depend on?
#
# <details><summary>Hint 2</summary>
#
# Two of the five play no part. Queries are not kept, so their number does not matter. And the head size is a number of its own:
# in some models it is not `hidden_size / num_query_heads`.
#
# <details><summary>Hint 3</summary>
#
# There are `2 * model.num_layers * model.num_kv_heads` vectors. One of them takes `model.head_size` times `bits_per_number`
# bits, eight bits to the byte, and its scale once.
#
# </details></details></details>

# %% nbgrader={"grade_id": "bytes_per_token", "solution": true}
def bytes_per_token(model, bits_per_number, scale_bytes):
    """Bytes of keys and values that `model`, a ModelShape, keeps for one token."""
    ### BEGIN SOLUTION
    vectors = 2 * model.num_layers * model.num_kv_heads
    bytes_per_vector = model.head_size * bits_per_number // 8 + scale_bytes
    return vectors * bytes_per_vector
    ### END SOLUTION

# %%
with attempt():
    small = ModelShape(
        num_layers=2, num_query_heads=4, num_kv_heads=2, head_size=8, hidden_size=32
    )
    print("the example:", bytes_per_token(small, 16, 0), "and", bytes_per_token(small, 8, 4))
    for name, model in {"SmolLM2-135M": SMOLLM2_135M, "OPT-13B": OPT_13B}.items():
        print(f"{name:14} {bytes_per_token(model, 16, 0):>8} bytes for each token, in 16 bits")

# %% nbgrader={"grade_id": "bytes_per_token-check", "grade": true}
check.bytes_per_token(bytes_per_token)

# %% [markdown]
# ## Task 2 · A memory plan
#
# *About 8 lines · difficulty 2 of 5 · 20 minutes · 3 points*
#
# A server decides once, when it starts, how much of the card is for keys and values. The cache is given out in whole
# [blocks](../../docs/glossary.md#block) of `block_size` tokens, and a block belongs to one request. How many blocks are there,
# and how many requests of a given length live in them at once?
#
# **Contract.** `memory_plan(card_bytes, num_parameters, bits_per_weight, reserve_bytes, token_bytes, block_size,
# tokens_per_request)` answers the pair `(num_blocks, num_requests)`, two whole numbers.
# - The weights take `num_parameters` times `bits_per_weight` bits, rounded up to a whole byte. `bits_per_weight` may be a
#   fraction: 4.5 for a format of 4 bits with its scales.
# - `reserve_bytes` are kept for activations. What is left of the card is for keys and values, `token_bytes` for each token, in
#   whole blocks. What is less than a block is lost.
# - A request of `tokens_per_request` tokens (at least 1) takes as many whole blocks as it needs.
# - When the weights and the reserve are more than the card has: `ValueError`. When they take all of it: `(0, 0)`.
#
# **Example.** A card of 1000 bytes, 400 parameters of 8 bits, 100 bytes in reserve: 500 are left. At 10 bytes a token a block of
# 4 tokens takes 40 bytes, and there are 12 blocks; 20 bytes are lost. A request of 9 tokens takes 3 blocks, so 4 requests fit:
# the plan is `(12, 4)`. (Dividing 500 bytes by 9 × 10 would promise 5, and the fifth finds no room.)
#
# <details><summary>Hint 1</summary>
#
# Three divisions: weights from bits, blocks from bytes, requests from blocks. Decide for each one whether it rounds up or down,
# and who would lose out if you chose the other.
#
# <details><summary>Hint 2</summary>
#
# What is *needed* is rounded up: bytes of the weights, blocks of a request. What there *is* is rounded down: blocks of the
# memory, requests in the blocks. Look for a negative rest before you divide: `-7 // 40` is `-1`, not an error.
#
# <details><summary>Hint 3</summary>
#
# `left = card_bytes - math.ceil(num_parameters * bits_per_weight / 8) - reserve_bytes`. Blocks: `left // (block_size *
# token_bytes)`. A request needs `math.ceil(tokens_per_request / block_size)` of them.
#
# </details></details></details>

# %% nbgrader={"grade_id": "memory_plan", "solution": true}
import math


def memory_plan(
    card_bytes,
    num_parameters,
    bits_per_weight,
    reserve_bytes,
    token_bytes,
    block_size,
    tokens_per_request,
):
    """(num_blocks, num_requests); ValueError when weights and reserve do not fit the card."""
    ### BEGIN SOLUTION
    weight_bytes = math.ceil(num_parameters * bits_per_weight / 8)
    kv_bytes = card_bytes - weight_bytes - reserve_bytes
    if kv_bytes < 0:
        raise ValueError(f"{weight_bytes} + {reserve_bytes} bytes do not fit {card_bytes}")
    num_blocks = kv_bytes // (block_size * token_bytes)
    blocks_per_request = math.ceil(tokens_per_request / block_size)
    return num_blocks, num_blocks // blocks_per_request
    ### END SOLUTION

# %%
with attempt():
    print("the example:", tuple(memory_plan(1000, 400, 8, 100, 10, 4, 9)))
    GB = 10**9
    token_bytes = bytes_per_token(LLAMA_70B, 16, 0)
    for tokens in (512, 4096, 32768):
        blocks, requests = memory_plan(80 * GB, 70 * GB, 4.5, 2 * GB, token_bytes, 16, tokens)
        print(f"70B in 4.5 bits on 80 GB: {requests:>4} requests of {tokens} tokens")

# %% nbgrader={"grade_id": "memory_plan-check", "grade": true}
check.memory_plan(memory_plan)

# %% [markdown]
# ## Where this leads
#
# The engine's own formula is `KVSpec.bytes_per_token` in [memory.py](../../minipaged/memory.py), its plan `MemoryPlan` beside it.
# Every byte count in the package comes from there. How the engine finds out how much memory there is, and what it keeps in
# reserve, is in [args.py](../../minipaged/engine/args.py). Lesson 03 asks how many of these bytes ever hold a token.
