# %% [markdown]
# # 12 · Exercise: an engine of your own
#
# The lesson is [12 · The whole engine](../../notebooks/12_engine.ipynb). This is the last exercise, and most of it is written already, by you: the block table
# of exercise 04, the kernel of 07, the hashes and the prefix cache of 10, the scheduler of 11. What is missing is the step that joins them. When it is there,
# SmolLM2 answers from memory that is yours.
#
# Each task has one cell for your answer and a check below it. The check runs that cell alone, in a process of its own, with the course's parts in place of
# yours: a mistake that it finds is one of this cell, not of an older exercise. An import or a helper that you need must stand in the same cell.

# %%
# Triton decides when it is imported whether it compiles or interprets, so this comes first.
import os

os.environ["TRITON_INTERPRET"] = "1"

from coursekit.capstone import load_answers
from coursekit.checks import attempt, check
from coursekit.lesson import show_source

# %% [markdown]
# ## Your parts
#
# They come from the notebooks beside this one, as you saved them, and each passes its own check again before it is taken. If one is missing, do that exercise
# first; or write `load_answers("..", ours=["07"])`, and you get the course's own solution of it. The list says which is whose.

# %%
mine = load_answers("..")

# %%
MyBlockTable = mine.MyBlockTable  # (pool, block_size): append(n), blocks, free()
MyPrefixCache = mine.MyPrefixCache  # (num_blocks): allocate(n), publish, lookup, share, free
my_block_hashes = mine.my_block_hashes  # (token_ids, block_size): one hash for each full block
MyScheduler = mine.MyScheduler  # (num_blocks, block_size, max_running): add, step(), running
my_decode_kernel = mine.my_decode_kernel

# %% [markdown]
# Where is your pool of exercise 04? The prefix cache is a pool: it has `allocate` and `free`, and so your table takes its blocks from it and never notices.
#
# ## Task 1 · The step that joins them
#
# *About 24 lines · difficulty 4 of 5 · 60 minutes · 8 points*
#
# Your scheduler only counts: it decides who runs, and says that there is room. Your engine asks it, and does what it says with real blocks. A step has two
# halves, and between them the model computes: `schedule()` plans it, `update()` takes over what came out. (vLLM's scheduler has the same two: `schedule` and
# `update_from_output`.)
#
# **Contract.** `schedule()` asks `self.scheduler.step()` who gets a token, and answers a list with one entry `(name, new, start, blocks)` for each of these names, in
# their order:
# - `new`: the token ids that this step computes, all those of the request that are not stored yet; `start`: how many are; `blocks`: the blocks of all its tokens.
# - Whoever has blocks and is not among the names **gave way**: all its blocks go back first.
# - A request that **starts**, or comes back, looks up its hashes in `self.cache` and holds the blocks that are found with `share`, at once. What it still needs comes
#   from a new `MyBlockTable(self.cache, …)`: hits are whole blocks, so this table begins where they end. But at least the last token is always computed, since the next
#   one comes from its row: so look up the hashes of the first `len(tokens) - 1` tokens only.
#
# `update(sampled)` is told by name which token the model chose for each. All tokens that a request had before are stored now: publish its full blocks under their
# hashes, then add the new token. Whoever is not in `self.scheduler.running` any more is done, and all its blocks go back.
#
# Given: `tokens`, `hits`, `tables` and `stored` by name, the last three only for those that run; `add` and `blocks`.
#
# **Example.** 8 blocks of 4 tokens, and `a` with a prompt of 10 tokens that asks for 3. The first `schedule()` answers `("a", the ten, 0, [0, 1, 2])`. After
# `update({"a": 42})` blocks 0 and 1 are published, and the next one answers `("a", [42], 10, [0, 1, 2])`. When `a` is done, 8 blocks are free. Now `b` comes with the
# same ten tokens: `("b", the last two, 8, [0, 1, …])`. With a prompt of only the first 8 it would start at 4, not at 8.
#
# <details><summary>Hint 1</summary>
#
# Three things happen to a request: it starts, it goes on, it leaves. Leaving happens in two places, to those who gave way and to those who are done, so make it a
# function: the table's `free()`, then `self.cache.free` of the hits, and the three dicts forget the name.
#
# <details><summary>Hint 2</summary>
#
# In `schedule`: first all who leave, then one loop over the names. A name without a table starts: hashes, `lookup`, `share`, table, and `stored` is `len(hits) * block_size`.
# Then, for everybody, the table appends `len(tokens) - stored` tokens.
#
# <details><summary>Hint 3</summary>
#
# `hashes = my_block_hashes(tokens[:-1], block_size)` are those to look up. In `update`: `zip(self.blocks(name), my_block_hashes(tokens, block_size))` are the full blocks with
# their hashes, because `zip` ends with the shorter one. Publish before `tokens.append(token)`: the new token is not stored yet.
#
# </details></details></details>

# %% nbgrader={"grade_id": "engine_step", "solution": true}
class MyEngine:
    """Scheduler, prefix cache and block tables: what a step computes, and what came out of it."""

    def __init__(self, num_blocks, block_size, max_running):
        self.block_size = block_size
        self.scheduler = MyScheduler(num_blocks, block_size, max_running)
        self.cache = MyPrefixCache(num_blocks)
        self.tokens = {}  # name -> token ids, prompt and answer
        self.hits = {}  # name -> blocks that were found in the cache
        self.tables = {}  # name -> the table of the tokens after those
        self.stored = {}  # name -> how many tokens have their keys and values in memory

    def add(self, name, prompt, output):
        """A request: token ids, and how many more it asks for."""
        self.scheduler.add(name, len(prompt), output)
        self.tokens[name] = list(prompt)

    def blocks(self, name):
        """All blocks of a request that runs, in the order of its tokens."""
        return [*self.hits[name], *self.tables[name].blocks]

    def schedule(self):
        """Plan a step: a list of (name, new, start, blocks)."""
        ### BEGIN SOLUTION
        served = self.scheduler.step()
        for name in [name for name in self.tables if name not in served]:
            self.leave(name)
        plan = []
        for name in served:
            tokens = self.tokens[name]
            if name not in self.tables:
                self.hits[name] = self.cache.lookup(my_block_hashes(tokens[:-1], self.block_size))
                self.cache.share(self.hits[name])
                self.tables[name] = MyBlockTable(self.cache, self.block_size)
                self.stored[name] = len(self.hits[name]) * self.block_size
            start = self.stored[name]
            self.tables[name].append(len(tokens) - start)
            plan.append((name, tokens[start:], start, self.blocks(name)))
        return plan
        ### END SOLUTION

    def update(self, sampled):
        """The step was computed: `sampled` has the next token of each name in it."""
        ### BEGIN SOLUTION
        for name, token in sampled.items():
            tokens = self.tokens[name]
            for block, key in zip(self.blocks(name), my_block_hashes(tokens, self.block_size)):
                self.cache.publish(block, key)
            self.stored[name] = len(tokens)
            tokens.append(token)
            if name not in self.scheduler.running:
                self.leave(name)

    def leave(self, name):
        """Every block goes back; the tokens stay."""
        self.tables.pop(name).free()
        self.cache.free(self.hits.pop(name))
        del self.stored[name]
        ### END SOLUTION

# %% [markdown]
# The example, without a model: its token is always 42.

# %%
with attempt():
    engine = MyEngine(num_blocks=8, block_size=4, max_running=2)
    for name in "ab":
        engine.add(name, [11, 12, 13, 14, 15, 16, 17, 18, 19, 20], output=3)
        for _ in range(3):
            plan = engine.schedule()
            print(plan)
            engine.update({name: 42})
    print(engine.cache.num_free, "of 8 blocks are free again")

# %% nbgrader={"grade_id": "engine_step-check", "grade": true}
check.engine_step(MyEngine)

# %% [markdown]
# ## Task 2 · From a plan to the rows of a kernel
#
# *About 10 lines · difficulty 2 of 5 · 20 minutes · 4 points*
#
# A kernel knows no names. It gets tensors: your kernel of exercise 07 answers one query a row, and reads the keys and values of that row through a table. A prompt
# has many queries. It still needs no other kernel, and no mask: let every new token be a row of its own. All rows of a request have its table, and each sees one
# token more than the row before it. (The engine's own kernel for prompts, of lesson 08, computes the same and reads each key once for many rows.)
#
# **Contract.** `my_batch(plan, block_size)` returns five lists, with one element for each new token, in the order of the plan. `plan` is what `schedule()` answers, and stays as it is.
# - `token_ids`, and `positions`, which count from 0.
# - `slots`: where its key and value are written, block · block_size + offset.
# - `block_tables`: the blocks of its request, filled up with 0 at the end so that all are as long as the longest.
# - `context_lens`: how many tokens the row sees, itself included.
#
# **Example.** Block size 4. `a` decodes token 42 at position 10, in blocks [6, 1, 2]; `b` begins with two tokens in block 5. `my_batch([("a", [42], 10, [6, 1, 2]), ("b", [7, 8], 0, [5])], 4)`
# has the token ids [42, 7, 8], positions [10, 0, 1], slots [10, 20, 21] (2 · 4 + 2, 5 · 4, 5 · 4 + 1), tables [[6, 1, 2], [5, 0, 0], [5, 0, 0]] and context lengths [11, 1, 2].
#
# <details><summary>Hint 1</summary>
#
# Two loops: over the entries of the plan, and over the new tokens of each. In the inner one every list gets one element.
#
# <details><summary>Hint 2</summary>
#
# `enumerate(new, start)` gives positions with their tokens. A row at position p sees p + 1 tokens.
#
# <details><summary>Hint 3</summary>
#
# The longest table is `max(len(blocks) for name, new, start, blocks in plan)`, and a row's is `list(blocks) + [0] * (longest - len(blocks))`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "engine_batch", "solution": true}
def my_batch(plan, block_size):
    """Token ids, positions, slots, tables and context lengths: one of each for every new token."""
    ### BEGIN SOLUTION
    token_ids, positions, slots, block_tables, context_lens = [], [], [], [], []
    longest = max(len(blocks) for _, _, _, blocks in plan)
    for _, new, start, blocks in plan:
        for position, token in enumerate(new, start):
            token_ids.append(token)
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
            block_tables.append(list(blocks) + [0] * (longest - len(blocks)))
            context_lens.append(position + 1)
    return token_ids, positions, slots, block_tables, context_lens
    ### END SOLUTION

# %% nbgrader={"grade_id": "engine_batch-check", "grade": true}
check.engine_batch(my_batch)

# %% [markdown]
# ## SmolLM2 answers from your memory
#
# This is all that stands between your engine and a language model:

# %%
import torch

from coursekit.capstone import Runner, most_held, serve
from coursekit.figures.engine import blocks_over_steps
from coursekit.figures.style import show
from minipaged import LLM, SamplingParams, load_model

show_source(serve)

# %% [markdown]
# The model in float32, a memory of 20 blocks of 16 tokens, and six questions after one system prompt. The first comes alone, the others after its first step,
# so they find what it has published. Each asks for another number of tokens. `Runner` computes the rows, here with plain torch.

# %%
SYSTEM = """You are a helpful assistant of a school. Children of eight ask you questions. You answer
in one short and friendly sentence, with words that a child knows, and you never make things up."""
QUESTIONS = {
    "What is a cache?": 28, "Why is the sky blue?": 20, "What do bees eat?": 12,
    "Who was Ada Lovelace?": 24, "What is the capital of France?": 8, "How do birds fly?": 16,
}
NUM_BLOCKS, BLOCK_SIZE = 20, 16

model = load_model("smollm2-135m", dtype=torch.float32, device="cpu")
prompts = {}
for question in QUESTIONS:
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    prompts[question] = model.tokenizer.encode(model.tokenizer.apply_chat_template(said))


def ask(engine, runner):
    """All questions, the first one step ahead of the others; the blocks of each step."""
    first, *others = QUESTIONS
    engine.add(first, prompts[first], QUESTIONS[first])
    plan = engine.schedule()
    engine.update(runner.next_tokens(plan, my_batch(plan, BLOCK_SIZE)))
    for question in others:
        engine.add(question, prompts[question], QUESTIONS[question])
    return [{first: list(plan[0][3])}, *serve(engine, runner, my_batch)]

# %%
answers = []
with attempt():
    engine = MyEngine(NUM_BLOCKS, BLOCK_SIZE, max_running=8)
    steps = ask(engine, Runner(model, NUM_BLOCKS, BLOCK_SIZE))
    answers = [engine.tokens[question][len(prompts[question]) :] for question in QUESTIONS]
    for question, answer in zip(QUESTIONS, answers):
        print(f"{question:<32}{' '.join(model.tokenizer.decode(answer).split())}")
    print(engine.cache.num_free, "of", NUM_BLOCKS, "blocks are free again")

# %% [markdown]
# Does the course's engine say the same, token for token? (If it does not, and both checks have passed, one of your older parts does here what its own check did
# not see. Take the course's own instead, one after the other, with `ours`, and you find out which.)

# %%
if answers:
    llm = LLM(model, device="cpu", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    greedy = {"temperature": 0, "ignore_eos": True}
    params = [SamplingParams(max_tokens=n, **greedy) for n in QUESTIONS.values()]
    given = [{"prompt_token_ids": prompt} for prompt in prompts.values()]
    outputs = llm.generate(given, params, use_tqdm=False)
    theirs = [list(output.outputs[0].token_ids) for output in outputs]
    print("tokens that are the same:", sum(map(len, answers)), "of", sum(map(len, theirs)))
    assert answers == theirs

# %% [markdown]
# ## The picture of your memory
#
# Every block in every step, as your tables had them. Blue is held by several requests at once: the system prompt, stored once. Grey ends where a request is
# done; its blocks keep what is in them until somebody needs them. Strips as long as the longest text that the server accepts, say 128 tokens, would take eight
# blocks each: two requests at once.

# %%
if answers:
    figure = blocks_over_steps(steps, NUM_BLOCKS)
    show(figure, "the blocks of your pool in each step; blue where shared")
    strips = NUM_BLOCKS * BLOCK_SIZE // 128
    print("requests at once:", max(map(len, steps)), "at most; in strips of 128:", strips)
    print("blocks in use:   ", most_held(steps), "at most, of", NUM_BLOCKS)

# %% [markdown]
# ## And through your kernel
#
# Above torch attended. Now your kernel of exercise 07 does, in every layer and for every row, a prompt's rows too. Triton's interpreter takes some milliseconds for each
# of a row's 270 programs (9 query heads in 30 layers), so on a processor this says only a few words; on a card the same kernel would be compiled.

# %%
def attend(query, key_cache, value_cache, block_tables, context_lens, scale):
    """What the model calls in each layer; a tile holds a block."""
    from coursekit.given.launches import launch_decode

    cache = key_cache, value_cache
    return launch_decode(
        my_decode_kernel, query, *cache, block_tables, context_lens, scale, tile=16
    )


with attempt():
    engine = MyEngine(num_blocks=2, block_size=BLOCK_SIZE, max_running=1)
    runner = Runner(model, 2, BLOCK_SIZE, attend)
    prompt = model.tokenizer.encode("Blocks are")
    engine.add("words", prompt, output=4)
    serve(engine, runner, my_batch)
    print(model.tokenizer.decode(engine.tokens["words"]))
    print("your kernel was called", runner.num_calls, "times")

# %% [markdown]
# ## Where this leads
#
# You have written an engine. Read the course's own, [engine.py](../../minipaged/engine/engine.py) and [scheduler.py](../../minipaged/core/scheduler.py), as somebody who has
# done it: `schedule()` is your scheduler's step and the first half of yours in one, so it counts what is shared when it decides who may enter; yours counts every request as
# if it were alone. `_commit` is your `update`. What it does besides: prompts come in chunks, samples fork, blocks may be swapped, and nothing is hashed twice. And where your `my_batch` makes a
# row of every token, [runner.py](../../minipaged/core/runner.py) writes a request's row once and keeps it.
