# %% [markdown]
# # 09 · Copy-on-write
#
# Ask a model for six answers to one question, and it reads the question six times; or once, if what it has read is kept.
# A request's memory is a table of block numbers now (lesson 04), and two tables may list the same block.
#
# **You will be able to** say what a fork costs, and who copies what and when; run parallel samples and beam search on
# shared blocks; predict how much that saves; and recognise the faults that sharing makes possible.
#
# About 45 minutes. Runs in about half a minute on two CPU cores; a GPU is used when there is one.

# %%
from dataclasses import replace

import numpy as np
import torch

from minipaged import LLM, BeamSearchParams, KVSpec, KVStorage, SamplingParams
from minipaged.cache import BlockCopy, BlockPool, BlockTable, append_all
from coursekit.figures import show
from coursekit.figures.forks import ForkState, forked_tables
from coursekit.forgetful import engine_with_a_fault
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.widgets import Stepper
from coursekit.workloads import lognormal_lengths
from minipaged.engine.beam import BeamSearch

# %% [markdown]
# ## The question
#
# Three features of a server want several sequences that begin alike:
#
# - [parallel samples](../docs/glossary.md#parallel-sampling): `n` answers to one prompt, each drawn with other random
#   numbers;
# - [beam search](../docs/glossary.md#beam-search): the best few continuations so far are kept, and each may branch at
#   every token;
# - a common beginning of different requests (lesson 10).
#
# In contiguous memory each sequence needs a strip of its own, with a copy of all that they have in common. **What does
# it take to share it instead? And how much memory does that save?** (The answer is the PagedAttention paper's, and this
# engine's. vLLM today no longer forks; [lesson 14](14_vllm_today.ipynb) says what it does instead.)
#
# ## Your prediction
#
# Blocks of four tokens. A sequence of six tokens is [forked](../docs/glossary.md#fork): a second sequence begins with
# the same six.

# %%
my_fork_blocks = None  # your guess: blocks that the fork takes from the pool
my_copies = None  # your guess: blocks copied when four such siblings append a token each
my_saved = None  # your guess: percent of blocks saved, six answers each to short instructions

# %% [markdown]
# ## Measure
#
# ### A fork
#
# Sixteen blocks, a prompt of six tokens, and real keys and values in them: one layer, two heads of eight numbers.

# %%
BLOCK_SIZE, PROMPT = 4, 6
device, _ = pick_device()
spec = KVSpec(num_layers=1, num_kv_heads=2, head_size=8, dtype=torch.float32)
storage = KVStorage(spec, num_blocks=16, block_size=BLOCK_SIZE, device=device)
for tensor in storage.tensors:
    tensor.zero_()
rows = torch.randn(10, 2, 8, generator=torch.Generator().manual_seed(9)).to(device)


def store(one, position, row):
    """Store a key, and a value that differs from it, as those of the token at `position`."""
    slot = torch.from_numpy(one.slots(position, position + 1)).to(device)
    storage.layer(0).write(slot, row[None], -row[None])


pool = BlockPool(16, enable_prefix_caching=False)
parent = BlockTable(pool, BLOCK_SIZE)
parent.append(PROMPT)
for position in range(PROMPT):
    store(parent, position, rows[position])
print("parent:", parent.blocks, "  free:", pool.num_free)

# %%
free_before = pool.num_free
child = parent.fork()
print("child: ", child.blocks, "  free:", pool.num_free)
print("references:", [pool.ref_count(block) for block in child.blocks])
wrong_fork_blocks = {
    2: "that is a copy of both blocks; a fork copies the table only",
    1: "the half-filled block is not copied yet: nobody has written to it",
}
compare(my_fork_blocks, free_before - pool.num_free, "blocks taken by the fork", wrong_fork_blocks)
assert child.blocks == parent.blocks and pool.num_free == 14
assert [pool.ref_count(block) for block in parent.blocks] == [2, 2]

# %% [markdown]
# Nothing was taken and nothing was moved. The list of block numbers was copied, and each block's
# [reference count](../docs/glossary.md#reference-count) went up by one: it is the number of tables that list the block.
#
# ### The first one to write
#
# Now both sequences go on, each with a token of its own. Its place would be the third slot of the last block, the same
# for both. So the one that comes first gets a copy of that block: [copy-on-write](../docs/glossary.md#copy-on-write).
# The child is first.

# %%
before = storage.key.clone(), storage.value.clone()
parents_blocks = parent.blocks.copy()
copies = child.append(1)
print("copies:", copies)
print("parent:", parent.blocks, "  child:", child.blocks, "  free:", pool.num_free)
assert copies == [BlockCopy(src=1, dst=2)] and pool.num_free == 13
assert parent.blocks == parents_blocks and child.blocks == [0, 2]
assert [pool.ref_count(block) for block in (0, 1, 2)] == [2, 1, 1]

# %% [markdown]
# A table deals in numbers only. It *says* what has to be copied; the owner of the tensors does it, before anything else
# is written in this step. Then the child's token goes to its slot. Which bytes of the memory have changed?

# %%
storage.copy_blocks(copies)
store(child, 6, rows[6])


def changed_bytes(old, new):
    """Block -> bytes in it that differ."""
    # [layers, blocks, slots, heads, bytes]
    differ = old.view(torch.uint8).ne(new.view(torch.uint8))
    counts = differ.sum(dim=(0, 2, 3, 4)).tolist()
    return {block: count for block, count in enumerate(counts) if count}


changed = [changed_bytes(old, new) for old, new in zip(before, storage.tensors, strict=True)]
table(
    ["", "block 0, shared", "block 1, the parent's", "block 2, the child's"],
    [
        (f"bytes of {name}", *("changed" if b in where else "the same" for b in (0, 1, 2)))
        for name, where in zip(("K", "V"), changed, strict=True)
    ],
)
assert [set(where) for where in changed] == [{2}, {2}]
assert torch.equal(storage.key[:, :2], before[0][:, :2])

# %% [markdown]
# Only those of the new block. The parent's keys and values are what they were, byte for byte.
#
# Here is the same with words for tokens. `memory` stands for the tensors, a list of words for each block.


# %%
def put(one, memory, word):
    """Append one token: make room, do the copies, write the word to its slot."""
    for copy in one.append(1):
        memory[copy.dst] = memory[copy.src].copy()
    block, offset = divmod(int(one.slots(one.num_tokens - 1, one.num_tokens)[0]), BLOCK_SIZE)
    memory[block][offset:] = [word]


def words_of(one, memory):
    """The words of a sequence, through its table."""
    return " ".join(
        memory[slot // BLOCK_SIZE][slot % BLOCK_SIZE]
        for slot in one.slots(0, one.num_tokens).tolist()
    )


def begin(words):
    """A pool, its memory, and a table with these words in it."""
    pool, memory = BlockPool(4, enable_prefix_caching=False), [[] for _ in range(4)]
    one = BlockTable(pool, BLOCK_SIZE)
    for word in words:
        put(one, memory, word)
    return pool, memory, one


# %%
WORDS = ["the", "sky", "is", "blue", "and", "so"]
pool, memory, parent = begin(WORDS)
child, history = BlockTable(pool, BLOCK_SIZE), []


def note(title):
    pool.check_invariants([parent, child])
    counts = [pool.ref_count(block) for block in range(4)]
    contents = {block: words.copy() for block, words in enumerate(memory)}
    lists = parent.blocks.copy(), child.blocks.copy()
    history.append(ForkState(title, *lists, counts, contents))


note("a prompt of six words")
child = parent.fork()
note("after the fork")
put(child, memory, "deep")
note("after the child's append")
show(
    forked_tables(history[1:3], block_size=BLOCK_SIZE),
    "Left: parent's and child's table list the same two blocks, both with two references. Right: "
    "the child has a copy of the half-filled block and its own word in it; the full one is shared.",
)

# %% [markdown]
# ### The second one to write
#
# Now the parent appends. Does it need a copy as well?

# %%
copies = parent.append(1)
print("copies:", copies, "  parent:", parent.blocks)
memory[parent.blocks[1]][2:] = ["calm"]
note("after the parent's append")
assert copies == [] and parent.blocks == [0, 1]
assert words_of(child, memory).endswith("and so deep") and words_of(parent, memory).endswith(
    "so calm"
)

# %% [markdown]
# No. The child has moved to a block of its own, so the parent is alone with the old one and writes into it. And four
# siblings that append in one step?

# %%
fresh = BlockPool(16, enable_prefix_caching=False)
first = BlockTable(fresh, BLOCK_SIZE)
first.append(PROMPT)
siblings = [first, *(first.fork() for _ in range(3))]
copies = append_all(siblings, [1] * 4)
print(copies)
wrong_copies = {
    4: "that is right if the last sharer copied too; but by then it is alone, and writes in place",
    1: "one copy would do for two sharers; each of the others has tokens of its own",
    0: "they share a half-filled block, and each writes another token into it",
}
compare(my_copies, len(copies), "blocks copied", wrong_copies)
assert {copy.src for copy in copies} == {1} and len(copies) == len(siblings) - 1
assert sorted(one.blocks[-1] for one in siblings) == [1, 2, 3, 4]

# %% [markdown]
# Three copy, and the last one keeps the original. That is why all copies are done *before* anything is written: the
# original is what the others copy.
#
# And when the fork falls on the end of a block, with eight tokens in blocks of four?

# %%
fresh = BlockPool(16, enable_prefix_caching=False)
first = BlockTable(fresh, BLOCK_SIZE)
first.append(8)
second = first.fork()
print("copies:", second.append(1), "  parent:", first.blocks, "  child:", second.blocks)
assert second.blocks == [0, 1, 2] and fresh.num_free == 13
assert [fresh.ref_count(block) for block in (0, 1, 2)] == [2, 2, 1]

# %% [markdown]
# No copy at all. A full block is never written again, so it can stay shared. **A fork costs at most one copied block,
# however long the prompt is.** For SmolLM2 and a prompt of 1000 tokens:

# %%
smollm2 = KVSpec(num_layers=30, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
whole, tail = smollm2.bytes_for(1000, 16), smollm2.bytes_per_block(16)
say(f"""
    For six answers, six private copies of the prompt take {6 * whole / 1e6:.0f} MB. One prompt
    with five forks takes {whole / 1e6:.0f} MB, and {5 * tail / 1e6:.1f} MB more when they part,
    which are also all the bytes that are ever copied.
""")
assert 1000 % 16 and 6 * whole / (whole + 5 * tail) > 5

# %% [markdown]
# ## The picture
#
# The whole history, step by step: fork, the child appends, the parent appends, the child ends, the parent ends.

# %%
child.free()
note("the child has ended")
parent.free()
note("the parent has ended")
assert pool.num_free == 4


def draw(step):
    state = history[step]
    held = [f"block {b} by {n}" for b, n in enumerate(state.ref_counts) if n]
    text = f"{state.title}; held: {', '.join(held) or 'nothing'}."
    return forked_tables([state], block_size=BLOCK_SIZE), text


Stepper(len(history), draw, start=3)

# %% [markdown]
# Look at the step in which the child ends. It gives *all* its references back. Its own block is free; the shared one is
# not, for the parent still lists it. There was no need to ask who else uses it: the count knows.
#
# ## Why
#
# A copy is needed only where two sequences *differ within a block*, and each has at most one such block: the one in
# which they part. Before it, blocks are full and equal. After it, each has blocks of its own. It is paging that makes
# this cheap: in contiguous memory, sequences that share a beginning would have to lie at the same place and go on at the
# same place.
#
# ### Parallel samples on the real engine
#
# SmolLM2, in float32, because we want to compare tokens. One request with four samples, against four requests with one
# sample each, which share nothing. Both must draw the same random numbers. In the engine these depend on the request's
# seed and the number of the sample, its `key`; so each private request gets the key of one of the four samples.

# %%
SMALL = {"num_blocks": 200, "max_model_len": 600, "enable_prefix_caching": False}
llm = LLM("smollm2-135m", dtype="float32", device=device, **SMALL)
tokenizer = llm.get_tokenizer()
TASK = tokenizer.encode(
    "Instruction: Write a short sentence about the sea and the people who live beside it.\n"
    "Response:"
)
SAMPLES, LENGTH = 4, 32
print("a prompt of", len(TASK), "tokens,", SAMPLES, "answers of", LENGTH)


def sampling(n, length=LENGTH):
    return SamplingParams(n=n, temperature=1.0, seed=9, max_tokens=length, ignore_eos=True)


def run_all(requests):
    """Serve them together. The outputs in order, and the most blocks held at once."""
    llm.engine.reset_stats()
    llm.engine.add(requests)
    done = {}
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return list(done.values()), max(record.blocks_held for record in llm.trace)


# %%
shared = llm.engine.make_request("shared", TASK, sampling(SAMPLES))
private = [llm.engine.make_request(f"private {i}", TASK, sampling(1)) for i in range(SAMPLES)]
for lender, parent in zip(shared.samples, private, strict=True):
    (own,) = parent.samples
    own.sampling = replace(own.sampling, key=lender.sampling.key)

[together], held_together = run_all([shared])
apart, held_apart = run_all(private)
answers = [sample.token_ids for sample in together.outputs]
assert answers == [output.outputs[0].token_ids for output in apart]
assert len(set(map(tuple, answers))) == SAMPLES  # they do differ from one another
bytes_per_block = llm.engine.storage.nbytes // SMALL["num_blocks"]
for how, held in (("together", held_together), ("apart", held_apart)):
    print(f"{how:9} at most {held} blocks, {held * bytes_per_block / 1e6:.1f} MB")
assert held_apart - held_together == (SAMPLES - 1) * (len(TASK) // 16) == 3 and len(TASK) == 20

# %% [markdown]
# The same tokens, and three blocks fewer: the prompt of 20 tokens has one full block of 16, kept once instead of four
# times. The engine counts for each request: of all entries in its block tables, summed over the steps, how many cost no
# block, because another table has it already? (The paper measures its "memory saving" in the same way: blocks saved by
# sharing over blocks without sharing.)
#
# That can be predicted. A sample with $p$ prompt tokens has $\lceil t/B\rceil$ blocks when it has $t$ tokens, and
# $\lfloor p/B\rfloor$ of them are kept once for all $n$:
#
# $$\text{saved} = \frac{(n-1)\,\sum_t\lfloor p/B\rfloor}{n\,\sum_t\lceil t/B\rceil}
# = \frac{n-1}{n}\times\text{share of the prompt's full blocks}$$


# %%
def predicted(prompt, output, n, block_size=16):
    """Entries of all tables over the steps of an answer, and those of them that cost nothing."""
    tokens = np.arange(prompt + 1, prompt + output)  # the last token is never stored
    entries = n * int((-(-tokens // block_size)).sum())
    return entries, (n - 1) * (prompt // block_size) * len(tokens)


entries, saved = predicted(len(TASK), LENGTH, SAMPLES)
say(
    f"Predicted {100 * saved / entries:.2f} %, counted {100 * together.metrics.blocks_saved:.2f} %."
)
counted = together.metrics.sharing
assert (counted.entries, counted.entries - counted.blocks) == (entries, saved)

# %% [markdown]
# Exact, to the block. So for a whole workload no model is needed, only lengths: 2000 short instructions (log-normal,
# with the means of the paper's Alpaca), and 2000 chats (like its ShareGPT), drawn as in lesson 03.

# %%
NAMES = {"chats": "sharegpt", "instructions": "alpaca"}
lengths = {name: lognormal_lengths(key, 2000, seed=0) for name, key in NAMES.items()}
COUNTS = (2, 4, 6)


def percent_saved(some, n):
    """Over all steps of all requests."""
    entries, saved = np.array([predicted(*pair, n) for pair in some.tolist()]).sum(axis=0)
    return float(100 * saved / entries)


saved_by = {(name, n): percent_saved(some, n) for name, some in lengths.items() for n in COUNTS}
table(
    ["blocks saved, %", *(f"n = {n}" for n in COUNTS)],
    [(name, *(saved_by[name, n] for n in COUNTS)) for name in NAMES],
)
wrong_saved = {
    83: "that is five sixths of everything; but only full blocks of the prompt are shared",
    20: "about five sixths of the prompt's share of all tokens; but a prompt shares its full "
    "blocks only, and most of these prompts do not fill one",
}
compare(my_saved, round(saved_by["instructions", 6], 1), "percent of blocks saved", wrong_saved)
short = float((lengths["instructions"][:, 0] < 16).mean())
say(f"{100 * short:.0f} % of the instructions do not fill their first block. They share nothing.")
assert short > 0.5 and saved_by["chats", 6] > 2 * saved_by["instructions", 6]

# %% [markdown]
# The paper's figure for Alpaca and six samples is 9.79 percent, measured with the real lengths. How it was averaged, and
# how far all its figures agree with this formula, is in the study [Blocks saved, beside the
# paper](extra/09_blocks_saved.ipynb).
#
# So samples save little where prompts are short: after the prompt they have nothing in common. And with any number of
# samples, no more than the prompt can be saved.
#
# ### Beam search
#
# Beam search keeps the `width` best texts so far, its *hypotheses*. At every token each is continued in all ways, and
# the best of *all* continuations live on. If two of them have the same parent, the parent is forked. A parent without
# children is freed. So relatives share not only the prompt but everything before they parted. (The
# study shows that shared and private blocks give the same hypotheses.)


# %% tags=["nbval-ignore-output"]
def search(prompt, width, length):
    """The hypotheses at the end, and the percentage of blocks saved."""
    engine = llm.engine
    parts = engine.runner.model, engine.pool, engine.storage, engine.runner.backend
    beams = BeamSearch(*parts, BeamSearchParams(width, length, ignore_eos=True), (), length)
    beams.start(prompt)
    while not beams.is_done:
        beams.step()
    found = [hypothesis.output for hypothesis in beams.live]
    beams.close()
    return found, 100 * beams.sharing.saved


found, percent = search(TASK, 4, 20)
for output in found:
    print(repr(tokenizer.decode(output)))
assert len(found) == 4 and percent > 0 and llm.engine.pool.num_free == 200

# %% [markdown]
# Now widths 2, 4 and 6 for the same instruction, with an answer of 58 tokens (Alpaca's mean). (Which hypotheses win may
# depend on the last digit of a sum, so the next output may differ a little on your machine.)

# %% tags=["nbval-ignore-output"]
by_width = {width: search(TASK, width, 58) for width in COUNTS}
table(
    ["blocks saved, %", *(f"{n}" for n in COUNTS)],
    [
        (
            "n samples, this prompt",
            *(100 * s / e for e, s in (predicted(20, 58, n) for n in COUNTS)),
        ),
        ("beams of this width", *(percent for _, percent in by_width.values())),
    ],
)
found, _ = by_width[4]
common = next(i for i in range(59) if len({tuple(output[:i]) for output in found}) > 1) - 1
say(f"Of 58 tokens, the first **{common}** are the same in all four hypotheses.")
assert by_width[2][1] > 2 * 14 and by_width[6][1] > by_width[2][1] and common >= 0

# %% [markdown]
# More than twice as much, and the last line says why. All live hypotheses descend from one that lived a few tokens ago;
# the other branches have died out. What is *not* shared is only what came after that: mostly the last block.
#
# ## The code as it stands
#
# The fork is a few lines. In `append`, read the branch that lesson 04 asked you to skip. The last piece is who forks in
# a beam search: the first child takes the parent's table over, the others fork it, and only then are parents without
# children freed.

# %%
show_source(BlockTable.tail_is_shared, BlockTable.append, BlockTable.fork)
show_source(append_all)
show_source(BlockPool.share, BlockPool.free)
show_source(BeamSearch._branch)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a block's reference count is the number of tables that list it | it is freed while one still reads it, or never |
# | nobody writes into a block with two references | siblings read one another's tokens |
# | all copies are done before any write of the step | a copy has another sequence's token in it |
# | n siblings take n − 1 copies, and the pool is asked for exactly those | refused although there are blocks, or a crash halfway |
# | sharing changes no token | answers depend on who shares with whom |
#
# A thousand random forks, appends and ends, with what each sequence should read kept beside it:

# %%
rng = np.random.default_rng(0)
pool, memory = BlockPool(30, enable_prefix_caching=False), [[] for _ in range(30)]
living = [(BlockTable(pool, BLOCK_SIZE), [])]
num_copies = 0
for step in range(1000):
    at = int(rng.integers(len(living)))
    one, words = living[at]
    action = rng.random()
    if action < 0.2 and len(living) < 6:
        living.append((one.fork(), words.copy()))
    elif (action < 0.3 and len(living) > 1) or pool.num_free == 0:
        living.pop(at)[0].free()
        living = living or [(BlockTable(pool, BLOCK_SIZE), [])]
    else:
        num_copies += one.blocks_to_append(1) > 0 and one.num_tokens % BLOCK_SIZE > 0
        put(one, memory, str(step))
        words.append(str(step))
    pool.check_invariants([one for one, _ in living])
    assert all(words_of(one, memory).split() == words for one, words in living)
assert num_copies > 50
print(num_copies, "copies in 1000 steps; every sequence read its own words after each of them")

# %% [markdown]
# What does it look like when the second rule is broken? `engine_with_a_fault` takes out of `append` the question
# whether the last block is shared. Six words in common, and one more for each of two sequences. **How many words read
# wrong, in both together?**

# %%
my_words_astray = None  # your guess

# %%
with engine_with_a_fault():
    pool, memory, parent = begin(WORDS)
    child = parent.fork()
    put(child, memory, "deep")
    put(parent, memory, "calm")
    pool.check_invariants([parent, child])  # nothing to complain about
texts = {"deep": words_of(child, memory), "calm": words_of(parent, memory)}
for word, text in texts.items():
    print(f"wrote {word}, reads: {text}")
wrong_astray = {
    2: "both wrote to the same slot, but the one that came last reads its own word",
    0: "both wrote to the same slot",
}
astray = sum(not text.endswith(word) for word, text in texts.items())
compare(my_words_astray, astray, "word wrong", wrong_astray)
assert texts["deep"].endswith("and so calm") and child.blocks == parent.blocks

# %% [markdown]
# No count is wrong, and nothing crashes. A prompt of 16 tokens, a full block, would show nothing, and neither would
# greedy samples, which all write the same word. So such a fault survives tests with round numbers.
#
# ## Find the bug
#
# A server lets a reader stop one of two parallel samples. It works: the sample ends, the other goes on. Hours later, at
# a busy time, a reader finds a stranger's words in the middle of an answer. Nothing was raised. This is what runs when a
# reader presses stop:


# %%
def stop(one, pool):
    """End a sample that nobody wants to read any more."""
    blocks = one.blocks.copy()
    one.free()
    pool.free(blocks)


pool, memory, parent = begin(WORDS)
child = parent.fork()
stop(child, pool)
print("the other sample reads:", words_of(parent, memory))
assert words_of(parent, memory) == " ".join(WORDS)

# %% [markdown]
# **What is wrong? Decide before you go on.** Then guess: a newcomer of twelve words arrives, and three of the four
# blocks are given to it. How many of the parent's six words are still its own?

# %%
my_own_words = None  # your guess

# %%
newcomer = BlockTable(pool, BLOCK_SIZE)
for number_of_word in range(12):
    put(newcomer, memory, f"x{number_of_word}")
own = sum(a == b for a, b in zip(words_of(parent, memory).split(), WORDS, strict=True))
print("the parent lists", parent.blocks, "and the newcomer", newcomer.blocks)
print("the parent reads:", words_of(parent, memory))
wrong_own = {6: "the pool should have only two blocks to give; it thought that it had four"}
compare(my_own_words, own, "of six words", wrong_own)
assert own < 6 and set(parent.blocks) & set(newcomer.blocks)
try:
    pool.check_invariants([parent, newcomer])
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# `one.free()` gives the child's references back. `pool.free(blocks)` gives them back a second time, and those were the
# *parent's*. A count does not know whose references it counts, so with two holders the second free is not refused: it
# makes the parent's blocks free while the parent still reads them. Lesson 04's pool refuses to free what nobody holds;
# with sharing that defence has a gap.
#
# In the engine only a table gives its blocks up, and in doing so it becomes empty, so that freeing it twice does
# nothing. And the engine's tests let `check_invariants` compare counts with tables as they go.
# </details>

# %%
pool, memory, parent = begin(WORDS)
child = parent.fork()
child.free()
child.free()
pool.check_invariants([parent, child])
print("a table freed twice: the parent reads", words_of(parent, memory), " free:", pool.num_free)
assert words_of(parent, memory) == " ".join(WORDS) and pool.num_free == 2

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A prompt of 100 tokens in blocks of 16, six samples. How many blocks stay shared, and how many are copied?</summary>
#
# 100 = 6 × 16 + 4. Six full blocks are shared until the end; the seventh has four tokens, and five of the six samples
# copy it.
# </details>
#
# <details><summary>2. Two hypotheses share a full last block, and the pool is empty. Can both be continued?</summary>
#
# No. Nothing has to be copied, but each needs a new block. `append` answers None, and nothing has changed.
# </details>
#
# <details><summary>3. Why does a beam's first child take the parent's table over, and not fork it like the others?</summary>
#
# Otherwise the parent's references would be one too many: its last block would look shared even with a single child,
# and would be copied at every step for nothing.
# </details>
#
# <details><summary>4. Two different users ask the same question. Does forking help?</summary>
#
# No: there is no common parent to fork. The engine would have to notice that the beginnings are equal. Lesson 10.
# </details>

# %% [markdown]
# ## Summary
#
# - A table is only pointers, so a fork takes no block and moves no byte. Counts say how many tables list a block.
# - A shared block is never written. The first to write copies, the last one keeps the original: n siblings, n − 1
#   copies, and none at a full block.
# - Samples share the full blocks of the prompt, and save at most (n − 1)/n of those. Beams share all but their last few
#   tokens, and save more.
# - Sharing changes no token. If it does, look for a write into a block with two references.
# - A reference count hides one mistake: a second free takes away another holder's reference.
#
# **Write it yourself:** [exercise 09](../exercises/09_copy_on_write/09_copy_on_write.ipynb), reference counts, and a
# table that copies when it writes to a shared block.
#
# **Next:** [10 · Sharing prefixes](10_sharing_prefixes.ipynb): beginnings shared between requests that know nothing
# of one another. To go back: [04 · Blocks and block tables](04_block_tables.ipynb).
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): sections 4.4 (parallel sampling, beam search, copy-on-write)
#   and 6.3 (blocks saved).
# - D. G. Bobrow et al., *TENEX, a Paged Time Sharing System for the PDP-10*, Communications of the ACM, 1972: pages
#   that are copied when they are written.
# - Forking today: transformers pull request 42921 forks a request for several answers, on the blocks that it has.
