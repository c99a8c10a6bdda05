# %% [markdown]
# # 00 · Start here
#
# A language model reads and writes text in [tokens](../docs/glossary.md#token): words or pieces of words. For every token it
# has seen it keeps notes, called *keys and values*, and it reads them all again for every token that it writes. On a server
# these notes, the [KV cache](../docs/glossary.md#kv-cache), are what runs out: they fill the card's memory long before its
# arithmetic is busy.
#
# This course builds the software that manages that memory, the way vLLM and its relatives do: cut it into small blocks of
# equal size, hand out a block when a token needs one, and find it again through a table. An operating system does the same
# with the memory of its programs, and calls it *paging*.
#
# The course comes with its engine, `minipaged`: small enough to read in an evening, real enough to serve a real model. The
# lessons take it apart, piece by piece.
#
# **After this lesson you will** know what your machine can do here, how a lesson works, and what all of it is for.
#
# **What you need.** Python, well enough to read a class; PyTorch tensors, well enough to know what a shape and a matrix product
# are; a laptop. No GPU. Attention is explained in lesson 01, kernels in lesson 06, and nothing of vLLM is assumed.
#
# **How long it takes.**
# About 20 minutes for this lesson, 15 to 50 for each of the others, some ten hours in all. The exercises, where you write the
# decisive parts yourself, take about as long again. In a hurry? Read 01, 02, 04, 05 and 12: that is an afternoon.

# %%
from minipaged import LLM, SamplingParams, load_model
from coursekit.comparison import serve
from coursekit.figures import memory_over_time, show
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.workloads import load_mix
from minipaged.memory import blocks_for

# %% [markdown]
# ## Your machine
#
# What runs here, and what does not? (On the command line, `minipaged doctor` prints the same table with all the facts.)

# %% tags=["nbval-ignore-output"]
from minipaged.commands.doctor import abilities
from minipaged.machine import inspect

table(["", "here?"], [(able.name, "yes" if able.runs else "no") for able in abilities(inspect())])

# %% [markdown]
# The first line has to say yes. Where another line says no, the lesson that needs it says so and shows its stored outputs.
#
# Now load the model. SmolLM2-135M is small, but it is the real thing: a Llama, which is the most widely copied design of a
# language model, trained on two trillion tokens. Its *weights*, 135 million numbers, are what it has learnt. (If your machine
# has bfloat16 or a GPU, it is used.)

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
# 3. **why** it came out that way, and **the code as it stands**: shown from its file in the engine, never a copy;
# 4. **what must hold**: the rules that a correct engine never breaks, each as an `assert` that you can run;
# 5. **find the bug**: a failure that really happened somewhere. You get the symptom; you name the cause;
# 6. questions to **check yourself**, with folded answers, and the **sources**. Lessons 01 to 12 also lead to an **exercise**, in
#    which you write the decisive part yourself.
#
# You need not take our word for anything. Where the text states a number, a cell beside it computes the number and asserts it.
# An assertion that does not hold stops the lesson, like this:

# %%
try:
    assert 6 * 9 == 42, "six times nine is not forty-two"
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# The outputs you see were stored when the lesson was built. `make test` runs all lessons again and compares every line.
# What depends on your machine (times, the words of an answer) is shown but not compared.

# %% [markdown]
# ## The question
#
# Sixty-four people send a short question at the same moment. The server has 64 MiB for keys and values. It does not know
# how long an answer will be; it only knows that question and answer together never exceed 512 tokens.
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
assert len(requests) == 64 and max(lengths) < MAX_LEN / 3 and 2900 <= capacity < 2950
say(f"""
    {BUDGET} hold the keys and values of about {round(capacity, -2)} tokens. The longest of these
    requests needs {max(lengths)} of the {MAX_LEN} tokens, answer included; the average one
    {sum(lengths) / len(lengths):.0f}.
""")

# %% [markdown]
# ## Your prediction
#
# The first number can be worked out. The second cannot, since it depends on who has finished when; it can only be estimated.
# Write both down before you go on.

# %%
my_at_once_in_strips = None  # your guess: requests served at once
my_at_once_in_blocks = None  # your guess

# %% [markdown]
# ## Measure
#
# The same model, the same engine, the same requests. The only difference is the size of a block: a block of 512 tokens
# *is* a strip. One run of the model over the tokens that are due is called a *step*. (This takes half a minute: the model
# really answers everybody, twice.)

# %%
settings = {"kv_memory": BUDGET, "max_model_len": MAX_LEN, "device": device, "use_tqdm": False}
settings["max_num_batched_tokens"] = 2048  # in a step, on every machine
strips = serve("one strip per request", loaded, requests, block_size=MAX_LEN, **settings)

# %%
blocks = serve("blocks of 16 tokens", loaded, requests, block_size=16, **settings)

# %%
runs = (strips, blocks)
rows = [
    ("requests at once, at most", [run.figures()["running_peak"] for run in runs]),
    ("steps of the model", [run.figures()["steps"] for run in runs]),
    (
        "% of the memory taken that held a token",
        [100 * run.waste.share_of_taken for run in runs],
    ),
]
table(["", *(run.policy for run in runs)], [(name, *values) for name, values in rows])

# %%
at_once = [run.figures()["running_peak"] for run in runs]
assert at_once == [5, 64]
wrong_in_strips = {
    64: "that would need strips as long as the requests really are; nobody knows that in advance",
    capacity // max(lengths): "that is for strips as long as the longest of these requests, but "
        "the server does not know it and reserves 512 tokens for everybody",
    6: "the sixth strip would begin inside the budget and end outside it",
}
compare(my_at_once_in_strips, at_once[0], "requests at once in strips", wrong_in_strips)

# %%
num_blocks = capacity // 16
held_at_the_end = sum(blocks_for(n, 16) for n in lengths)
if_all_were_full = num_blocks * 64 // held_at_the_end
wrong_in_blocks = {
    if_all_were_full: "so many fit if each has grown to its full length; but they never are all "
        "at full length at the same moment",
    capacity // max(lengths): "that is for 64 requests as long as the longest one",
    capacity * 64 // sum(lengths): "that is the memory over the average length "
        "at the end; they start short, and many have ended before others begin to be long",
}
compare(my_at_once_in_blocks, at_once[1], "requests at once in blocks", wrong_in_blocks)
say(f"""
    At full length the sixty-four would need {held_at_the_end} blocks of 16, and the budget has
    {num_blocks}. They fit because short answers have ended before the long ones have grown.
""")
assert held_at_the_end > num_blocks

# %% [markdown]
# ## The picture
#
# Both columns have the same axes. Grey is memory that a request has reserved and that holds nothing. (The white gap on the
# left, between 56 and 64 MiB, is shorter than a strip: it cannot be given to anybody.)

# %%
show(
    memory_over_time({run.policy: run.samples for run in runs}, BUDGET_BYTES),
    "KV memory over time, two columns. With strips, five requests at a time reserve 56 of 64 MiB "
    "and leave nearly all of it empty. With blocks, what is taken is nearly full; all 64 requests "
    "run at once, and they are done much sooner.",
)

# %% tags=["nbval-ignore-output"]
seconds = [run.seconds for run in runs]
say(f"On this machine: {seconds[0]:.0f} s in strips, {seconds[1]:.0f} s in blocks.")

# %% [markdown]
# ## Why
#
# **Strips.** The budget holds five strips of 512 tokens and no more. The sixth person waits, although more than nine tenths of the
# memory is empty: it is *reserved*, for words that might be said and mostly never are.
#
# **Blocks.** Nobody reserves anything. A short answer takes little and a long one more, and what has ended is free for the others
# at once. All sixty-four run together. (The picture in the README is of other, longer requests, so its
# numbers differ.)
#
# Serving more requests at once is not only kinder to those who wait. In each step a model reads all its weights from memory,
# whether for one request or for sixty-four. With blocks the same answers take far fewer steps, and that is what saves the time.

# %%
assert capacity // MAX_LEN == 5
share = strips.waste.share_of_taken
say(f"In strips {100 * (1 - share):.0f} % of what was taken held nothing, in blocks "
    f"{100 * (1 - blocks.waste.share_of_taken):.0f} %.")
assert share < 0.1 < 0.8 < blocks.waste.share_of_taken
assert strips.figures()["steps"] > 3 * blocks.figures()["steps"]

# %% [markdown]
# ## The code as it stands
#
# How many blocks does a request hold? The only thing that differs between the two policies is the second argument.

# %%
show_source(blocks_for)
rows = [(str(n), 512 * blocks_for(n, 512), 16 * blocks_for(n, 16)) for n in (1, 16, 17, 149)]
table(["tokens of a request", "room it holds in strips", "room it holds in blocks"], rows)

# %% [markdown]
# ## What must hold
#
# Under either policy everybody is served in full, and in every step each byte of the budget is accounted for: used, reserved
# or free. An engine that loses one block now and then will one day have lost them all.

# %%
for run in runs:
    assert sum(run.waste.kinds.values()) == run.waste.budget
    assert max(sample.reserved_bytes for sample in run.samples) <= BUDGET_BYTES
    for request, output in zip(requests, run.outputs, strict=True):
        assert len(output.outputs[0].token_ids) == request.max_tokens
    print(f"{run.policy}: {len(run.outputs)} answers complete, every byte accounted for")

# %% [markdown]
# ## Find the bug
#
# Your first one. A small engine counts its blocks like this, and it passes its tests: lengths of 5, 9 and 100 tokens.
# Then somebody notices that requests of certain lengths hold one block that stays empty. Which lengths?

# %%
def blocks_held(num_tokens, block_size=16):
    return num_tokens // block_size + 1


passes = [n for n in (5, 9, 100) if blocks_held(n) == blocks_for(n, 16)]
print("its tests pass for lengths", passes)
assert passes == [5, 9, 100]

# %% [markdown]
# **Decide before you run the next cell.**

# %%
wrong = [n for n in range(1, 100) if blocks_held(n) != blocks_for(n, 16)]
print(wrong)
assert wrong == [16, 32, 48, 64, 80, 96]

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Exact multiples of the block size. `n // size + 1` rounds the quotient up, *except* where nothing is left over. One empty
# block in a few requests seems little. But the same mistake the other way round (taking `n % size` for the number of tokens in
# the last block, which gives 0 for a full one) makes a kernel read nothing, or the wrong block. Every grader of this course
# tries the exact multiple first.
# </details>

# %% [markdown]
# ## The map
#
# | | lesson | you leave with |
# |:--|:--|:--|
# | 00 | Start here | you are here |
# | 01 | [Why keep K and V](01_why_cache.ipynb) | the cost of a token, with and without a cache |
# | 02 | [How the cache grows](02_kv_growth.ipynb) | bytes per token, predicted and measured |
# | 03 | [What contiguous preallocation wastes](03_contiguous_waste.ipynb) | three kinds of waste, on real traffic |
# | 04 | [Blocks and block tables](04_block_tables.ipynb) | an allocator and a table, and the same traffic again |
# | 05 | [Attention through the table](05_paged_attention.ipynb) | why shuffled memory changes nothing |
# | 06 | [A first Triton kernel](06_first_triton_kernel.ipynb) | three small kernels and a real one, on a machine without a GPU |
# | 07 | [A fast decode kernel](07_fast_decode.ipynb) | bytes, bandwidth, and where the time goes |
# | 08 | [Prefill and chunks](08_prefill_and_chunks.ipynb) | ragged batches and the right corner of a mask |
# | 09 | [Copy-on-write](09_copy_on_write.ipynb) | many answers to one question, which is stored once |
# | 10 | [Sharing prefixes](10_sharing_prefixes.ipynb) | a system prompt stored once for everybody |
# | 11 | [The scheduler](11_scheduler.ipynb) | who runs, who waits, who gives way |
# | 12 | [The whole engine](12_engine.ipynb) | one budget, hundreds of requests |
# | 13 | [Smaller K and V](13_smaller_kv.ipynb) | keys and values in eight bits, and their error |
# | 14 | [vLLM today](14_vllm_today.ipynb) | what the big engines do the same, and what they do differently |
#
# 01 to 05 build on one another. After that, 06–08 (kernels) and 09–11 (sharing and scheduling) can be read in either order.
# Studies that lead further are in [notebooks/extra](extra); the lessons link to them.

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. In strips, five requests run at once. Which single number would you have to change to run ten?</summary>
#
# The longest length that a request may have: halve it. (Or double the memory.) That answers are short does not help at all: a
# strip has the size of what *might* come.
# </details>
#
# <details><summary>2. In blocks, some of the memory that was taken held no token either. Where is it?</summary>
#
# In the last block of each request, after its last token: at most fifteen empty places, whatever the maximum length.
# </details>
#
# <details><summary>3. Why not blocks of a single token?</summary>
#
# Nothing would be wasted. But the table would have an entry for every token, and it is read in every step. Lesson 04 measures what
# a block size costs in both directions.
# </details>
#
# <details><summary>4. What is the difference between "reserved" and "used"?</summary>
#
# Reserved is memory that nobody else can have. Used is memory that holds the keys and values of a token. The first can
# be far larger than the second; this course is about the gap.
# </details>

# %% [markdown]
# ## Summary
#
# - The KV cache decides how many requests a server can run at once.
# - Reserving for the worst case served five at a time; taking blocks when they are needed served all sixty-four, from the
#   same memory, with the same model.
# - Predict, measure, assert: that is how each lesson works.
#
# **Next:** [01 · Why keep K and V](01_why_cache.ipynb), which asks whether we need this cache at all.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): where the idea comes from.
# - L. Ben Allal et al., *SmolLM2: When Smol Goes Big*, 2025, [arXiv:2502.02737](https://arxiv.org/abs/2502.02737): the
#   model, and the two trillion tokens.
