# %% [markdown]
# # 00 · Start here
#
# A language model writes one [token](../docs/glossary.md#token) at a time, and keeps notes about every token that came
# before: its *keys and values*. For a server these notes, the [KV cache](../docs/glossary.md#kv-cache), are the scarce
# thing. They fill the memory of the card long before its arithmetic is busy.
#
# This course builds the software that manages that memory, the way vLLM and its relatives do: cut it into small equal
# blocks, hand a block out when a token needs one, and find it again through a table. An operating system does the same
# with the memory of its programs, and calls it *paging*.
#
# The course comes with its engine, `minipaged`: small enough to read in an evening, real enough to serve a real model.
# The lessons take it apart, piece by piece.
#
# **After this lesson you will** know what your machine can do here, how a lesson works, and what all of it is for.
#
# About 20 minutes. Everything runs on a laptop without a GPU.

# %%
from minipaged import LLM, SamplingParams, load_model
from coursekit.comparison import serve
from coursekit.figures import memory_over_time, show
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.workloads import load_mix

# %% [markdown]
# ## Your machine
#
# What runs here, and what does not? (`minipaged doctor` prints the same, with all the facts, on the command line.)

# %% tags=["nbval-ignore-output"]
from minipaged.commands.doctor import abilities
from minipaged.machine import inspect

table(["", "here?"], [(able.name, "yes" if able.runs else "no") for able in abilities(inspect())])

# %% [markdown]
# The first line has to say yes. If another says no, the lesson that needs it tells you what it does instead.
#
# Now wake the model. SmolLM2-135M is small, but it is the real thing: a Llama, trained on two trillion tokens, answering
# in your machine's memory. (Where your machine has bfloat16 or a GPU, it is used.)

# %%
device, half = pick_device()
loaded = load_model("smollm2-135m", dtype=half, device=device)
llm = LLM(loaded, device=device, kv_memory="16MiB", max_model_len=512)

# %% tags=["nbval-ignore-output"]
question = [{"role": "user", "content": "In one sentence: why do people keep notes?"}]
[answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
print(answer.outputs[0].text.strip())

# %% [markdown]
# ## How a lesson works
#
# Each lesson goes the same way, and so does this one:
#
# 1. a **question**, and **your prediction**. Cells with `my_… = None` wait for a number of yours;
# 2. a **measurement**, on the real engine, and a **picture** of it;
# 3. **why** it came out so, and **the code as it stands**: shown from its file in `minipaged/`, never a copy;
# 4. **what must hold**: the rules that a correct engine never breaks, each as an `assert` that you can run;
# 5. **find the bug**: a failure that really happened somewhere. You get the symptom; you name the cause;
# 6. questions to **check yourself**, with answers folded away, and the **sources**. Lessons 01 to 12 also lead to an
#    **exercise**, in which you write the decisive part yourself.
#
# Nothing here asks to be believed. Where the text states a number, a cell beside it computes the number and asserts
# it. An assertion that does not hold stops the lesson, like this:

# %%
try:
    assert 6 * 9 == 42, "six times nine is not forty-two"
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# The outputs you see were stored when the lesson was built. `make test` runs all lessons again and compares every line.
# What depends on your machine (times, the words of an answer) is shown, not compared.

# %% [markdown]
# ## The question
#
# Sixty-four people send a short question at the same moment. The server has 64 MiB for keys and values. It does not know
# how long an answer will be; it only knows that question and answer together never exceed 512 tokens.
#
# **How many of the sixty-four can be served at once?**
#
# Two ways to keep their notes:
#
# - **strips**: each request gets one contiguous strip of memory, long enough for 512 tokens, when it starts;
# - **blocks**: each request gets memory for 16 tokens at a time, when it needs it, wherever there is some.

# %%
requests = load_mix("instruct64")
BUDGET, MAX_LEN = "64MiB", 512
longest = max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
assert len(requests) == 64 and longest < MAX_LEN / 3
say(f"The longest of these requests needs {longest} of the {MAX_LEN} tokens, answer included.")

# %% [markdown]
# ## Your prediction
#
# One token's keys and values take 23 040 bytes in this model (lesson 02 measures it). You can work both numbers out,
# or guess. Write them down first.

# %%
my_at_once_in_strips = None  # your guess: requests served at once
my_at_once_in_blocks = None  # your guess

# %%
assert llm.engine.storage.spec.bytes_per_token == 23_040

# %% [markdown]
# ## Measure
#
# The same model, the same engine, the same requests. The only difference is the size of a block: a block of 512 tokens
# *is* a strip. (This takes half a minute: the model really answers all of them, twice.)

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
compare(my_at_once_in_strips, at_once[0], "requests at once in strips")
compare(my_at_once_in_blocks, at_once[1], "requests at once in blocks")

# %% [markdown]
# ## The picture
#
# Both columns have the same axes. Grey is memory that a request had reserved and that held nothing.

# %%
show(
    memory_over_time({run.policy: run.samples for run in runs}, 64 * 2**20),
    "KV memory over time: strips reserve the budget and leave it empty; blocks end much sooner.",
)

# %% tags=["nbval-ignore-output"]
seconds = [run.seconds for run in runs]
say(f"On this machine: {seconds[0]:.0f} s in strips, {seconds[1]:.0f} s in blocks.")

# %% [markdown]
# ## Why
#
# **Strips.** Five strips of 512 tokens are all that the budget holds. The sixth person waits, although nine tenths of the
# memory is empty: it is *reserved*, for words that may be said and mostly never are.
#
# **Blocks.** Nobody reserves. A short answer takes little, a long one more, and what one request does not take is there
# for the next. All sixty-four fit at once.
#
# More requests at once is not only kinder to those who wait. Each step of a model reads all its weights from memory, for
# one request or for sixty-four. Fewer steps, the same work: that is where the time goes.

# %%
strip_bytes = MAX_LEN * 23_040
assert 64 * 2**20 // strip_bytes == 5
assert strips.waste.share_of_taken < 0.1 < 0.8 < blocks.waste.share_of_taken
assert strips.figures()["steps"] > 3 * blocks.figures()["steps"]

# %% [markdown]
# ## The code as it stands
#
# How many blocks does a request hold? The whole difference between the two policies is the second argument.

# %%
from minipaged.memory import blocks_for

show_source(blocks_for)
rows = [(str(n), 512 * blocks_for(n, 512), 16 * blocks_for(n, 16)) for n in (1, 16, 17, 149)]
table(["tokens of a request", "room it holds in strips", "room it holds in blocks"], rows)

# %% [markdown]
# ## What must hold
#
# Whatever the policy: everybody is served, in full; and every byte of the budget is accounted for at every step, used
# or reserved or free. An engine that loses a block now and then has lost them all in the end.

# %%
for run in runs:
    assert sum(run.waste.kinds.values()) == run.waste.budget
    assert max(sample.reserved_bytes for sample in run.samples) <= 64 * 2**20
    for request, output in zip(requests, run.outputs, strict=True):
        assert len(output.outputs[0].token_ids) == request.max_tokens

# %% [markdown]
# ## Find the bug
#
# Your first one. A small engine counts its blocks like this, and it passes its tests: lengths of 5, 9 and 100 tokens.
# Then somebody notices that requests of certain lengths hold a block in which no token ever stands. Which lengths?


# %%
def blocks_held(num_tokens, block_size=16):
    return num_tokens // block_size + 1


assert all(blocks_held(n) == blocks_for(n, 16) for n in (5, 9, 100))

# %% [markdown]
# **Decide before you run the next cell.**

# %%
wrong = [n for n in range(1, 100) if blocks_held(n) != blocks_for(n, 16)]
print(wrong)
assert wrong == [16, 32, 48, 64, 80, 96]

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Exact multiples of the block size. `n // size + 1` is the quotient rounded up *except* where nothing is left over. One
# block in sixteen requests seems little, but the same mistake the other way round (`n % size` as "tokens in the last
# block", which is 0 for a full one) makes a kernel read nothing, or the wrong block. It has been found in several
# engines, which is why every grader of this course tries the exact multiple first.
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
# | 06 | [A first Triton kernel](06_first_triton_kernel.ipynb) | a kernel you can read, on a machine without a GPU |
# | 07 | [A fast decode kernel](07_fast_decode.ipynb) | bytes, bandwidth, and where the time goes |
# | 08 | [Prefill and chunks](08_prefill_and_chunks.ipynb) | ragged batches and the right corner of a mask |
# | 09 | [Copy-on-write](09_copy_on_write.ipynb) | many answers to one question, which is stored once |
# | 10 | [Sharing prefixes](10_sharing_prefixes.ipynb) | a system prompt stored once for everybody |
# | 11 | [The scheduler](11_scheduler.ipynb) | who runs, who waits, who gives way |
# | 12 | [The engine, whole](12_engine.ipynb) | one budget, hundreds of requests |
# | 13 | [Smaller K and V; and vLLM today](13_smaller_kv_and_vllm.ipynb) | what the big engines do the same, and what not |
#
# 01 to 05 build on one another. After that, 06–08 (kernels) and 09–11 (sharing and scheduling) can be read in either order.

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. In strips, five requests run at once. Which single number would you have to change to run ten?</summary>
#
# The longest length that a request may have, halved. Or twice the memory. That answers are short does not help at all:
# a strip has the size of what *might* come.
# </details>
#
# <details><summary>2. In blocks, some memory that was taken held no token either. Where is it?</summary>
#
# In the last block of each request, after its last token: at most fifteen empty places, whatever the maximum length.
# </details>
#
# <details><summary>3. Why not blocks of a single token?</summary>
#
# Nothing would be wasted. But the table grows as long as the text, and memory is read fastest in long runs. Lesson 04
# measures the first, lesson 07 the second.
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
# - Reserving for the worst case served a handful; taking blocks when they are needed served everybody, from the same
#   memory, with the same model.
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
