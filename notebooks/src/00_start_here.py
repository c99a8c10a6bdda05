# %% [markdown]
# # 00 · Start here
#
# A language model reads and writes text in [tokens](../docs/glossary.md#token): words or pieces of words. For every token it
# has seen it keeps notes, called *keys and values*, and it reads them all again for every token that it writes. On a server
# these notes, the [KV cache](../docs/glossary.md#kv-cache), are what runs out first.
#
# This course builds the software that manages that memory, the way vLLM does: cut it into small blocks of equal size, hand out a
# block when a token needs one, and find it again through a table. An operating system does the same with the memory of its
# programs, and calls it *paging*. The lessons take apart an engine, `minipaged`, that is small enough to read in an evening and
# serves a real model.
#
# **What you need.** Python, well enough to read a class; PyTorch tensors, well enough to know what a matrix product is; a laptop.
# No GPU. Attention is explained in lesson 01, kernels in lesson 06.
#
# **How long it takes.**
# About 15 minutes for this lesson, 15 to 50 for each of the others. The exercises, where you write the decisive parts yourself,
# take about as long again. In a hurry? Read 01, 02, 04, 05 and 12: that is an afternoon.

# %%
from minipaged import LLM, SamplingParams, load_model
from minipaged.commands.doctor import abilities
from minipaged.machine import inspect
from coursekit.comparison import serve
from coursekit.figures import memory_over_time, show
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.workloads import load_mix
from minipaged.memory import blocks_for

# %% [markdown]
# ## Your machine
#
# What runs here, and what does not? (`minipaged doctor` says more.)

# %% tags=["nbval-ignore-output"]
table(["", "here?"], [(able.name, "yes" if able.runs else "no") for able in abilities(inspect())])

# %% [markdown]
# The first line has to say yes. Where another says no, the lesson that needs it shows its stored outputs.
#
# Now load the model. SmolLM2-135M is small, but real: a Llama, the most widely copied design, trained on two trillion tokens. Its
# *weights*, 135 million numbers, are what it has learnt.

# %%
device, half = pick_device()
loaded = load_model("smollm2-135m", dtype=half, device=device)
llm = LLM(loaded, device=device, kv_memory="16MiB", max_model_len=512)

# %% tags=["nbval-ignore-output"]
question = [{"role": "user", "content": "What is the capital of France?"}]
[answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
print(answer.outputs[0].text.strip())

# %% [markdown]
# ## How a lesson works
#
# Every lesson has the same parts, and so does this one:
#
# 1. a **question** and **your prediction**. Cells with `my_… = None` wait for a number from you;
# 2. a **measurement** on the real engine, and a **picture** of it;
# 3. **why** it came out that way, and **the code as it stands**, shown from its file in the engine;
# 4. **what must hold**: the rules that a correct engine never breaks, each as an `assert` that you can run;
# 5. **find the bug**: you get the symptom, you name the cause;
# 6. questions to **check yourself**, and the **sources**. Lessons 01 to 12, and 15, also lead to an **exercise**.
#
# The outputs you see were stored when the lesson was built; `make test` runs all lessons again and compares every line, except what
# depends on your machine.

# %% [markdown]
# ## The question
#
# Sixty-four people send a short question at the same moment. The server has 64 MiB for keys and values. It does not know how long
# an answer will be, only that question and answer together never exceed 512 tokens.
#
# **How many of the sixty-four can be served at once?**
#
# There are two ways to keep their keys and values:
#
# - **strips**: when a request starts, it gets one contiguous strip of memory, long enough for 512 tokens;
# - **blocks**: a request gets memory for 16 tokens at a time, when it needs it, wherever some is free.

# %%
requests = load_mix("instruct64")
BUDGET, BUDGET_BYTES, MAX_LEN = "64MiB", 64 * 2**20, 512
lengths = [len(request.prompt_token_ids) + request.max_tokens for request in requests]
capacity = BUDGET_BYTES // llm.engine.storage.spec.bytes_per_token
say(f"{BUDGET} hold the keys and values of about {round(capacity, -2)} tokens. The longest "
    f"request has {max(lengths)}, answer included, the average one {sum(lengths) / 64:.0f}.")

# %% [markdown]
# ## Your prediction
#
# The first number can be worked out. The second depends on who has finished when; it can only be estimated. Write both down before
# you go on.

# %%
my_at_once_in_strips = None  # your guess: requests served at once
my_at_once_in_blocks = None  # your guess

# %% [markdown]
# ## Measure
#
# The same model, engine and requests. The only difference is the size of a block: a block of 512 tokens *is* a strip. One run of
# the model over the tokens that are due is called a *step*. (This takes half a minute.)

# %%
settings = {"kv_memory": BUDGET, "max_model_len": MAX_LEN, "max_num_batched_tokens": 2048}
settings |= {"device": device, "use_tqdm": False}
strips = serve("one strip per request", loaded, requests, block_size=MAX_LEN, **settings)
blocks = serve("blocks of 16 tokens", loaded, requests, block_size=16, **settings)

# %%
runs = (strips, blocks)
table(["", "requests at once", "steps of the model", "% of the memory taken that held a token"],
      [(run.policy, run.figures()["running_peak"], run.figures()["steps"],
        100 * run.waste.share_of_taken) for run in runs])
assert strips.figures()["steps"] > 3 * blocks.figures()["steps"]

# %%
wrong_in_strips = {
    64: "nobody knows in advance how long each request will be",
    capacity // max(lengths): "the server cannot know the longest length; it reserves 512 tokens",
}
peaks = [run.figures()["running_peak"] for run in runs]
assert peaks == [5, 64]
compare(my_at_once_in_strips, peaks[0], "requests at once in strips", wrong_in_strips)
num_blocks, at_the_end = capacity // 16, sum(blocks_for(n, 16) for n in lengths)
full = num_blocks * 64 // at_the_end
assert full < 64
wrong_in_blocks = {full: "so many fit at full length, which they never reach all at once"}
compare(my_at_once_in_blocks, peaks[1], "requests at once in blocks", wrong_in_blocks)
say(f"At full length the sixty-four would need {at_the_end} blocks; the budget has {num_blocks}. "
    "They fit because short answers have ended before the long ones have grown.")

# %% [markdown]
# ## The picture
#
# Both columns have the same axes. Grey is memory that a request has reserved and that holds nothing. (The white gap on the
# left, between 56 and 64 MiB, is too short for another strip.)

# %%
show(
    memory_over_time({run.policy: run.samples for run in runs}, BUDGET_BYTES),
    "KV memory over time. With strips, five requests at a time reserve 56 of 64 MiB and leave most "
    "of it empty. With blocks, what is taken is nearly full, and all 64 are done much sooner.",
)


# %% [markdown]
# ## Why
#
# **Strips.** The budget holds five strips of 512 tokens and no more. The sixth person waits, although more than nine tenths of the
# memory is empty: it is *reserved*, for words that might be said and mostly never are.
#
# **Blocks.** A short answer takes little and a long one more, and what has ended is free for the others at once. All sixty-four
# run together.
#
# That is also faster: in each step a model reads all its weights from memory, whether for one request or for sixty-four. With
# blocks there are far fewer steps.

# %% [markdown]
# ## The code as it stands
#
# How many blocks does a request hold?

# %%
show_source(blocks_for)


# %% [markdown]
# ## What must hold
#
# Everybody is served in full, and in every step each byte of the budget is used, reserved or free. An engine that loses one block
# now and then will one day have lost them all.

# %%
for run in runs:
    assert sum(run.waste.kinds.values()) == run.waste.budget
    written = [len(output.outputs[0].token_ids) for output in run.outputs]
    assert written == [request.max_tokens for request in requests]
    print(f"{run.policy}: {len(run.outputs)} answers complete, every byte accounted for")

# %% [markdown]
# ## Find the bug
#
# Your first one. A small engine counts its blocks like this, and it passes its tests: lengths of 5, 9 and 100 tokens.
# Then somebody notices that requests of certain lengths hold one block that stays empty. Which lengths?

# %%
def blocks_held(num_tokens, block_size=16):
    return num_tokens // block_size + 1


print("its tests pass for lengths", [n for n in (5, 9, 100) if blocks_held(n) == blocks_for(n, 16)])


# %% [markdown]
# **Decide before you run the next cell.**

# %%
print([n for n in range(1, 100) if blocks_held(n) != blocks_for(n, 16)])


# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Exact multiples of the block size: `n // size + 1` rounds the quotient up, *except* where nothing is left over. Every grader of
# this course tries the exact multiple first.
# </details>

# %% [markdown]
# ## The map
#
# | | |
# |:--|:--|
# | the ground | [01 Why keep K and V](01_why_cache.ipynb) · [02 How the cache grows](02_kv_growth.ipynb) · [03 What contiguous preallocation wastes](03_contiguous_waste.ipynb) · [04 Blocks and block tables](04_block_tables.ipynb) · [05 Attention through the table](05_paged_attention.ipynb) |
# | kernels | [06 A first Triton kernel](06_first_triton_kernel.ipynb) · [07 A fast decode kernel](07_fast_decode.ipynb) · [08 Prefill and chunks](08_prefill_and_chunks.ipynb) |
# | sharing, scheduling | [09 Copy-on-write](09_copy_on_write.ipynb) · [10 Sharing prefixes](10_sharing_prefixes.ipynb) · [11 The scheduler](11_scheduler.ipynb) |
# | all of it | [12 The whole engine](12_engine.ipynb) · [13 Smaller K and V](13_smaller_kv.ipynb) · [14 vLLM today](14_vllm_today.ipynb) · [15 Serving](15_serving.ipynb) |
#
# 01 to 05 build on one another; kernels and sharing can then be read in either order. Studies that lead further are in
# [notebooks/extra](extra).

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. In strips, five requests run at once. Which single number would you have to change to run ten?</summary>
#
# The longest length that a request may have: halve it. That answers are short does not help: a strip has the size of what *might*
# come.
# </details>
#
# <details><summary>2. In blocks, some of the memory that was taken held no token either. Where is it?</summary>
#
# In the last block of each request, after its last token: at most fifteen empty places, whatever the maximum length.
# </details>
#
# <details><summary>3. Why not blocks of a single token?</summary>
#
# Nothing would be wasted, but the table would have an entry for every token, and it is read in every step.
# </details>

# %% [markdown]
# ## Summary
#
# - The KV cache decides how many requests a server can run at once.
# - Reserving for the worst case served five at a time; taking blocks when they are needed served all sixty-four, from the
#   same memory.
#
# **Next:** [01 · Why keep K and V](01_why_cache.ipynb): do we need this cache at all?
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): where the idea comes from.
# - L. Ben Allal et al., *SmolLM2: When Smol Goes Big*, 2025, [arXiv:2502.02737](https://arxiv.org/abs/2502.02737): the
#   model, and the two trillion tokens.
