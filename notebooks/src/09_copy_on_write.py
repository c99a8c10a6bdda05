# %% [markdown]
# # 09 · Copy-on-write
#
# Ask a model for six answers to one question, and it reads the question six times; or once, if what it has read is kept.
# A request's memory is a table of block numbers now (lesson 04), and two tables may list the same block.
#
# **You will be able to** say what a fork costs, and who copies what and when; run parallel samples and beam search on
# shared blocks; predict how much that saves; and recognise the faults that sharing makes possible.
#
# About 35 minutes. Runs in about half a minute on two CPU cores; a GPU is used when there is one.

# %%
import numpy as np

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.cache import BlockPool, BlockTable, append_all
from minipaged.engine.beam import BeamSearch
from coursekit.figures import show
from coursekit.figures.forks import ForkState, forked_tables
from coursekit.forgetful import engine_with_a_fault
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.widgets import Stepper
from coursekit.workloads import lognormal_lengths

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
# Words stand for tokens, and `memory` for the tensors of keys and values: a list of words for each block. A table deals
# in numbers only. `append` makes room and *says* what has to be copied; the owner of the memory copies it, and only then
# writes the new word to its slot.


# %%
BLOCK_SIZE, WORDS = 4, ["the", "sky", "is", "blue", "and", "so"]


def put(one, memory, word):
    """Append one token: make room, do the copies, write the word to its slot."""
    copies = one.append(1)
    for copy in copies:
        memory[copy.dst] = memory[copy.src].copy()
    (slot,) = one.slots(one.num_tokens - 1, one.num_tokens).tolist()
    memory[slot // BLOCK_SIZE][slot % BLOCK_SIZE :] = [word]
    return copies


def words_of(one, memory):
    """The words of a sequence, through its table."""
    slots = one.slots(0, one.num_tokens).tolist()
    return " ".join(memory[slot // BLOCK_SIZE][slot % BLOCK_SIZE] for slot in slots)


# %%
def begin():
    """A pool of four blocks, its memory, and a table with the six words in it."""
    pool, memory = BlockPool(4, enable_prefix_caching=False), [[] for _ in range(4)]
    one = BlockTable(pool, BLOCK_SIZE)
    for word in WORDS:
        put(one, memory, word)
    return pool, memory, one


def note(title):
    """Keep a picture of both tables and of the pool."""
    pool.check_invariants([parent, child])
    counts = [pool.ref_count(block) for block in range(4)]
    contents = {block: words.copy() for block, words in enumerate(memory)}
    history.append(ForkState(title, parent.blocks.copy(), child.blocks.copy(), counts, contents))


history = []
pool, memory, parent = begin()
free_before = pool.num_free
child = parent.fork()
note("after the fork")

# %%
print("parent:", parent.blocks, "  child:", child.blocks, "  free:", pool.num_free)
print("references:", [pool.ref_count(block) for block in child.blocks])
wrong_fork_blocks = {
    2: "that is a copy of both blocks; a fork copies the table only",
    1: "the half-filled block is not copied yet: nobody has written to it",
}
compare(my_fork_blocks, free_before - pool.num_free, "blocks taken by the fork", wrong_fork_blocks)
assert child.blocks == parent.blocks and pool.num_free == free_before

# %% [markdown]
# Nothing was taken and nothing was moved. The list of block numbers was copied, and each block's
# [reference count](../docs/glossary.md#reference-count) went up by one: it is the number of tables that list the block.
#
# ### The first one to write
#
# Now both sequences go on, each with a word of its own. Its place would be the third slot of the last block, the same
# for both. So the one that comes first gets a copy of that block: [copy-on-write](../docs/glossary.md#copy-on-write).
# The child is first.

# %%
print("copies:", put(child, memory, "deep"))
note("after the child's append")
show(
    forked_tables(history, block_size=BLOCK_SIZE),
    "Left: parent's and child's table list the same two blocks, both with two references. Right: "
    "the child has a copy of the half-filled block and its own word in it; the full one is shared.",
)
assert words_of(parent, memory).split() == WORDS

# %% [markdown]
# Only the new block was written. What the parent reads is what it was.
#
# ### The second one to write
#
# Now the parent appends. Does it need a copy as well?

# %%
print("copies:", put(parent, memory, "calm"))
note("after the parent's append")
print("parent:", parent.blocks, words_of(parent, memory))
print("child: ", child.blocks, words_of(child, memory))
assert parent.blocks == [0, 1] and words_of(child, memory).split() == [*WORDS, "deep"]

# %% [markdown]
# No. The child has moved to a block of its own, so the parent is alone with the old one and writes into it. And four
# siblings that append in one step?

# %%
fresh = BlockPool(16, enable_prefix_caching=False)
first = BlockTable(fresh, BLOCK_SIZE)
first.append(6)
siblings = [first, *(first.fork() for _ in range(3))]
copies = append_all(siblings, [1] * 4)
print(copies)
wrong_copies = {
    4: "that is right if the last sharer copied too; but by then it is alone, and writes in place",
    1: "one copy would do for two sharers; each of the others has tokens of its own",
    0: "they share a half-filled block, and each writes another token into it",
}
compare(my_copies, len(copies), "blocks copied", wrong_copies)
assert {copy.src for copy in copies} == {1}

# %% [markdown]
# Three copy, and the last one keeps the original. That is why all copies are done *before* anything is written: the
# original is what the others copy.
#
# And when the fork falls on the end of a block, with eight tokens in blocks of four?

# %%
first = BlockTable(fresh, BLOCK_SIZE)
first.append(8)
second = first.fork()
print("copies:", second.append(1), "  parent:", first.blocks, "  child:", second.blocks)
assert second.blocks[:2] == first.blocks and len(second.blocks) == 3

# %% [markdown]
# No copy at all. A full block is never written again, so it can stay shared. **A fork costs at most one copied block,
# however long the prompt is.**
#
# ## The picture
#
# The whole history, step by step: fork, the child appends, the parent appends, the child ends, the parent ends.

# %%
child.free()
note("the child has ended")
parent.free()
note("the parent has ended")


def draw(step):
    state = history[step]
    held = [f"block {b} by {n}" for b, n in enumerate(state.ref_counts) if n]
    text = f"{state.title}; held: {', '.join(held) or 'nothing'}."
    return forked_tables([state], block_size=BLOCK_SIZE), text


Stepper(len(history), draw, start=2, shows="Two tables, and between them the pool's four blocks.")

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
# A sample with $p$ prompt tokens has $\lceil t/B\rceil$ blocks when it has $t$ tokens, and $\lfloor p/B\rfloor$ of them
# are kept once for all $n$. Of all entries in the block tables, summed over the steps, how many cost no block, because
# another table has it already?
#
# $$\text{saved} = \frac{(n-1)\,\sum_t\lfloor p/B\rfloor}{n\,\sum_t\lceil t/B\rceil}
# = \frac{n-1}{n}\times\text{share of the prompt's full blocks}$$
#
# The engine counts the same, for each request. SmolLM2, one prompt, four samples:


# %%
def predicted(prompt, output, n, block_size=16):
    """Entries of all tables over the steps of an answer, and those of them that cost nothing."""
    tokens = np.arange(prompt + 1, prompt + output)  # the last token is never stored
    entries = n * int((-(-tokens // block_size)).sum())
    return entries, (n - 1) * (prompt // block_size) * len(tokens)


# %%
settings = {"dtype": "float32", "device": pick_device()[0], "num_blocks": 200}
llm = LLM("smollm2-135m", **settings, max_model_len=600, enable_prefix_caching=False)
tokenizer = llm.get_tokenizer()
TASK = tokenizer.encode(
    "Instruction: Write a short sentence about the sea and the people who live beside it."
    "\nResponse:"
)
params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=32, ignore_eos=True)
[answer] = llm.generate({"prompt_token_ids": TASK}, params, use_tqdm=False)
entries, saved = predicted(len(TASK), 32, 4)
counted = answer.metrics.sharing
say(f"""
    A prompt of {len(TASK)} tokens, four answers of 32. Blocks saved: predicted
    {100 * saved / entries:.2f} %, counted {100 * answer.metrics.blocks_saved:.2f} %.
""")
assert (counted.entries, counted.entries - counted.blocks) == (entries, saved)

# %% [markdown]
# Exact, to the block. So for a whole workload no model is needed, only lengths: 2000 short instructions (log-normal, with
# the means of the paper's Alpaca), and 2000 chats (like its ShareGPT), drawn as in lesson 03. (The study [Blocks saved,
# beside the paper](extra/09_blocks_saved.ipynb) shows that sharing changes no token.)

# %%
NAMES = {"chats": "sharegpt", "instructions": "alpaca"}
lengths = {name: lognormal_lengths(key, 2000, seed=0).tolist() for name, key in NAMES.items()}


def percent_saved(name, n):
    """Over all steps of all requests."""
    entries, saved = np.sum([predicted(*pair, n) for pair in lengths[name]], axis=0)
    return float(100 * saved / entries)


rows = [(name, *(percent_saved(name, n) for n in (2, 4, 6))) for name in NAMES]
table(["blocks saved, %", "n = 2", "n = 4", "n = 6"], rows)
wrong_saved = {
    83: "that is five sixths of everything; but only full blocks of the prompt are shared",
    20: "about five sixths of the prompt's share of all tokens; but a prompt shares its full "
    "blocks only, and most of these prompts do not fill one",
}
compare(my_saved, round(rows[1][3], 1), "percent of blocks saved", wrong_saved)
short = np.mean([prompt < 16 for prompt, _ in lengths["instructions"]])
say(f"{100 * short:.0f} % of the instructions do not fill their first block. They share nothing.")
assert short > 0.5

# %% [markdown]
# So samples save little where prompts are short: after the prompt they have nothing in common. (The study puts the
# paper's figures beside these.)
#
# ### Beam search
#
# Beam search keeps the `beam_width` best texts so far, its *hypotheses*. At every token each is continued in all ways, and
# the best of *all* continuations live on. If two of them have the same parent, the parent is forked. A parent without
# children is freed. So relatives share not only the prompt but everything before they parted. Four hypotheses for the
# same instruction, 58 tokens each. (Which of them win may depend on the last digit of a sum, so the output may differ a
# little on your machine.)


# %% tags=["nbval-ignore-output"]
beams = BeamSearchParams(beam_width=4, max_tokens=58, ignore_eos=True)
[found] = llm.beam_search({"prompt_token_ids": TASK}, beams)
outputs = [sequence.output_token_ids for sequence in found.sequences]
common = next(i for i, column in enumerate(zip(*outputs, strict=True)) if len(set(column)) > 1)
entries, saved = predicted(len(TASK), 58, 4)
say(f"""
    Blocks saved: {100 * found.blocks_saved:.0f} %; four samples of this length would save
    {100 * saved / entries:.0f} %. Of 58 tokens, the first **{common}** are the same in all four.
""")
print(*(repr(tokenizer.decode(output[common:])) for output in outputs), sep="\n")
assert found.blocks_saved > 2 * saved / entries

# %% [markdown]
# More than twice as much, and the number in bold says why. All live hypotheses descend from one that lived a few tokens
# ago; the other branches have died out. What is *not* shared is only what came after that: mostly the last block.
#
# ## The code as it stands
#
# The fork is a few lines. In `append`, read the branch that lesson 04 asked you to skip. The last piece is who forks in
# a beam search: the first child takes the parent's table over, the others fork it, and only then are parents without
# children freed.

# %%
show_source(BlockTable.tail_is_shared, BlockTable.append, BlockTable.fork)
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
# What does it look like when the second rule is broken? `engine_with_a_fault` takes out of `append` the question
# whether the last block is shared. Six words in common, and one more for each of two sequences. **How many words read
# wrong, in both together?**

# %%
my_words_astray = None  # your guess

# %%
with engine_with_a_fault():
    pool, memory, parent = begin()
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

# %% [markdown]
# No count is wrong, and nothing crashes. A prompt of 16 tokens, a full block, would show nothing, and neither would
# greedy samples, which all write the same word. So such a fault survives tests with round numbers.
#
# ## Find the bug
#
# A server lets a reader stop one of two parallel samples. It works: the sample ends, the other goes on. Hours later,
# another reader finds a stranger's words in the middle of an answer. Nothing was raised. This is what runs when a
# reader presses stop:


# %%
def stop(one, pool):
    """End a sample that nobody wants to read any more."""
    blocks = one.blocks.copy()
    one.free()
    pool.free(blocks)


pool, memory, parent = begin()
stop(parent.fork(), pool)
print("the other sample reads:", words_of(parent, memory))

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
#
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
