# %% [markdown]
# # 04 · Blocks and block tables
#
# Lesson 03 ended badly. Even a server that knows the future fills less than half of its memory with tokens. The fault is not in
# the guesses; it is in the contract: memory *in one piece*, reserved *in advance*. This lesson drops both.
#
# **You will be able to** write an allocator and a block table, find the place of any token by hand, and choose a
# block size knowing what it costs in both directions.
#
# About 50 minutes. Runs in under half a minute on two CPU cores; a GPU is used when there is one.

# %%
import time

import numpy as np
import torch

from minipaged import LLM, AttentionBatch, KVSpec, KVStorage, SamplingParams, load_model
from minipaged.attention import get_backend
from minipaged.cache import BlockPool, BlockTable
from coursekit.traffic import contiguous_traffic, paged_traffic
from coursekit.commands.bench_memory import PAPER_RUNNING, PAPER_SHARE
from coursekit.figures import blocks_and_table, block_size_tradeoff, show
from coursekit.figures import table_growing, waste_bars
from coursekit.lesson import compare, number, pick_device, say, show_source, table
from coursekit.widgets import Stepper
from coursekit.workloads import load_mix, lognormal_lengths

# %% [markdown]
# ## The question
#
# Operating systems had this trouble with programs, and solved it around 1960: cut the memory into pieces of equal size, give
# a program a piece when it needs one, wherever one is free, and keep a table of the pieces that it has. Do the same with keys and
# values:
#
# - the memory is cut into [blocks](../docs/glossary.md#block), each with room for the same number of tokens, the
#   [block size](../docs/glossary.md#block-size);
# - a request gets a block when a token needs one, not before;
# - the request's [block table](../docs/glossary.md#block-table) lists its blocks, in the order of its tokens.
#
# **The same server, the same requests, the same memory as in lesson 03: how much of it holds tokens now?**

# %%
BUDGET, MAX_LEN = 14_648, 2048  # slots; tokens of the longest request allowed
lengths = lognormal_lengths("sharegpt", 2000, seed=0)  # int64 [2000, 2]: prompt, answer
RULES = {"maximum": "strips, the maximum", "oracle": "strips, the true length"}
strips = {rule: contiguous_traffic(lengths, BUDGET, MAX_LEN, rule) for rule in RULES}
held = {rule: 100 * result.waste.shares["used"] for rule, result in strips.items()}
say(f"""
    To beat, from lesson 03: **{held["maximum"]:.0f} %** and
    **{strips["maximum"].running:.0f} requests** at once when each reserves the maximum;
    {held["oracle"]:.0f} % and {strips["oracle"].running:.0f} for an oracle.
""")
assert 20 < held["maximum"] < 30 < held["oracle"] < 50

# %% [markdown]
# ## Your prediction
#
# Blocks of 16 tokens. Three guesses; the last one can be worked out, nearly.

# %%
my_percent = None  # your guess: share of the memory that holds tokens, in percent
my_at_once = None  # your guess: requests in memory at once, on average
my_empty_slots = None  # your guess: slots that a request holds and that are empty, on average

# %% [markdown]
# ## A pool of blocks, in a dozen lines
#
# Build it up before measuring it. First the allocator, the [block pool](../docs/glossary.md#block-pool). It knows blocks only by
# their numbers; the tensors come later. All it keeps is a list of the numbers that are free.

# %%
class ToyPool:
    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.free_blocks = list(range(num_blocks))

    def allocate(self, n):
        """n blocks, or None when there are not so many: then nothing has changed."""
        if n > len(self.free_blocks):
            return None
        taken, self.free_blocks = self.free_blocks[:n], self.free_blocks[n:]
        return taken

    def free(self, blocks):
        """Give back blocks that were taken; ValueError for one that is free already."""
        if set(blocks) & set(self.free_blocks):
            raise ValueError(f"{blocks} are not all in use")
        self.free_blocks = blocks + self.free_blocks

# %%
toy = ToyPool(8)
first, second = toy.allocate(3), toy.allocate(2)
print("first :", first)
print("second:", second, " free:", toy.free_blocks)

# %% [markdown]
# The first request ends and gives its blocks back. A third one wants four. Which ones does it get?

# %%
toy.free(first)
third = toy.allocate(4)
print("third :", third, " free:", toy.free_blocks)
assert third == [0, 1, 2, 5], "not four in a row"
print("three more:", toy.allocate(3), " free:", toy.free_blocks)
assert toy.free_blocks == [6, 7], "a refusal changes nothing"

# %% [markdown]
# It gets the three that came back, and one that was never used: 0, 1, 2 and 5. They are not in a row, and nobody minds. An arena of
# strips would now have two holes of three slots each, and a request for four would have to wait. Here *any free block fits
# any need*. [External fragmentation](../docs/glossary.md#external-fragmentation) is gone, not because the allocator is clever,
# but because all pieces are equal.
#
# When there are not enough blocks, the answer is `None`, and nothing has changed.
#
# ## A table for each request, in another dozen
#
# A table belongs to one request. It is given tokens, and takes blocks from the pool as they are needed.

# %%
class ToyTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size = pool, block_size
        self.blocks, self.num_tokens = [], 0

    def append(self, count):
        """Room for `count` more tokens; None when the pool has too few blocks."""
        in_all = -(-(self.num_tokens + count) // self.block_size)  # divided and rounded up
        new = self.pool.allocate(in_all - len(self.blocks))
        if new is None:
            return None
        self.blocks += new
        self.num_tokens += count
        return new

    def slot(self, position):
        block, offset = divmod(position, self.block_size)
        return self.blocks[block] * self.block_size + offset

# %% [markdown]
# The engine's `BlockPool` and `BlockTable` have these methods and do the same. They can do more (blocks that several tables share,
# blocks that are remembered), which is the subject of lessons 09 and 10. From here on we use the engine's. Blocks of four tokens,
# and a prompt of six:

# %%
BLOCK_SIZE = 4
pool = BlockPool(8, enable_prefix_caching=False)
neighbour = BlockTable(pool, BLOCK_SIZE)
neighbour.append(9)
mine = BlockTable(pool, BLOCK_SIZE)
mine.append(6)
print("my blocks:", mine.blocks, " tokens:", mine.num_tokens)

toy = ToyPool(8)
toys = [ToyTable(toy, BLOCK_SIZE), ToyTable(toy, BLOCK_SIZE)]
toys[0].append(9), toys[1].append(6)
assert [one.blocks for one in toys] == [neighbour.blocks, mine.blocks]
print("the toy says the same:", toys[1].blocks, " slot of token 5:", toys[1].slot(5))

# %% [markdown]
# Six tokens, two blocks, the second half full. Now the answer comes, one token at a time; it begins with token 6, as we count from
# 0. The neighbour ends in the middle of it. **Which token is the first for which my table takes another block?**

# %%
my_next_token = None  # your guess

# %%
for position in range(6, 17):
    before = len(mine.blocks)
    mine.append(1)
    print(
        f"token {position:2}: blocks {mine.blocks}",
        "  <- took one" * (len(mine.blocks) - before),
    )
    if position == 9:
        neighbour.free()
assert mine.blocks == [3, 4, 5, 0, 1]
wrong_next_token = {
    6: "token 6 still has room: the second block holds tokens 4 to 7",
    7: "token 7 is the last one in the second block",
    9: "token 8 is the ninth token, and the first of its block",
}
compare(my_next_token, 8, "as position: the first token of a new block", wrong_next_token)

# %% [markdown]
# Then at 12 and 16: whenever the position is a multiple of the block size, and at no other. Three tokens in four do not need the
# allocator at all. And the last two blocks are ones that the neighbour gave back.
#
# ### The place of a token, by hand
#
# Where is token 9? Divide its position by the block size: 9 = 2 × 4 + 1. Its *logical* block is number 2, its offset in
# the block is 1. The table says which *physical* block that is. The [slot](../docs/glossary.md#slot) counts through all blocks:
#
# $$\text{slot}(p) = \text{table}[\,p \div B\,] \times B + p \bmod B$$
#
# **Try token 12 by hand**, before you look at the last row of the table.

# %%
logical, offset = divmod(9, BLOCK_SIZE)
assert (logical, offset) == (2, 1)
slot = mine.blocks[logical] * BLOCK_SIZE + offset
say(f"Token 9: block {mine.blocks[logical]}, slot {mine.blocks[logical]} × 4 + 1 = **{slot}**.")
assert slot == 21 == mine.slots(9, 10)[0]
rows = [
    (str(p), *divmod(p, BLOCK_SIZE), mine.blocks[p // BLOCK_SIZE], mine.slots(p, p + 1)[0])
    for p in (0, 3, 4, 7, 8, 9, 12)
]
table(["token", "logical block", "offset", "physical block", "slot"], rows)
assert rows[-1][-1] == 0

# %% [markdown]
# The engine does not do this token by token. One line of array arithmetic gives the slots of a whole step, the
# [slot mapping](../docs/glossary.md#slot-mapping).

# %%
show_source(BlockTable.slots)

# %% [markdown]
# ### Do the blocks hold what was put in?
#
# So far these are only numbers. Now real tensors: one layer, two KV heads of eight numbers each. Write the keys of my seventeen
# tokens to their slots, then read them back through the table.

# %%
device, half = pick_device()
spec = KVSpec(num_layers=1, num_kv_heads=2, head_size=8, dtype=torch.float32)
storage = KVStorage(spec, num_blocks=8, block_size=BLOCK_SIZE, device=device)
layer = storage.layer(0)
keys = torch.randn(17, 2, 8, generator=torch.Generator().manual_seed(0)).to(device)
slots = torch.from_numpy(mine.slots(0, 17)).to(device)
layer.write(slots, keys, -keys)
flat = layer.key.flatten(0, 1)  # [num_blocks, block_size, 2, 8] -> [num_slots, 2, 8]
assert torch.equal(flat[slots], keys)
in_memory = sorted(range(17), key=lambda p: mine.slots(p, p + 1)[0])
print("tokens in the order in which they lie in memory:")
print(in_memory)
assert in_memory[:5] == [12, 13, 14, 15, 16]

# %% [markdown]
# In memory the end of the text lies before its beginning. Through the table it reads in order. Lesson 05 shows that
# attention does not notice.
#
# ### Watch a table grow
#
# The same again, one token at a time, with two neighbours (grey) that come and go. Step forward and see where each new block
# comes from.

# %%
pool = BlockPool(8, enable_prefix_caching=False)
early, late, mine = (BlockTable(pool, BLOCK_SIZE) for _ in range(3))
early.append(7)
late.append(3)
history = []
for step in range(18):
    if step == 6:
        early.free()
    late.append(1 if step % 2 and step < 14 else 0)
    mine.append(1)
    fill = {
        t.blocks[i]: min(BLOCK_SIZE, t.num_tokens - i * BLOCK_SIZE)
        for t in (early, late)
        for i in range(len(t.blocks))
    }
    history.append((mine.blocks.copy(), mine.num_tokens, fill))

# %%
def draw_table(step):
    blocks, num_tokens, others = history[step]
    figure = table_growing(
        blocks, num_tokens=num_tokens, block_size=BLOCK_SIZE, num_blocks=8, others=others
    )
    newest = blocks[-1] * BLOCK_SIZE + (num_tokens - 1) % BLOCK_SIZE
    return figure, f"{num_tokens} tokens in blocks {blocks}; the newest is in slot {newest}."


Stepper(
    len(history),
    draw_table,
    start=13,
    shows="A block table on the left, eight blocks on the right, joined by lines.",
)

# %% [markdown]
# ## Measure
#
# Now the traffic of lesson 03. `paged_traffic` plays the same server; a request is admitted as soon as there are blocks for
# its prompt, and takes one more whenever a token needs it.

# %%
paged = paged_traffic(lengths, BUDGET, block_size=16)
results = {words: strips[rule] for rule, words in RULES.items()}
results["blocks of 16"] = paged
table(
    ["", "holds tokens, %", "requests at once", "steps to serve all"],
    [
        (words, 100 * result.waste.shares["used"], result.running, result.steps)
        for words, result in results.items()
    ],
)

# %%
percent = 100 * paged.waste.shares["used"]
wrong_percent = {
    100: "the last block of a request is seldom full, and a few blocks are free at any moment",
    50: "half of a block is empty on average, but only of the last one, and there are many others",
}
compare(my_percent, round(percent), "percent of the memory that holds tokens", wrong_percent)
at_full_length = round(BUDGET / lengths.sum(axis=1).mean())
wrong_at_once = {
    at_full_length: "that is the memory over the mean length at the end; but the long requests "
        "stay longest, so a request that is running is longer than the average one",
}
compare(my_at_once, round(paged.running), "requests at once, on average", wrong_at_once)
assert (PAPER_SHARE["paged 16"], PAPER_RUNNING["sharegpt"]["paged 16"]) == (0.963, 30.42)
assert abs(percent - 96.3) < 2 and abs(paged.running - 30.42) < 3
assert percent > 95 and paged.running > 4 * strips["maximum"].running
assert paged.running > 1.9 * strips["oracle"].running

# %% [markdown]
# Four times as many requests at once as with the maximum, and about twice as many as with the oracle, which knew the length
# of every answer. Blocks know nothing about the future, and need not know it.
#
# The PagedAttention paper measured 96.3 % for its blocks of 16, and 30.4 requests at once on this kind of traffic. (It drew its
# lengths from the real ShareGPT; ours have the same means.)
#
# ### What it costs
#
# Nothing was reserved, so nothing is promised: all requests may grow at once, and the blocks run out in the middle of an
# answer. Then the request that was admitted last gives all its blocks back and waits for its next turn
# ([preemption](../docs/glossary.md#preemption), lesson 11). The tokens that it held must be computed a second time.

# %%
computed = int((lengths.sum(axis=1) - 1).sum())  # tokens to compute in any case
again = 100 * paged.recomputed / computed
say(f"""
    It happened **{number(paged.preemptions)} times** to {number(len(lengths))} requests:
    {again:.0f} tokens were computed again for every hundred that had to be computed anyway. That is
    not little. (This simple server admits whatever fits; lesson 11 asks for more.) But they are
    computed again like a prompt, many in one step, which is cheap (lesson 01). All were served
    in {number(paged.steps)} steps; the oracle took {number(strips["oracle"].steps)}.
""")
assert paged.preemptions > 0 and 1.9 * paged.steps < strips["oracle"].steps

# %% [markdown]
# ## The picture
#
# Where is the memory now?

# %%
show(
    waste_bars({words: result.waste.shares for words, result in results.items()}),
    "Three bars of equal length. The two for strips are mostly waste; the one for blocks of 16 is "
    "nearly all tokens, with two slivers at its end: ends of last blocks, and free blocks.",
)

# %% [markdown]
# Nearly all of the third bar holds tokens. What is left at its right end are the empty ends of last blocks, and free blocks.
#
# How does it look inside the real engine? SmolLM2, a pool of 40 blocks, ten chats. After 60 steps some have ended, some are
# waiting, and these are running:

# %%
loaded = load_model("smollm2-135m", dtype=half, device=device)
llm = LLM(loaded, device=device, num_blocks=40, max_model_len=512, enable_prefix_caching=False)
for request in load_mix("chat48")[:10]:
    params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
    llm.engine.add_request(request.id, request.prompt_token_ids, params)
for _ in range(60):
    llm.engine.step()
tables = [running.table for running in llm.engine.scheduler.running]
for one in tables:
    print(f"{one.num_tokens:4} tokens in blocks {one.blocks}")

# %%
chosen = tables[3]
others = {block for one in tables if one is not chosen for block in one.blocks}
show(
    blocks_and_table(
        chosen.blocks,
        num_tokens=chosen.num_tokens,
        block_size=16,
        num_blocks=40,
        max_model_len=512,
        others=others,
    ),
    "Left one long strip, mostly reserved and empty. Right forty small equal blocks; the block "
    "table of one request is joined by lines to its blocks, which lie scattered among the others.",
)
assert others.isdisjoint(chosen.blocks) and len(chosen.blocks) == 6
assert 5 * 16 < chosen.num_tokens < 512 / 5

# %% [markdown]
# Left, what this chat would hold if it had a strip: room for 512 tokens, most of it empty. Right, what it does hold: six blocks,
# five of them full. The table is all that joins them, and a table is only a few integers.
#
# ## Why
#
# Compare the kinds of waste, one by one.
#
# | | in strips | in blocks |
# |:--|:--|:--|
# | tokens to come | reserved in advance | a block is taken when a token needs it |
# | never used | the guess was too long | nobody guesses |
# | holes | pieces of unequal size | any block fits any need |
# | end of the last block | – | this is what is left |
#
# How much is left? A request's last block has 1 to 16 tokens in it. If every number is equally likely, 0 to 15 slots are empty,
# on average 7.5; with blocks of $B$ tokens, $(B-1)/2$. The longest request allowed, which ruined the strips, is not in the
# formula. Does that hold?

# %%
SIZES = [2**i for i in range(9)]  # 1, 2, 4, ..., 256
chats = {size: paged_traffic(lengths, BUDGET, size) for size in SIZES}
table(
    ["block size", "empty slots, predicted", "measured"],
    [(str(size), (size - 1) / 2, chats[size].unused_per_request) for size in SIZES],
)
wrong_empty_slots = {
    15: "that is the worst case, a last block with one token in it; at any length "
        "from 1 to 16 it is half of that on average",
    8: "half a block, as for a length that is equally often 1 to 16 tokens into its "
        "last block; close, and the lengths of a mix are not spread quite evenly",
    0: "only a length that is a multiple of 16 leaves no slot empty",
}
measured = round(paged.unused_per_request, 2)
compare(my_empty_slots, measured, "empty slots in each request", wrong_empty_slots)
for size in SIZES:
    assert abs(chats[size].unused_per_request - (size - 1) / 2) <= 0.02 * size

# %% [markdown]
# ## Why not 256? Why not 1?
#
# The prediction was right to within a few percent at every size. So the smallest block wastes least. Before we choose it, look at a
# second kind of traffic: short instructions with short answers (the paper's Alpaca).

# %%
short = lognormal_lengths("alpaca", 4000, seed=0)
instructions = {size: paged_traffic(short, BUDGET, size) for size in SIZES}
workloads = {"chats": chats, "instructions": instructions}


def entries(result, size):
    """Blocks that a request holds, on average."""
    return (result.waste.used + result.waste.internal) / size / result.request_steps

# %%
show(
    block_size_tradeoff(
        {
            name: {b: r.waste.share_of_taken for b, r in by_size.items()}
            for name, by_size in workloads.items()
        },
        {
            name: {b: entries(r, b) for b, r in by_size.items()}
            for name, by_size in workloads.items()
        },
    ),
    "Left: the share of memory that holds tokens falls with the block size, much faster for short "
    "requests. Right: the entries of a block table fall with the block size.",
)

# %% [markdown]
# **Not 256.** Chats still do well there. Instructions do not: most requests are shorter than one block, so most of the block is
# empty. And the rule of (B − 1)/2 fails, because the last block is the only one they have. It is the strip again, in miniature.

# %%
fill = {
    name: {b: 100 * r.waste.share_of_taken for b, r in by_size.items()}
    for name, by_size in workloads.items()
}
say(f"""
    With blocks of 256, {fill["chats"][256]:.0f} % of what chats hold is tokens, and
    {fill["instructions"][256]:.0f} % of what instructions hold: each of them leaves
    {instructions[256].unused_per_request:.0f} slots empty.
""")
assert fill["chats"][256] > 75 and fill["instructions"][256] < 35
assert short.sum(axis=1).mean() < 256 / 2 and instructions[256].unused_per_request > 1.2 * 127.5

# %% [markdown]
# **Not 1.** A block of one token wastes nothing. But the table gets an entry, and the allocator a call, for every token: 16 times
# as many as with blocks of 16 (the right half of the picture). A table that is read in every layer of every step should be short.
#
# Is reading from scattered memory slower as well? Let the engine's own attention (lesson 05) read the same 8192 keys and values,
# scattered in blocks of different sizes.

# %% tags=["nbval-ignore-output"]
SEQUENCES, CONTEXT = 16, 512
backend, rng = get_backend("auto", device), np.random.default_rng(0)
query = torch.randn(SEQUENCES, 9, 64).to(device, half)


def attention_ms(size):
    """The fastest of 30 runs over keys that lie scattered in blocks of this size."""
    each = CONTEXT // size  # blocks of one sequence
    memory = KVStorage(KVSpec(1, 3, 64, half), 2 * SEQUENCES * each, size, device=device)
    memory.key.zero_(), memory.value.zero_()
    blocks = rng.permutation(memory.num_blocks)[: SEQUENCES * each].reshape(SEQUENCES, each)
    ones, lens = [1] * SEQUENCES, [CONTEXT] * SEQUENCES
    batch = AttentionBatch.build(blocks.tolist(), ones, lens, size, device)
    seconds = []
    for _ in range(30):
        begin = time.perf_counter()
        backend.paged_attention(query, memory.layer(0), batch, scale=0.125)[0, 0, 0].item()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * min(seconds)


table(
    ["block size", *(str(b) for b in SIZES[::2])],
    [("ms for attention", *(attention_ms(b) for b in SIZES[::2]))],
)

# %% [markdown]
# On this processor it hardly is: the times in the table differ by little. On a GPU it matters more, and lesson 07 says why. So a block size is a compromise between the length of the table and the empty ends, and 16 is the usual
# one, here and in vLLM. The paper, which measured time as well as memory on its cards, found 16 to 128 good for chats and 16 to 32
# for instructions (its section 7.2). On memory, our measurement agrees:

# %%
assert min(fill["chats"][b] for b in (16, 32, 64, 128)) > 85
assert min(fill["instructions"][b] for b in (16, 32)) > 80 > 60 > fill["instructions"][128]
table(
    ["block size", *(str(b) for b in (16, 32, 64, 128))],
    [
        (f"{name}, % tokens", *(round(fill[name][b]) for b in (16, 32, 64, 128)))
        for name in fill
    ],
)

# %% [markdown]
# There is another reason for small blocks: only whole blocks can be shared, so smaller ones share more (lesson 10).
#
# ## The code as it stands
#
# The engine's pool and table. You know their idea from the toys. What they have more:
#
# - a [reference count](../docs/glossary.md#reference-count) for each block, which is the number of tables that list it. So far it is
#   0 or 1;
# - `_blank`, the free list, is a stack: it gives out the block that came back last;
# - `_cached`, `_hashes` and `unpublish` belong to lesson 10, `tail_is_shared` to lesson 09. Without sharing they do nothing.

# %%
show_source(BlockPool.allocate, BlockPool.free)
show_source(BlockTable.blocks_to_append, BlockTable.append, BlockTable.trim)

# %% [markdown]
# Note the order in `append`: it counts, asks for *all* blocks at once, looks at the answer, and only then changes anything.
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a block is free or held, never both, and free only once | two requests write into the same block |
# | its reference count is the number of tables that list it | it is freed while somebody still uses it, or never |
# | an allocation happens whole or not at all | every refusal loses blocks; one day the pool is empty |
# | freeing what nobody holds is an error | see below |
# | a table of n tokens has exactly ⌈n / B⌉ blocks | a slot outside the table, or a block that stays empty |
#
# `check_invariants` proves the first two for a pool and all its tables. Let it watch a thousand random steps.

# %%
rng = np.random.default_rng(0)
pool = BlockPool(20, enable_prefix_caching=False)
tables, refused = [BlockTable(pool, BLOCK_SIZE) for _ in range(6)], 0
for _ in range(1000):
    one = tables[rng.integers(6)]
    if rng.random() < 0.15:
        one.free()
    else:
        refused += one.append(int(rng.integers(1, 12))) is None
    pool.check_invariants(tables)
    assert all(len(t.blocks) == -(-t.num_tokens // BLOCK_SIZE) for t in tables)
print(f"a thousand steps, {refused} refused for lack of blocks, every invariant held")
assert 0 < refused < 1000

# %% [markdown]
# ### Broken on purpose
#
# What do the symptoms look like when a rule is broken? Here is the toy again, as one might write it on a Friday afternoon.
#
# **All or nothing.** A request asks for six blocks of four and is refused. It asks again at the next step, as a waiting request
# does. How many blocks are free now?

# %%
class CarelessPool:
    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks))

    def allocate(self, n):
        taken = []
        for _ in range(n):
            if not self.free_blocks:
                return None  # there is no more
            taken.append(self.free_blocks.pop())
        return taken

    def free(self, blocks):
        self.free_blocks += blocks


careless, careful = CarelessPool(4), BlockPool(4, enable_prefix_caching=False)
for _ in range(2):
    assert careless.allocate(6) is None and careful.allocate(6) is None
print("careless:", len(careless.free_blocks), "free   careful:", careful.num_free, "free")
assert (len(careless.free_blocks), careful.num_free) == (0, 4)

# %% [markdown]
# *Symptom:* nothing runs, nobody is served, and the memory is gone. A restart helps, for a while.
#
# **Freeing twice.** A request ends; its blocks are freed by the code that notices the end, and again by the code that handles
# a closed connection. Nothing fails. Then two others come.

# %%
careless = CarelessPool(4)
ended = careless.allocate(1)
careless.free(ended)
careless.free(ended)  # no error
alice, bob = careless.allocate(1), careless.allocate(1)
print("alice:", alice, " bob:", bob)
assert alice == bob

# %% [markdown]
# *Symptom:* Alice's answers begin to speak of Bob's affairs. It is the worst kind of fault: no crash, no error, far from its
# cause, and only under load. So the engine's pool raises an error at the place where it happens:

# %%
blocks = careful.allocate(1)
careful.free(blocks)
try:
    careful.free(blocks)
except ValueError as error:
    print("ValueError:", error)
assert careful.num_free == 4 and careful.allocate(1) != careful.allocate(1)

# %% [markdown]
# ## Find the bug
#
# A kernel, which is a function that runs on a GPU, writes each new key to its place in one flat array. All its tests pass: small
# pools, random tables, every block size. On a large card the server runs well for an hour. Then, when many requests run at
# once, it dies of an illegal memory access; on some cards it does not die, but answers nonsense. A block of this model has
# 480 × 576 numbers. To save bandwidth, the entries of block tables are 32-bit integers.

# %%
NUMBERS_PER_BLOCK = 480 * 576


def first_number_of(block_table):
    """Where each block of a table begins in the flat array."""
    return block_table * NUMBERS_PER_BLOCK


small_pool = np.array([5, 0, 99], dtype=np.int32)
print("its test:", first_number_of(small_pool).tolist())
assert list(first_number_of(small_pool)) == [5 * 276_480, 0, 99 * 276_480]

# %% [markdown]
# One more fact, from somebody patient: tables that list only blocks below 7768 are always right. **What is the cause? Decide
# before you go on.**

# %%
large_pool = np.array([7766, 7767, 7768, 9000], dtype=np.int32)
for block, start in zip(large_pool, first_number_of(large_pool), strict=True):
    print(f"block {block}: begins at {start:>12}, should be {int(block) * 480 * 576:>11}")
assert first_number_of(large_pool)[2] == 7768 * NUMBERS_PER_BLOCK - 2**32 < 0
right = first_number_of(large_pool.astype(np.int64))
assert right[2] == 2_147_696_640 and all(right > 0)
assert 7767 * NUMBERS_PER_BLOCK < 2**31 <= 7768 * NUMBERS_PER_BLOCK

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The product of two 32-bit integers is a 32-bit integer. From block 7768 on it would be 2³¹ or more; it wraps round and
# becomes negative: the key is written far *before* the cache. Small pools never get there. The table may stay in 32 bits; the block
# number has to become 64 bits wide
# *before* it is multiplied. In `minipaged`, `BlockTable.slots` returns `int64`, and the kernels widen each number as they
# load it.
#
# No large card is needed to test it: the address arithmetic can be tried alone, as here. That is one reason to keep it in a
# function of its own.
# </details>
#
# ## Check yourself
#
# <details><summary>1. Block size 16, a request of 64 tokens. How many blocks, and how many tokens in the last one?</summary>
#
# Four blocks, and sixteen in the last one. Not zero: 64 mod 16 is 0, and code that takes this for the number of tokens in the
# last block finds it empty. The 65th token takes a fifth block.
# </details>
#
# <details><summary>2. The table is [7, 2, 9], the block size 8. In which slot is token 17?</summary>
#
# 17 = 2 × 8 + 1. Logical block 2 is physical block 9; slot 9 × 8 + 1 = 73.
# </details>
#
# <details><summary>3. The operator doubles the longest request allowed. What happens to the waste in blocks?</summary>
#
# Nothing. Only the last block of each request is not full, however long requests may become. (In strips of the maximum, it would
# have halved the requests at once.)
# </details>
#
# <details><summary>4. Two free blocks lie side by side. Are they worth more than two that lie apart?</summary>
#
# Not to the allocator. Reading may be a little faster in longer runs, but no request has to wait for two such blocks.
# </details>
#
# <details><summary>5. Nothing is reserved. Is there still a promise that a running request can be finished?</summary>
#
# Only a weaker one: others can be made to give way until it is alone (lesson 11). Then it has the whole pool, and if even that is
# too small, its answer ends there.
# </details>

# %% [markdown]
# ## Summary
#
# - Equal blocks, taken when a token needs one: no room reserved for tokens to come, none for tokens that never come, no holes.
# - What is left is the end of each last block: (B − 1)/2 slots, whatever the longest request may be.
# - The place of token p is `table[p // B] * B + p % B`, where the table is a plain list of integers.
# - Blocks of 16: large enough to keep tables short, small enough to waste little.
# - All or nothing; free once. An allocator that overlooks a mistake gives one person's text to another.
#
# **Write it yourself:** [exercise 04](../exercises/04_block_table/04_block_table.ipynb), an allocator and a block table.
#
# **Next:** [05 · Attention through the table](05_paged_attention.ipynb). The keys of a request now lie all over the memory.
# Attention has to find them.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): sections 4.1–4.3 (blocks and tables), 7.2 (block size), figures 2
#   and 13.
# - T. Kilburn et al., *One-Level Storage System*, IRE Transactions on Electronic Computers, 1962: the Atlas computer, where
#   paging begins.
# - P. Denning, *Virtual Memory*, ACM Computing Surveys, 1970: why equal pieces end external fragmentation.
