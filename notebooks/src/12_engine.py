# %% [markdown]
# # 12 · The whole engine
#
# Blocks, tables, kernels, a scheduler: the lessons before took the engine apart. This one puts it to work. One budget,
# two policies, hundreds of requests; then a clock on every part of a step.
#
# **You will be able to** say, from a budget and a few lengths, how many requests a server can run at once; measure it
# on the whole engine; and name what a step spends its time on before you make anything faster.
#
# About 45 minutes. Runs in about a minute on two CPU cores; a GPU is used when there is one.

# %%
import time
from functools import partial

import ipywidgets
import numpy as np
import torch

from minipaged import LLM, KVSpec, SamplingParams, load_model
from minipaged.attention import get_backend
from coursekit.clocks import PARTS, WAYS, put_clocks, take_turns, timed_step
from coursekit.comparison import equal_outputs, serve
from coursekit.figures import memory_over_time, show
from coursekit.figures.engine import requests_at_once, step_parts
from coursekit.lesson import compare, number, pick_device, say, show_source, table
from coursekit.silent import SilentModel, add_all, at_once, exactly, replay, silent_engine
from coursekit.widgets import Explorable
from coursekit.workloads import azure_lengths, load_mix, lognormal_lengths
from minipaged.cpu.accelerate import accelerate
from minipaged.engine.engine import Engine

# %% [markdown]
# ## The question
#
# A server accepts conversations of up to 4096 tokens. Its [budget](../docs/glossary.md#budget) for keys and values
# holds exactly eight of them, if each gets a contiguous strip of that length. The model is SmolLM2, in 16-bit numbers.

# %%
device, half = pick_device()
loaded = load_model("smollm2-135m", dtype=half, device=device)
loaded, _ = accelerate(loaded, get_backend("auto", device))  # on a CPU, as LLM would; see below
config = loaded.config
MAX_LEN, STRIPS = 4096, 8
SLOTS = STRIPS * MAX_LEN
bytes_per_token = KVSpec.from_model(config, half).bytes_per_token
BUDGET = SLOTS * bytes_per_token
say(f"""
    {STRIPS} × {number(MAX_LEN)} tokens × {number(bytes_per_token)} bytes =
    **{BUDGET // 2**20} MiB**, or {number(SLOTS)} slots.
""")
assert bytes_per_token == 23_040 and BUDGET == 720 * 2**20

# %% [markdown]
# Two kinds of traffic, all of it waiting when the server opens:
#
# - **conversations**: the lengths of real requests to Azure, one of every ninety of a trace of 2023, without those that
#   are longer than 4096;
# - **instructions**: short questions and answers, log-normal with the means of the PagedAttention paper's Alpaca
#   workload (the spread is ours: lesson 03).

# %%
trace = azure_lengths("conv")  # int64 [n, 2]: prompt, answer
too_long = trace.sum(axis=1) > MAX_LEN
conversations = trace[~too_long][::90]
instructions = lognormal_lengths("alpaca", 2000, seed=0)
TRAFFIC = {"conversations": conversations, "instructions": instructions}
table(
    ["", "requests", "prompt, mean", "answer, mean", "longest, together"],
    [
        (name, len(lengths), *map("{:.1f}".format, lengths.mean(axis=0)), lengths.sum(axis=1).max())
        for name, lengths in TRAFFIC.items()
    ],
)
assert 0.05 < too_long.mean() < 0.1  # a little of the real traffic is left out

# %% [markdown]
# **How many run at once when memory is handed out in [blocks](../docs/glossary.md#block) of 16? And what does a step
# then spend its time on?**
#
# ## Your prediction
#
# In strips it is eight, whatever the traffic. From blocks? And when many requests decode together, what share of a step
# is spent multiplying by the weights of the layers?

# %%
my_conversations = None  # your guess: conversations at once, from blocks
my_instructions = None  # your guess: instructions at once, from blocks
my_weights_percent = None  # your guess: percent of a decode step

# %% [markdown]
# ## Measure
#
# ### The whole traffic
#
# Serving all of it to the end with SmolLM2, twice, takes a laptop too long for a lesson. But which request runs, which
# one waits and which block is whose depends on lengths only. So we take the real engine with a *silent* model, one that
# always says token 0. What it says about memory is exact, and its clock counts steps.

# %%
show_source(SilentModel)

# %%
POLICIES = {"strips": MAX_LEN, "blocks": 16}
replay_here = partial(replay, config, half, num_slots=SLOTS, max_len=MAX_LEN)
served = {
    (name, policy): replay_here(lengths, block_size=block_size)
    for name, lengths in TRAFFIC.items()
    for policy, block_size in POLICIES.items()
}
show(
    memory_over_time(
        {policy: list(served["conversations", policy][0].trace) for policy in POLICIES},
        BUDGET,
        x_label="step",
    ),
    "All conversations, to the end. Eight strips reserve the whole budget and leave most of it "
    "empty; blocks fill it with tokens and are done in a third of the steps.",
)

# %% [markdown]
# That is the course in one picture. And in numbers? "At once" needs a definition: at the opening all requests are new and
# hold only a prompt, so more of them fit than later. We count while others wait, and only the second half of that time.

# %%
running = {key: at_once(engine) for key, (engine, _) in served.items()}
rows = []
for (name, policy), (engine, requests) in served.items():
    ttft = float(np.mean([request.metrics.ttft for request in requests]))
    rows.append((f"{name}, {policy}", running[name, policy], engine.stats.num_steps, ttft))
table(["", "at once", "steps for all", "steps to the first token, mean"], rows)

naive = (
    "that is slots over the mean length; but long requests run longer, and hold a part of it only"
)
wrong = {
    name: {round(SLOTS / lengths.sum(axis=1).mean()): naive} for name, lengths in TRAFFIC.items()
}
found = {name: round(running[name, "blocks"]) for name in TRAFFIC}
unit = "conversations at once"
compare(my_conversations, found["conversations"], unit, wrong["conversations"])
compare(my_instructions, found["instructions"], "instructions at once", wrong["instructions"])
for name in TRAFFIC:
    (strips, _), (blocks, _) = served[name, "strips"], served[name, "blocks"]
    assert running[name, "strips"] == STRIPS == max(record.running for record in strips.trace)
    assert strips.stats.num_steps > 3 * blocks.stats.num_steps
    assert blocks.stats.num_finished == strips.stats.num_finished == len(TRAFFIC[name])
assert running["conversations", "blocks"] > 3 * STRIPS and running["instructions", "blocks"] > 200

# %% [markdown]
# From eight to a few dozen when the requests are long, from eight to hundreds when they are short. Same budget, same
# engine.
#
# ### The real model, for a while
#
# Now SmolLM2, and seconds. A crowd: 256 of the instructions. From blocks, for twenty steps; then in strips, for the same
# number of *seconds*. Nothing is added that you would not run yourself; clocks come later.


# %%
def make_llm(block_size):
    llm = LLM(
        loaded,
        device=device,
        block_size=block_size,
        kv_memory=BUDGET,
        max_model_len=MAX_LEN,
        max_num_seqs=SLOTS // 16,
        max_num_batched_tokens=SLOTS,
        enable_prefix_caching=False,
    )
    warm_up = {"prompt_token_ids": [0]}
    llm.generate(warm_up, exactly(2), use_tqdm=False)
    llm.engine.reset_stats()
    return llm


def run_for_a_while(block_size, lengths, more):
    """Step while more(steps, seconds); returns the LLM, its requests and the seconds."""
    llm = make_llm(block_size)
    requests = add_all(llm.engine, lengths)
    start = time.perf_counter()
    while more(len(llm.trace), time.perf_counter() - start):
        llm.engine.step()
    return llm, requests, time.perf_counter() - start


# %%
STEPS, crowd = 20, instructions[:256]
by_blocks = run_for_a_while(16, crowd, lambda steps, seconds: steps < STEPS)
window = by_blocks[-1]
by_strips = run_for_a_while(
    MAX_LEN, crowd, lambda steps, seconds: steps < STEPS or seconds < window
)
real, rows = {"strips": by_strips, "blocks": by_blocks}, []
for policy, (llm, *_) in real.items():
    silent, _ = replay_here(crowd, block_size=POLICIES[policy])
    measured = [record.running for record in llm.trace]
    assert measured == [record.running for record in silent.trace][: len(measured)]
    rows.append((policy, max(measured)))
table(["", "at once, at most"], rows)
print("in every step the real model ran exactly as many requests as the silent one")
assert [most for _, most in rows] == [STRIPS, 256]

# %% tags=["nbval-ignore-output"]
rows = []
for policy, (llm, requests, seconds) in real.items():
    ttft = [request.metrics.ttft for request in requests if request.metrics.ttft is not None]
    speed = llm.stats.num_generation_tokens / seconds
    only = [r.decode_tokens / r.duration for r in llm.trace if not r.prefill_tokens]
    first = (len(ttft), float(np.mean(ttft)), len(crowd) - len(ttft))
    rows.append((policy, speed, float(np.median(only)), *first))
names = ["tokens per second", "in steps that only decode"]
names += ["got a first token", "after, mean (s)", "still wait"]
table([f"after {window:.1f} seconds", *names], rows)
times, decoding = (rows[1][column] / rows[0][column] for column in (1, 2))
say(f"""
    From blocks {times:.1f} times the tokens per second, the computing of prompts included;
    {decoding:.1f} times in steps that only decode.
""")

# %% [markdown]
# [Throughput](../docs/glossary.md#throughput) has grown by much less than the number of requests, if at all: a processor
# can only multiply so fast, and the 256 prompts were a good part of the work. Be careful with the column of the
# [TTFT](../docs/glossary.md#ttft): in strips it is the mean of the few that had got in when we stopped. All that still
# wait will have a longer one. What blocks take away for certain is that wait.
#
# Nothing is free: the eight that got a strip had their first token sooner than any of the 256, whose prompts were all
# computed in one step. A server that minds sets `max_num_batched_tokens` lower (lessons 08 and 11). Real conversations,
# with the real model and prompts in chunks, are in the study [Real lengths](extra/12_real_lengths.ipynb).
#
# ## The picture
#
# Does the number at once depend on the longest length that the server accepts? **In strips** it is slots divided by that
# length. **From blocks** it is slots divided by what a request *holds*, on average over the time it runs. With a prompt
# of $p$ and an answer of $a$ tokens it begins with $p$, ends with $p + a$ and takes $a$ steps. So it holds $p + a/2$ on
# average, and counts $a$ times. The last block is half empty (lesson 04):
#
# $$\text{at once} = \frac{\text{slots}}{h}, \qquad h = \frac{\sum a\,(p + a/2)}{\sum a} + \frac{B - 1}{2}$$


# %%
def holds(lengths, block_size=16):
    """Slots that a running request holds, on average over its steps."""
    prompt, answer = lengths.T
    return (answer * (prompt + answer / 2)).sum() / answer.sum() + (block_size - 1) / 2


predicted = {name: SLOTS / holds(lengths) for name, lengths in TRAFFIC.items()}
table(
    ["", "slots it holds", "at once, predicted", "measured"],
    [(n, holds(TRAFFIC[n]), predicted[n], running[n, "blocks"]) for n in TRAFFIC],
)
assert 0.95 < running["conversations", "blocks"] / predicted["conversations"] < 1.05
assert 1.1 < running["instructions", "blocks"] / predicted["instructions"] < 1.3

# %% [markdown]
# Right for conversations. For instructions it is too low, because the formula is for traffic that goes on and on, and
# 2000 instructions are too few: nothing waits any more before the longest of them have grown. With 8000 of them the two
# agree to within five percent, and the paper's numbers follow from its lengths in the same way: see the study [Longer
# queues](extra/12_longer_queues.ipynb).
#
# The longest length is not in the formula. Does it really not matter?

# %%
for max_len in (1024, 2048):
    strips, _ = replay_here(instructions, block_size=max_len, max_len=max_len, most_steps=5)
    most = max(record.running for record in strips.trace)
    print(f"longest length {max_len}: {most} at once in strips")
    assert most == SLOTS // max_len
blocks, _ = replay_here(instructions, block_size=16, max_len=1024, most_steps=150)
as_before = list(served["instructions", "blocks"][0].trace)[:150]
assert [r.running for r in blocks.trace] == [r.running for r in as_before]
print("longest length 1024: from blocks, in every step as many as with 4096")

# %%
LENGTHS = [512, 1024, 2048, 4096, 8192]


def draw(conversations_that_fit):
    slots = conversations_that_fit * MAX_LEN
    levels = {
        name: (int(lengths.sum(axis=1).max()), slots / holds(lengths))
        for name, lengths in TRAFFIC.items()
    }
    points = {}
    if slots == SLOTS:  # what this lesson measured
        points["strips"] = [(n, SLOTS // n) for n in (1024, 2048, 4096)]
        points["blocks"] = [(MAX_LEN, running[name, "blocks"]) for name in TRAFFIC]
    said = ", ".join(f"{level:.0f} {name}" for name, (_, level) in levels.items())
    figure = requests_at_once(slots, LENGTHS, levels, points)
    return figure, (
        f"{slots * bytes_per_token / 2**20:.0f} MiB: {conversations_that_fit} at once in strips "
        f"of {MAX_LEN}; from blocks, by arithmetic: {said}."
    )


fit = ipywidgets.IntSlider(value=8, min=1, max=32, description="strips")
Explorable({"conversations_that_fit": fit}, draw)

# %% [markdown]
# Move the slider: it sets the budget, counted in strips of 4096. (A line for blocks begins at the longest of its
# requests: a server that accepts less refuses some.) All lines rise and fall together; the distance between them stays.
# It grows with the longest length, which is a promise, and shrinks with the lengths that really come.
#
# ## Why
#
# ### Where every millisecond goes
#
# More requests at once make a step longer. By how much, and what takes the time? Now clocks go around the parts, for a
# few more steps of the same two engines, with eight requests and with the crowd.
#
# **One thing has to be switched off for that.** On most CPUs with a C++ compiler, all layers of the model are one call,
# and there is no place for a clock in it. So the watched steps call layer by layer, which gives the same
# numbers, more slowly; and `take_turns` times the other ways in between.

# %%
show_source(put_clocks)

# %% tags=["nbval-ignore-output"]
whole, steps = {}, {}
for name, (llm, *_) in {"eight requests": by_strips, "the crowd": by_blocks}.items():
    whole[name], steps[name] = take_turns(llm)
fresh = make_llm(16)
add_all(fresh.engine, crowd)
_, prompts = timed_step(fresh.engine, clocks=True, fused=False)  # the first step: prefill
show(
    step_parts({**steps, "all prompts of the crowd": {p: prompts.get(p, 0.0) for p in PARTS}}),
    "Three bars: what a decode step of eight, one of the crowd, and the step that computes the "
    "prompts of the crowd spend their time on.",
)
del fresh
few, many = steps.values()
wrong_weights = {
    100: "most of it, but each request's own attention, and the head, take their share"
}
answer = round(100 * many["weights"] / sum(many.values()))
compare(my_weights_percent, answer, "percent for the weights of the layers", wrong_weights)

# %% tags=["nbval-ignore-output"]
table(
    ["ms of the whole step", *whole],
    [(way, *(1e3 * seconds[way] for seconds in whole.values())) for way in WAYS],
)
decoding = by_blocks[0].trace[-1].decode_tokens
few_s, many_s = (seconds["as you run it"] for seconds in whole.values())
python_s = many["scheduler"] + many["bookkeeping"]
say(f"""
    The crowd's step does {decoding / STRIPS:.0f} times the work of the small one in
    {many_s / few_s:.1f} times the time. Scheduler and bookkeeping take
    {1e6 * python_s / decoding:.0f} µs for each request, {100 * python_s / many_s:.1f} % of the
    step.
""")

# %% [markdown]
# How to read it:
#
# - **weights** are read once in a step, for eight requests or for hundreds. With few, reading takes the time; with many,
#   multiplying. That is why a crowd costs less than its number.
# - **attention** reads each request's own keys. They are not shared, so it grows with the number and with the lengths;
#   these requests are short.
# - **the head** is one matrix, but the largest: it has a row for each word of the vocabulary.
# - **scheduler and bookkeeping** are Python, once for each request and step. Most of this course is about them, and they
#   are a small part here. A GPU makes the model faster and leaves Python as it is, so there they weigh more.
#
# On a CPU with a C++ compiler, the layers above ran in C++, in the folder [minipaged/cpu](../minipaged/cpu); without one
# the model of lesson 01 and the attention of lesson 05 serve. What replaces what, and that both choose the same tokens,
# is in the study [What your laptop ran](extra/12_what_your_laptop_ran.ipynb).

# %% [markdown]
# ## The code as it stands
#
# A step plans, computes, commits; nothing counts before the commit. The scheduler is lesson 11's, the model lesson 01's,
# its attention that of lessons 05 to 08. Two helpers are new, and decide nothing: one writes the trace that the pictures
# above are drawn from, one turns new tokens into text and outputs.

# %%
show_source(Engine._advance, Engine._compute, Engine._commit)

# %% [markdown]
# Two things to notice. When anything raises, `_recover` sends all requests back to the queue: their tokens are known, so
# nothing is lost but time. If that is interrupted too, `_in_doubt` is still set, and the next step begins with it. And
# the only place where a request becomes longer is `_commit`.
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | the budget is never exceeded, in no step | the card runs out of memory, and every request dies |
# | every block comes home | the server slows down over days, and a restart helps |
# | the policy changes when a token is computed, never which | answers depend on what else is running |
# | every request is served, in full | some wait for ever |
#
# The budget, at each of the thousands of steps above, with the real model and with the silent one:

# %%
engines = [run[0].engine for run in real.values()] + [engine for engine, _ in served.values()]
for engine in engines:
    assert engine.storage.nbytes <= BUDGET
    assert all(0 < r.used_bytes <= r.reserved_bytes <= BUDGET for r in engine.trace)
fullest = max(record.reserved_bytes for record in served["instructions", "blocks"][0].trace)
say(f"At its fullest, blocks held {100 * fullest / BUDGET:.1f} % of the budget.")
assert fullest > 0.98 * BUDGET
# Every block comes home. Where an engine was stopped in the middle, its requests go home first.
for engine in engines:
    engine.check_invariants()
    for name in list(engine.requests):
        assert engine.abort_request(name)
    engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks
print("blocks that did not come home:", sum(e.pool.num_blocks - e.pool.num_free for e in engines))

# %% [markdown]
# The same tokens. In 16 bits, rounding can tip a choice between two words, and it differs with the number of rows in a
# batch. So we compare in float32: the real model, six short requests, in a budget that holds two strips.

# %%
exact = load_model("smollm2-135m", dtype=torch.float32, device=device)
short = sorted(load_mix("instruct64"), key=lambda r: r.max_tokens)[:6]
two_strips = 2 * 128 * KVSpec.from_model(config, torch.float32).bytes_per_token
settings = {"kv_memory": two_strips, "max_model_len": 128, "device": device, "use_tqdm": False}
settings["max_num_batched_tokens"] = 2048
runs = [serve(name, exact, short, block_size=b, **settings) for name, b in (("s", 128), ("b", 16))]
print("at once:", [run.figures()["running_peak"] for run in runs])
print("same tokens:", equal_outputs(*runs), "of", len(short))
assert equal_outputs(*runs) == len(short)
assert runs[0].figures()["running_peak"] == 2 < runs[1].figures()["running_peak"]

# %% [markdown]
# ## Find the bug
#
# A team puts a web page in front of the engine. Each reader sees the answer as it grows:


# %%
def answer_as_it_grows(engine, name, prompt, answer):
    engine.add_request(name, prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
    (request,) = engine.requests[name].samples
    while not request.output.finish_reason:
        engine.step()
        yield request.output.token_ids


engine = silent_engine(config, half, num_slots=1024, block_size=16, max_len=MAX_LEN)
said = list(answer_as_it_grows(engine, "test", [0] * 60, 100))[-1]
print(f"the test: {len(said)} tokens, {engine.pool.num_free} of 64 blocks free afterwards")
assert len(said) == 100 and engine.pool.num_free == 64

# %% [markdown]
# It passes its test. In the evening the page is slow. The log says that only one reader is there at a time, and that
# each reads three words and goes away, annoyed. Free blocks, after each of them:

# %%
for reader in range(8):
    words = answer_as_it_grows(engine, f"reader {reader}", [0] * 60, 900)
    for _ in range(3):
        next(words)
    words.close()
    print(f"reader {reader} has left, {engine.pool.num_free:2} blocks free")
left = engine.pool.num_free

# %% [markdown]
# **Where are the blocks? Decide before you go on.**

# %%
print("readers: 0   the engine's requests:", len(engine.requests))
before = engine.stats.num_generation_tokens
for _ in range(100):
    engine.step()
written = engine.stats.num_generation_tokens - before
print(f"words written in 100 steps for nobody: {written}, blocks free: {engine.pool.num_free}")
assert left < 64 / 2 and written > 500

for name in list(engine.requests):
    engine.abort_request(name)
assert engine.pool.num_free == 64

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Closing a generator ends the *reading*. The engine is not told, so it goes on writing to `max_tokens` for readers who
# have left, and their blocks grow all the time. Nothing is lost for ever, so no test for leaks sees it; but the busier
# the page, the more ghosts. ROCm's server ATOM had this (pull requests 1562 and 1589).
#
# Code that starts a request has to end it on every way out. In Python that is `finally`:
# </details>

# %%
from minipaged.engine.dispatcher import Dispatcher

show_source(Dispatcher.stream)
llm = by_blocks[0]
stream = llm.stream({"prompt_token_ids": [0] * 60}, exactly(900))
for _ in range(3):
    next(stream)
assert llm.engine.pool.num_free < llm.engine.pool.num_blocks
stream.close()
assert llm.engine.pool.num_free == llm.engine.pool.num_blocks and not llm.engine.requests

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. All answers become twice as long, prompts stay. Does the number at once halve?</summary>
#
# No. A request holds its prompt and half of its answer on average, and only the second part doubles. For conversations
# with long prompts the number falls a little, for instructions by nearly half.
# </details>
#
# <details><summary>2. At the opening more requests run at once than an hour later. Why?</summary>
#
# They are all new: they hold a prompt and nothing else. Then they grow, all together, the pool runs dry, and the
# youngest are [preempted](../docs/glossary.md#preemption).
# </details>
#
# <details><summary>3. Twice as many requests at once. Is throughput doubled?</summary>
#
# Only while a step takes as long as before, that is, while reading the weights takes the time. Once multiplying does, a
# step grows with its rows, and more at once only means that fewer wait.
# </details>
#
# <details><summary>4. The silent model wrote no keys. Why could we believe what it said about memory?</summary>
#
# The scheduler decides by lengths and free blocks. Answers end at a given length here, so no token decides anything.
# The real model then ran as many as the silent one in every step, which an assertion checked.
# </details>

# %% [markdown]
# ## Summary
#
# - One budget: eight strips of 4096. From blocks a few dozen real conversations at once, or hundreds of instructions.
# - In strips the longest length allowed decides; from blocks, what a request holds on average while it runs.
# - A crowd shares the reading of the weights. That is where throughput comes from, until arithmetic is the limit.
# - Plan, compute, commit. The budget is never exceeded, every block comes home, the tokens are the same.
# - Code that starts a request ends it, on every way out.
#
# **Write it yourself:** [exercise 12](../exercises/12_capstone/12_capstone.ipynb), your own parts in this engine.
#
# **Next:** [13 · Smaller K and V](13_smaller_kv.ipynb) stores keys and values in 8 bits. To go back:
# [11 · The scheduler](11_scheduler.ipynb).
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180), section 6.2 and figure 13: requests at once.
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: one plan
#   for each step.
# - P. Patel et al., *Splitwise*, 2024, [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure trace (Azure
#   Public Dataset, AzureLLMInferenceTrace_conv, Microsoft, CC-BY 4.0).
