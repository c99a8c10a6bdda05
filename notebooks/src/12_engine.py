# %% [markdown]
# # 12 · The whole engine
#
# The lessons before took the engine apart. This one puts it to work. One budget, two policies, hundreds of requests; then
# a clock on every part of a step.
#
# **You will be able to** say, from a budget and a few lengths, how many requests a server can run at once; measure it
# on the whole engine; and name what a step spends its time on.
#
# About 30 minutes. Runs in about a minute on two CPU cores; a GPU is used when there is one.

# %%
from functools import partial

from minipaged import KVSpec, SamplingParams, load_model
from minipaged.attention import get_backend
from coursekit.clocks import PARTS, put_clocks, take_turns, timed_step
from coursekit.figures import memory_over_time, show
from coursekit.figures.engine import requests_at_once, step_parts
from coursekit.lesson import compare, number, pick_device, say, show_source, table
from coursekit.silent import SilentModel, add_all, at_once, exactly, real_llm, replay, silent_engine
from coursekit.workloads import azure_lengths, lognormal_lengths
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
loaded, _ = accelerate(loaded, get_backend("auto", device))  # on a CPU, as LLM would
config = loaded.config
MAX_LEN, STRIPS = 4096, 8
SLOTS = STRIPS * MAX_LEN
bytes_per_token = KVSpec.from_model(config, half).bytes_per_token
BUDGET = SLOTS * bytes_per_token
say(f"""
    {STRIPS} × {number(MAX_LEN)} tokens × {number(bytes_per_token)} bytes =
    **{BUDGET // 2**20} MiB**, or {number(SLOTS)} slots.
""")

# %% [markdown]
# Two kinds of traffic, all of it waiting when the server opens:
#
# - **conversations**: the lengths of real requests to Azure, one of every ninety of a trace of 2023, without those that
#   are longer than 4096;
# - **instructions**: short questions and answers, log-normal with the means of the PagedAttention paper's Alpaca
#   workload (the spread is ours: lesson 03).

# %%
trace = azure_lengths("conv")  # int64 [n, 2]: prompt, answer
conversations = trace[trace.sum(axis=1) <= MAX_LEN][::90]
TRAFFIC = {
    "conversations": conversations,
    "instructions": lognormal_lengths("alpaca", 2000, seed=0),
}
table(
    ["", "requests", "prompt, mean", "answer, mean", "longest, together"],
    [(n, len(x), *map("{:.1f}".format, x.mean(0)), x.sum(1).max()) for n, x in TRAFFIC.items()],
)

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
# Serving all of it with SmolLM2, twice, takes a laptop too long. But which request runs, which one waits and which block
# is whose depends on lengths only. So we take the real engine with a *silent* model, one that always says token 0. What
# it says about memory is exact, and its clock counts steps.

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
traces = {policy: list(served["conversations", policy][0].trace) for policy in POLICIES}
show(
    memory_over_time(traces, BUDGET, x_label="step"),
    "All conversations, to the end. Eight strips reserve the whole budget and leave most of it "
    "empty; blocks fill it with tokens and are done in a third of the steps.",
)

# %% [markdown]
# That is the course in one picture. And in numbers? At the opening all requests are new and hold only a prompt, so more of
# them fit than later. "At once" is therefore the mean over the second half of the time in which others wait.

# %%
running = {key: at_once(engine) for key, (engine, _) in served.items()}
rows = []
for (name, policy), (engine, requests) in served.items():
    ttft = sum(request.metrics.ttft for request in requests) / len(requests)
    rows.append((f"{name}, {policy}", running[name, policy], engine.stats.num_steps, ttft))
table(["", "at once", "steps for all", "steps to the first token, mean"], rows)

naive = "slots over the mean length; but long requests run longer, and hold a part of it only"
wrong = {name: {round(SLOTS / x.sum(axis=1).mean()): naive} for name, x in TRAFFIC.items()}
found = {name: round(running[name, "blocks"]) for name in TRAFFIC}
compare(my_conversations, found["conversations"], "conversations at once", wrong["conversations"])
compare(my_instructions, found["instructions"], "instructions at once", wrong["instructions"])
assert found["conversations"] > 3 * STRIPS and found["instructions"] > 200

# %% [markdown]
# From eight to a few dozen when the requests are long, to hundreds when they are short. And the wait for the first token
# becomes shorter, since more are served at the same time.
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

# %% [markdown]
# Right for conversations. For instructions it is too low: the formula is for traffic that goes on and on, and here nothing
# waits any more before the longest have grown. With 8000 instructions the two agree, and the paper's numbers follow in
# the same way: see the study [Longer queues](extra/12_longer_queues.ipynb).
#
# The longest length is not in the formula: the distance between strips and blocks grows with it:

# %%
levels = {name: (int(TRAFFIC[name].sum(axis=1).max()), predicted[name]) for name in TRAFFIC}
measured = {"strips": [(MAX_LEN, STRIPS)]}
measured["blocks"] = [(MAX_LEN, running[name, "blocks"]) for name in TRAFFIC]
show(
    requests_at_once(SLOTS, [512, 1024, 2048, 4096, 8192], levels, measured),
    "Requests at once against the longest length that the server accepts: the line of strips falls "
    "by half with each doubling; the two lines of blocks, for conversations and instructions, are "
    "level and far above it.",
)

# %% [markdown]
# The longest length is a promise. In strips every request pays for the promise, from blocks only for what really comes.
#
# ## Why
#
# ### Where every millisecond goes
#
# More requests at once make a step longer. By how much, and what takes the time? Now SmolLM2 itself, with a crowd of 256
# instructions.

# %%
STEPS, crowd = 20, TRAFFIC["instructions"][:256]
llms, first_step = {}, {}
for policy, size in POLICIES.items():
    llm = llms[policy] = real_llm(loaded, num_slots=SLOTS, block_size=size, max_len=MAX_LEN)
    add_all(llm.engine, crowd)
    _, first_step[policy] = timed_step(llm.engine, clocks=True, fused=False)
    for _ in range(STEPS - 1):
        llm.engine.step()
    silent, _ = replay_here(crowd, block_size=size, most_steps=STEPS)
    assert [r.running for r in llm.trace] == [r.running for r in silent.trace]
    most = max(record.running for record in llm.trace)
    print(f"{policy}: at most {most} at once, in every step as many as with the silent model")

# %% [markdown]
# Clocks go around the parts of a step. On most CPUs with a C++ compiler, all layers are one call, with no place for a clock
# in it. So the watched steps call layer by layer, which gives the same numbers, more slowly; `take_turns` times steps as you
# run them in between.

# %%
show_source(put_clocks)

# %% tags=["nbval-ignore-output"]
whole, steps = {}, {}
for name, policy in (("eight requests", "strips"), ("the crowd", "blocks")):
    whole[name], steps[name] = take_turns(llms[policy])
many = steps["the crowd"]
prompts = {part: first_step["blocks"].get(part, 0.0) for part in PARTS}
show(
    step_parts({**steps, "all prompts of the crowd": prompts}),
    "Three bars: what a decode step of eight, one of the crowd, and the step that computes the "
    "prompts of the crowd spend their time on; the weights are the longest part of each.",
)
all_of_it = "most of it, but each request's own attention, and the head, take their share"
answer = round(100 * many["weights"] / sum(many.values()))
compare(my_weights_percent, answer, "percent for the weights of the layers", {100: all_of_it})

# %% tags=["nbval-ignore-output"]
few_ms, many_ms = (1e3 * seconds["as you run it"] for seconds in whole.values())
decoding = llms["blocks"].trace[-1].decode_tokens
python_ms = 1e3 * (many["scheduler"] + many["bookkeeping"])
say(f"""
    As you run it, a step of eight requests takes {few_ms:.0f} ms, one of {decoding} takes
    {many_ms:.0f} ms: {decoding / STRIPS:.0f} times the work in {many_ms / few_ms:.1f} times the
    time. Scheduler and bookkeeping are {1e3 * python_ms / decoding:.0f} µs for each request,
    {100 * python_ms / many_ms:.1f} % of the step.
""")

# %% [markdown]
# How to read it:
#
# - **weights** are read once in a step, for eight requests or for hundreds. With few, reading takes the time; with many,
#   multiplying. That is why a crowd costs less than its number, and why [throughput](../docs/glossary.md#throughput)
#   grows with it, up to what the processor can multiply.
# - **attention** reads each request's own keys. They are not shared, so it grows with the number and with the lengths.
# - **the head** is one matrix, but the largest: it has a row for each word of the vocabulary.
# - **scheduler and bookkeeping** are Python, once for each request and step: a small part here. A GPU makes the model
#   faster and leaves Python as it is, so there they weigh more.
#
# Two studies lead on: [What your laptop ran](extra/12_what_your_laptop_ran.ipynb) shows the C++ that computed the layers, [Real
# lengths](extra/12_real_lengths.ipynb) measures seconds and waiting on real conversations.
#
# ## The code as it stands
#
# A step plans, computes, commits; nothing counts before the commit.

# %%
show_source(Engine._advance, Engine._compute, Engine._commit)

# %% [markdown]
# Two things to notice. A request becomes longer in one place only, `_commit`. And when anything raises, `_recover` sends
# all requests back to the queue: their tokens are known, so nothing is lost but time. If that is interrupted too,
# `_in_doubt` is still set, and the next step begins with it.
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
# The first two, at each of the thousands of steps above:

# %%
engines = [llm.engine for llm in llms.values()] + [engine for engine, _ in served.values()]
for engine in engines:
    assert all(0 < r.used_bytes <= r.reserved_bytes <= BUDGET for r in engine.trace)
    for name in list(engine.requests):  # of an engine that was stopped in the middle
        engine.abort_request(name)
    engine.check_invariants()
fullest = max(record.reserved_bytes for record in served["instructions", "blocks"][0].trace)
print(f"at its fullest, blocks held {100 * fullest / BUDGET:.1f} % of the budget")
print("blocks that did not come home:", sum(e.pool.num_blocks - e.pool.num_free for e in engines))
assert all(engine.pool.num_free == engine.pool.num_blocks for engine in engines)

# %% [markdown]
# The third, that both policies give the same tokens, is checked in the study on real lengths.
#
# ## Find the bug
#
# A web page in front of the engine shows each reader the answer as it grows:


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

# %% [markdown]
# It passes its test. In the evening the page is slow. The log says that there is one reader at a time, and that each
# reads three words and goes away, annoyed. Free blocks, after each of them:

# %%
for reader in range(8):
    words = answer_as_it_grows(engine, f"reader {reader}", [0] * 60, 900)
    for _ in range(3):
        next(words)
    words.close()
    print(f"reader {reader} has left, {engine.pool.num_free:2} blocks free")

# %% [markdown]
# **Where are the blocks? Decide before you go on.**

# %%
print("readers: 0   the engine's requests:", len(engine.requests))
before = engine.stats.num_generation_tokens
for _ in range(100):
    engine.step()
written = engine.stats.num_generation_tokens - before
print(f"words written in 100 steps for nobody: {written}, blocks free: {engine.pool.num_free}")
assert written > 500

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
llm = llms["blocks"]
stream = llm.stream({"prompt_token_ids": [0] * 60}, exactly(900))
next(stream)
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
# And the real model ran as many as the silent one in every step.
# </details>

# %% [markdown]
# ## Summary
#
# - One budget: eight strips of 4096. From blocks a few dozen real conversations at once, or hundreds of instructions.
# - In strips the longest length allowed decides; from blocks, what a request holds on average while it runs.
# - A crowd shares the reading of the weights. That is where throughput comes from, until arithmetic is the limit.
# - Plan, compute, commit. The budget is never exceeded, and every block comes home.
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
# - P. Patel et al., *Splitwise*, 2024, [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure trace (Azure
#   Public Dataset, AzureLLMInferenceTrace_conv, Microsoft, CC-BY 4.0).
