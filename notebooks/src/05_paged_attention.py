# %% [markdown]
# # 05 · Attention through the table
#
# The keys and values of a request now lie in [blocks](../docs/glossary.md#block), found through a
# [block table](../docs/glossary.md#block-table), wherever there was room. The attention of lesson 01 takes *one matrix* of keys.
# This lesson brings the two together, in plain torch, and shows that scattering the blocks changes nothing.
#
# **You will be able to** write attention that reads through a block table, check it against implementations that were written
# differently, and say why the contents of unused memory must not matter, and how they could.
#
# About 40 minutes. Runs in under a minute on two CPU cores; a GPU is used when there is one.

# %%
import numpy as np
import torch

from minipaged import AttentionBatch, BlockPool, BlockTable, KVSpec, KVStorage, load_model
from minipaged.attention import get_backend
from coursekit.figures import gathered_through_table
from coursekit.lesson import compare, pick_device, show_source, table
from coursekit.widgets import Stepper

# %% [markdown]
# ## The question
#
# Recall attention: a query $q$ is compared with the keys $k_i$ of all tokens so far, and their values are averaged with the weights
# $w = \text{softmax}(q \cdot k_i / \sqrt{d})$.
#
# The keys are in blocks, the blocks are scattered, the last block is only partly filled, and the memory in between belongs
# to others. **What has to be read, and does it matter where it lies?**

# %% [markdown]
# ## Your prediction
#
# A sequence has 100 tokens, in blocks of 16, spread over a pool of 24 blocks.
#
# 1. How many of the pool's slots does attention have to read?
# 2. All blocks are moved to other places, and their table with them. By how much does the output change at most, if its numbers are
#    around 1?
# 3. Now a mistake: the hundred keys, and their values with them, are read *in a wrong order*, and nothing restores it. By how much
#    does the output change?

# %%
my_slots_read = None  # your guess
my_largest_change = None  # your guess, for example 0.001
my_change_in_disorder = None  # your guess

# %% [markdown]
# ## Measure
#
# ### One sequence, by hand
#
# Shapes as in SmolLM2: nine query heads share three KV heads, head size 64. Take some keys and values, and the query of the last
# token. First the textbook way, on plain contiguous tensors: lesson 01's three lines, for all heads at once.

# %%
device, _ = pick_device()
HEADS, KV_HEADS, SIZE = 9, 3, 64
LENGTH, BLOCK_SIZE, NUM_BLOCKS = 100, 16, 24
generator = torch.Generator().manual_seed(5)
query = torch.randn(1, HEADS, SIZE, generator=generator).to(device)
keys = torch.randn(LENGTH, KV_HEADS, SIZE, generator=generator).to(device)
values = torch.randn(LENGTH, KV_HEADS, SIZE, generator=generator).to(device)

# %%
def textbook(query, keys, values):
    """Attention of one query [1, heads, size] to keys and values [tokens, kv heads, size]."""
    group = query.shape[1] // keys.shape[1]  # query heads that share a KV head
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


expected = textbook(query, keys, values)
print("output:", list(expected.shape), " largest number:", round(float(expected.abs().max()), 2))
assert expected.shape == query.shape

# %% [markdown]
# Now into blocks. The pool is made untidy first, as it is after an hour of service: other requests came, and some went.

# %%
pool = BlockPool(NUM_BLOCKS)
guests = [BlockTable(pool, BLOCK_SIZE) for _ in range(12)]
for guest in guests:
    guest.append(2 * BLOCK_SIZE)
for number in (7, 2, 10, 5):
    guests[number].free()
mine = BlockTable(pool, BLOCK_SIZE)
mine.append(LENGTH)
print("block table:", mine.blocks)
assert mine.blocks != sorted(mine.blocks) and len(mine.blocks) == 7

# %% [markdown]
# `slots` turns positions into places, the [slot mapping](../docs/glossary.md#slot-mapping): block × block size + offset.
# Writing a token is writing to its slot.

# %%
spec = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
for tensor in storage.tensors:
    tensor.fill_(0.0)
layer = storage.layer(0)
slots = torch.from_numpy(mine.slots(0, LENGTH)).to(device)  # [tokens]
layer.write(slots, keys, values)

# %% [markdown]
# And reading is indexing with the same slots: one line, and the textbook function as it was.

# %%
def gathered(layer, slots):
    """Keys and values of the given slots, in order: two tensors [tokens, kv heads, size]."""
    return layer.key.flatten(0, 1)[slots], layer.value.flatten(0, 1)[slots]


same = torch.equal(textbook(query, *gathered(layer, slots)), expected)
print("equal to the last bit:", same)
assert same

# %% [markdown]
# Not "nearly": equal, bit for bit. The gathered keys *are* the keys, in the same order.
#
# ### Which slots are read?
#
# Spoil the pool one slot at a time: replace the slot's key by NaN, and see whether the engine's own attention notices. (Any sum
# or product with NaN is NaN, so a slot that is read shows in the output.)

# %%
backend = get_backend("auto", device)


def engine_attention(layer, blocks):
    batch = AttentionBatch.build([blocks], [1], [LENGTH], BLOCK_SIZE, device)
    return backend.paged_attention(query, layer, batch, scale=SIZE**-0.5)


difference = float((engine_attention(layer, mine.blocks) - expected).abs().max())
print("the engine's attention agrees to five digits:", difference < 1e-5)
assert difference < 1e-5

# %%
noticed = []
flat = layer.key.flatten(0, 1)  # [slots, kv heads, size], a view of the pool
for slot in range(NUM_BLOCKS * BLOCK_SIZE):
    kept = flat[slot].clone()
    flat[slot] = torch.nan
    if engine_attention(layer, mine.blocks).isnan().any():
        noticed.append(slot)
    flat[slot] = kept
assert sorted(noticed) == sorted(slots.tolist())
wrong_slots_read = {
    112: "those are all slots of its seven blocks; the last block has 12 that hold no "
        "token, and they must not matter",
    384: "that is the whole pool; most of it belongs to others",
    7: "that is the number of blocks; in them 100 slots hold a token",
    16: "that is one block",
}
compare(my_slots_read, len(noticed), "slots read", wrong_slots_read)

# %% [markdown]
# Exactly one per token: not the empty places at the end of the last block, and nothing that belongs to others.

# %%
unread = len(mine.blocks) * BLOCK_SIZE - len(noticed)
print(unread, "slots of its own blocks are never read")
assert unread == 12

# %% [markdown]
# ### Three oracles
#
# One implementation that agrees with itself proves little. The engine's attention in plain torch, called *gather* because it
# collects the keys through the table, is checked against three *oracles*: implementations that share no arithmetic with it.
#
# | | precision | how |
# |:--|:--|:--|
# | **dense** | float32 | the textbook function above, on contiguous tensors; knows no blocks |
# | **reference** | float64 | loops over sequences, rows, heads and tokens; slow and obvious |
# | **C++** | float32 | reads each key where it lies; copies nothing (`minipaged/cpu`) |
#
# And not on one sequence but on a [ragged batch](../docs/glossary.md#ragged-batch): sequences of different lengths, laid end
# to end. Their lengths are one, an exact multiple of the block size, one more than that, and many. In *prefill* every token is a
# query, in *decode* only the last token of each sequence. (Where there is no C++ compiler, the last oracle is gather itself.)

# %%
lengths = [1, 16, 17, 100, 128]
order = np.random.default_rng(0).permutation(32).tolist()
batch_storage = KVStorage(spec, 32, BLOCK_SIZE, device=device)
block_lists, start = [], 0
for n in lengths:
    count = -(-n // BLOCK_SIZE)
    block_lists.append(order[start : start + count])
    start += count
print(block_lists)

# %%
def random_rows(count, heads):
    return torch.randn(count, heads, SIZE, generator=generator).to(device)


all_keys, all_values = (random_rows(sum(lengths), KV_HEADS) for _ in range(2))
new_tokens = {"prefill": lengths, "decode": [1] * len(lengths)}  # queries of each sequence
steps = {
    phase: AttentionBatch.build(block_lists, new, lengths, BLOCK_SIZE, device)
    for phase, new in new_tokens.items()
}
queries = {phase: random_rows(sum(new), HEADS) for phase, new in new_tokens.items()}
backend.write_kv(batch_storage.layer(0), all_keys, all_values, steps["prefill"].slot_mapping)

# %%
def dense(query, new):
    """The textbook, query by query; the last `new[i]` tokens of each sequence are queries."""
    outputs, row, start = [], 0, 0
    for n, rows in zip(lengths, new, strict=True):
        for position in range(n - rows, n):  # a token sees itself and what comes before it
            seen = slice(start, start + position + 1)
            outputs.append(textbook(query[row : row + 1], all_keys[seen], all_values[seen]))
            row += 1
        start += n
    return torch.cat(outputs)

# %%
from minipaged.attention.reference import ReferenceBackend
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cpu.backend import CpuBackend

oracles = {"reference": ReferenceBackend(), "C++": CpuBackend()}
errors = {}
for phase, step in steps.items():
    arguments = queries[phase], batch_storage.layer(0), step
    gather = TorchBackend().paged_attention(*arguments, scale=SIZE**-0.5)
    answers = {"dense": dense(queries[phase], new_tokens[phase])}
    for name, oracle in oracles.items():
        answers[name] = oracle.paged_attention(*arguments, scale=SIZE**-0.5)
    errors[phase] = {name: float((gather - answer).abs().max()) for name, answer in answers.items()}
assert all(error < 1e-5 for by_name in errors.values() for error in by_name.values())

# %% tags=["nbval-ignore-output"]
rows = [(name, *(f"{errors[phase][name]:.1e}" for phase in errors)) for name in errors["prefill"]]
table(["largest difference to gather", *errors], rows)

# %% [markdown]
# ### Shuffle everything
#
# Prediction 2. Move every block of the first pool to another place, and the table with it.

# %%
def shuffled(seed):
    """The same pool with its blocks in another order, and the table that goes with it."""
    new_place = np.random.default_rng(seed).permutation(NUM_BLOCKS)
    other = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
    for old, new in zip(storage.tensors, other.tensors, strict=True):
        new[:, torch.from_numpy(new_place)] = old
    return other.layer(0), [int(new_place[block]) for block in mine.blocks]

# %%
before = engine_attention(layer, mine.blocks)
changes = [float((engine_attention(*shuffled(seed)) - before).abs().max()) for seed in range(20)]
assert set(changes) == {0.0}
wrong_largest_change = {
    1e-7: "that would be rounding; but the same numbers are added in the same order",
    0.001: "nothing is approximated: the same numbers are added in the same order",
}
compare(my_largest_change, max(changes), "at most, in twenty shuffles", wrong_largest_change)

# %% [markdown]
# ## The picture
#
# A small pool, in which each slot can be seen. Step through the shuffles: the upper row changes, the lower one does not.

# %%
def draw(step):
    places = np.random.default_rng(step).permutation(8)[:4].tolist()
    figure = gathered_through_table(places, num_tokens=14, block_size=4, num_blocks=8)
    return figure, f"block table {places}: fourteen keys in the order of their tokens"


Stepper(
    8,
    draw,
    start=3,
    shows="Upper row: a pool of eight blocks with scattered keys. Lower row: the keys, gathered "
    "in order.",
)

# %% [markdown]
# ## Why
#
# **Why is it *exactly* the same?** Because the table restores the order before any arithmetic is done. The same numbers in the
# same order give the same sum, to the last bit.
#
# **And if the order is not restored?** That was prediction 3.

# %%
disorder = torch.randperm(LENGTH, generator=generator).to(device)
jumbled = textbook(query, keys[disorder], values[disorder])
change = float((jumbled - expected).abs().max())
why = "all keys are there, only in another order, and an average does not depend on the order"
wrong_change = {0.1: why, 0.5: why, 1: why, 2: why}
compare(my_change_in_disorder, round(change, 5), "to five digits", wrong_change)
assert change < 1e-5

# %% [markdown]
# Nothing, up to rounding. Attention is an average over keys, and an average does not depend on their order. Then how does a model know
# the order of words? Not from the *address* of a key: the position was turned into the key itself, by the rotary embedding, before
# the key was stored.

# %% [markdown]
# That is no permission to mix things up. When a step has several queries of one sequence, the causal mask does depend on the order;
# and a wrong block in the table changes the *set* of keys. But kernels make use of the freedom: they take the keys in pieces and
# put the results together (lesson 07).
#
# **Does it hold for a whole model?** Here SmolLM2 reads a text through a tidy table and through random ones.

# %%
loaded = load_model("smollm2-135m", dtype=torch.float32, device=device)
text = (
    "A library keeps its books wherever there is room on the shelves, and a card for each of them."
)
token_ids = loaded.tokenizer.encode(text)
real_spec = KVSpec.from_model(loaded.config, torch.float32)


def read_through(blocks):
    real = KVStorage(real_spec, 64, 4, device=device)
    step = AttentionBatch.build([blocks], [len(token_ids)], [len(token_ids)], 4, device)
    hidden = loaded.model(torch.tensor(token_ids, device=device), step, real, backend)
    return loaded.model.compute_logits(hidden[-1:])

# %%
tidy = read_through(list(range(64)))
for seed in range(3):
    places = np.random.default_rng(seed).permutation(64).tolist()
    assert torch.equal(read_through(places), tidy)
    print(f"blocks {places[:4]} …: the same logits, to the last bit")

# %% [markdown]
# **What does it cost?** Gathering *copies* every key and value, in every layer, at every step, only to read the copy once.
# Code that looks the block up while it reads needs no copy. Lesson 06 writes it for a GPU. For a CPU it exists in C++
# ([decode.cpp](../minipaged/cpu/csrc/decode.cpp)), and where there is a compiler, `LLM` uses it instead of what you see here.
# Lesson 12 opens that folder and measures the difference.

# %% [markdown]
# ## The code as it stands
#
# From positions to slots, for a whole step at once and without a loop over tokens; and gather for sequences with one query each:
# which slots to read, reading them, attending. (`scale` in `gather` is for the small number formats of lesson 13.)

# %%
from minipaged.attention import batch as batch_module
from minipaged.attention import torch_backend

show_source(batch_module.new_token_slots)
show_source(torch_backend.plan_gather, torch_backend.gather, torch_backend.attend_gathered)

# %% [markdown]
# The padding is worth a look: `torch.where` in `plan_gather`. A shorter sequence is filled up to the length of the longest by
# *repeating the slot of its own first token*, never by reading what lies beyond its end. The mask, `visible`, then gives the
# repeats no weight. Why so careful, when they get no weight anyway?

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | the output depends only on slots that hold a token of this sequence | rare, random NaN; or somebody else's words |
# | moving a block and its table entry changes nothing | the answer depends on who came before |
# | query head $h$ reads KV head $h$ ÷ (queries per KV head) | fluent nonsense |
# | padding entries of the table are never followed | a crash, or worse, none |
#
# All four at once: a pool full of NaN, tables padded with blocks full of NaN.

# %%
poisoned = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
for tensor in poisoned.tensors:
    tensor.fill_(torch.nan)
poisoned.layer(0).write(slots, keys, values)
not_mine = [block for block in range(NUM_BLOCKS) if block not in mine.blocks]
padded_table = [*mine.blocks, *not_mine[:5]]
unchanged = torch.equal(engine_attention(poisoned.layer(0), padded_table), before)
print("in a pool full of NaN the output is the same, to the last bit:", unchanged)
assert unchanged

# %% [markdown]
# ## Find the bug
#
# This one passed every test, ran well for days, and then answered a single request with nothing but NaN; the next day
# another one. It reads whole blocks, as that is simplest, and gives the places after the last token a score of minus
# infinity, so that their weight is zero.

# %%
def whole_blocks(query, layer, blocks, length):
    keys, values = layer.key[blocks].flatten(0, 1), layer.value[blocks].flatten(0, 1)
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    beyond = torch.arange(keys.shape[0], device=device) >= length
    scores = scores.masked_fill(beyond, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


right = torch.allclose(whole_blocks(query, layer, mine.blocks, LENGTH), expected, atol=1e-5)
print("its test passes:", right)
assert right

# %% [markdown]
# The weights of the places beyond the end are zero, exactly. **So how can what lies there matter? Decide first.**

# %%
answer = whole_blocks(query, poisoned.layer(0), mine.blocks, LENGTH)
print("NaN in the output:", bool(answer.isnan().any()), "   0 * NaN =", 0.0 * float("nan"))
assert answer.isnan().all()

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Zero times NaN is NaN. The weights are zero, but the *values* beyond the end are still multiplied and added. In fresh memory
# they are zeros; in a recycled block they are whatever was there, and sometimes that is NaN or infinity: an overflow of some
# other request, hours ago. Masking the scores is not enough: the values have to be masked as well, or, better, never read.
# vLLM had this in its first kernels (pull request 936), flash-attention in another form (issue 1745). This is why the tests of
# this engine fill the pool with NaN before they do anything else.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. Why are the outputs before and after a shuffle equal to the last bit, but different for a jumbled order of keys?</summary>
#
# After a shuffle the table restores the order, so the same additions happen in the same sequence. Jumbled keys are added in
# another sequence, and floating-point addition rounds differently.
# </details>
#
# <details><summary>2. Where is the position of a token stored, if not in the address of its key?</summary>
#
# In the key: rotary embedding turns it by an angle that depends on the position, before it is written.
# </details>
#
# <details><summary>3. A block size of 16, a sequence of 32 tokens. How many slots of its last block are read?</summary>
#
# All sixteen. An exact multiple has a *full* last block, not an empty one: `length % block_size` is 0 there, and code that
# uses it as a count reads nothing.
# </details>
#
# <details><summary>4. The mask can be applied by <code>where</code> or by adding minus infinity. When do they differ?</summary>
#
# When the score itself is NaN: NaN plus minus infinity is still NaN, `where` replaces it.
# </details>
#
# <details><summary>5. Gathering copies all keys at every step. Why is it still good to have it?</summary>
#
# It is short, it runs wherever torch runs, and it is easy to be sure of. Every faster kernel is compared with it.
# </details>

# %% [markdown]
# ## Summary
#
# - Attention through a table is ordinary attention after one indexing step.
# - Exactly one slot is read for each token. Nothing else in the pool may touch the result, not even multiplied by zero.
# - Where blocks lie changes nothing, to the last bit, also on the real model.
# - Position is in the key, not in the address.
#
# **Write it yourself:** [exercise 05](../exercises/05_paged_attention/05_paged_attention.ipynb), attention through a table.
#
# **Next:** [06 · A first Triton kernel](06_first_triton_kernel.ipynb). The same without the copy, on a GPU.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180), section 4.1: attention over blocks.
# - J. Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021,
#   [arXiv:2104.09864](https://arxiv.org/abs/2104.09864).
# - A. Vaswani et al., *Attention Is All You Need*, 2017, [arXiv:1706.03762](https://arxiv.org/abs/1706.03762).
