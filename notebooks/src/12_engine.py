# %% [markdown]
# # 12 · The engine, whole
#
# Blocks, tables, kernels, a scheduler: the lessons before took the engine apart. This one puts it to work. One
# budget, two policies, hundreds of requests; then a clock on every part of a step.
#
# **You will be able to** say, from a budget and a few lengths, how many requests a server can run at once; measure it
# on the whole engine; and name what a step spends its time on, before you make anything faster.
#
# About 50 minutes. Runs in about a minute on two CPU cores; a GPU is used when there is one.

# %%
import time
from dataclasses import replace
from pathlib import Path

import ipywidgets
import numpy as np
import torch

import minipaged
from minipaged import LLM, KVSpec, SamplingParams, load_model
from minipaged.attention import get_backend
from coursekit.commands.bench_memory import PAPER_RUNNING
from minipaged.config import CacheConfig, EngineConfig
from coursekit.comparison import equal_outputs, serve
from coursekit.figures import memory_over_time, show
from coursekit.figures.engine import requests_at_once, step_parts
from coursekit.gpu_results import goals_text
from coursekit.lesson import compare, number, pick_device, say, show_source, table
from coursekit.stopwatch import Stopwatch
from coursekit.widgets import Explorable
from coursekit.workloads import azure_lengths, load_mix, lognormal_lengths
from minipaged.cpu.accelerate import accelerate
from minipaged.cpu.backend import CpuBackend
from minipaged.engine import engine as engine_module
from minipaged.engine.engine import Engine

# %% [markdown]
# ## The question
#
# A server accepts conversations of up to 4096 tokens. Its [budget](../docs/glossary.md#budget) for keys and values
# holds exactly eight of them, each in one contiguous strip. The model is SmolLM2, in 16-bit numbers.

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
# Two kinds of traffic, all of it waiting at the door when the server opens:
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
        (name, len(lengths), *lengths.mean(axis=0).round(1), lengths.sum(axis=1).max())
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
# In strips it is eight, whatever comes. From blocks? And: when many requests decode together, what share of a step is
# spent multiplying by the weights of the layers?

# %%
my_conversations = None  # your guess: conversations at once, from blocks
my_instructions = None  # your guess: instructions at once, from blocks
my_weights_percent = None  # your guess: percent of a decode step

# %% [markdown]
# ## Measure
#
# Serving all of it to the end with SmolLM2, twice, takes a laptop too long for a lesson. So we measure two ways:
#
# 1. **the whole traffic, without arithmetic**: the real engine with a model that always says token 0. Who runs, who
#    waits and which block is whose depends on lengths only, so this is exact, and its clock counts steps;
# 2. **the real model, for a while**: its clock counts seconds. Step by step, it must run as many as the first one.
#
# ### The whole traffic
#
# What the engine needs of a model is two methods, and a word on whether there is a third.


# %%
class SilentModel:
    """Says token 0. Its keys and values have the size of SmolLM2's, and are never written."""

    config = config
    fuses_argmax = False  # no greedy token without logits

    def __call__(self, token_ids, batch, storage, backend):
        return torch.zeros(len(token_ids), 1)

    def compute_logits(self, hidden):
        return torch.zeros(len(hidden), 2)


def silent_engine(num_blocks, block_size, max_len=MAX_LEN, chunk=SLOTS, **clock):
    cache = CacheConfig(
        num_blocks=num_blocks, block_size=block_size, dtype=half, enable_prefix_caching=False
    )
    # Neither limit binds: no more sequences than this ever come, no step computes more than the
    # pool can store (unless told so). What is left to decide who runs is memory.
    limits = EngineConfig(
        max_model_len=max_len, max_num_seqs=SLOTS // 16, max_num_batched_tokens=chunk
    )
    return Engine(SilentModel(), cache, limits, **clock)


# %%
def exactly(answer):
    """Greedy, to exactly this many tokens."""
    return SamplingParams(temperature=0, max_tokens=int(answer), ignore_eos=True)


def queue(engine, lengths, seed=0):
    """Put random prompts of these lengths at the door; returns the engine's requests."""
    rng = np.random.default_rng(seed)
    for index, (prompt, answer) in enumerate(lengths.tolist()):
        tokens = rng.integers(0, config.vocab_size, prompt).tolist()
        engine.add_request(str(index), tokens, exactly(answer))
    return list(engine.requests.values())


def replay(lengths, block_size, max_len=MAX_LEN, most_steps=10**9, chunk=SLOTS):
    """Serve the traffic with the silent model. The clock shows the number of the step."""
    step = 0
    blocks = SLOTS // block_size
    engine = silent_engine(blocks, block_size, max_len, chunk, clock=lambda: step)
    requests = queue(engine, lengths)
    while engine.has_unfinished_requests() and step < most_steps:
        step += 1
        engine.step()
    return engine, requests


# %% [markdown]
# "At once" needs a definition. At the opening everybody is new and has only a prompt, so more fit than later. We
# count while others wait, and only the second half of that time.


# %%
def at_once(engine):
    """Requests at once, on average: the second half of the steps in which others waited."""
    running = [record.running for record in engine.trace if record.waiting]
    return float(np.mean(running[len(running) // 2 :]))


POLICIES = {"strips": MAX_LEN, "blocks": 16}
served = {
    (name, policy): replay(lengths, block_size)
    for name, lengths in TRAFFIC.items()
    for policy, block_size in POLICIES.items()
}
running = {key: at_once(engine) for key, (engine, _) in served.items()}

# %%
rows = []
for (name, policy), (engine, requests) in served.items():
    ttft = np.mean([request.metrics.ttft for request in requests])
    steps, preempted = engine.stats.num_steps, engine.stats.num_preemptions
    rows.append((f"{name}, {policy}", running[name, policy], steps, float(ttft), preempted))
table(["", "at once", "steps for all", "steps to first token, mean", "preemptions"], rows)
compare(my_conversations, round(running["conversations", "blocks"]), "conversations at once")
compare(my_instructions, round(running["instructions", "blocks"]), "instructions at once")
for name in TRAFFIC:
    (strips, early), (blocks, late) = served[name, "strips"], served[name, "blocks"]
    assert running[name, "strips"] == STRIPS == max(record.running for record in strips.trace)
    assert strips.stats.num_steps > 3 * blocks.stats.num_steps
    assert blocks.stats.num_finished == strips.stats.num_finished == len(TRAFFIC[name])
assert running["conversations", "blocks"] > 3 * STRIPS
assert running["instructions", "blocks"] > 200

# %% [markdown]
# From eight to a few dozen when the requests are long, from eight to hundreds when they are short. Same budget, same
# engine.
#
# ### The real model, for a while
#
# Now SmolLM2. A crowd first: 256 of the instructions. From blocks, for twenty steps; then in strips, for the same
# number of *seconds*. Nothing is inside that you would not run yourself; clocks come later.


# %%
def make_llm(block_size, chunk=SLOTS):
    llm = LLM(
        loaded,
        device=device,
        block_size=block_size,
        kv_memory=BUDGET,
        max_model_len=MAX_LEN,
        max_num_seqs=SLOTS // 16,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
    )
    warm_up = {"prompt_token_ids": [0]}
    llm.generate(warm_up, exactly(2), use_tqdm=False)
    llm.engine.reset_stats()
    return llm


def run_for_a_while(block_size, lengths, more):
    """Step while more(steps, seconds); returns the LLM, its requests and the seconds."""
    llm = make_llm(block_size)
    requests = queue(llm.engine, lengths)
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
    silent, _ = replay(crowd, POLICIES[policy])
    measured = [record.running for record in llm.trace]
    assert measured == [record.running for record in silent.trace][: len(measured)]
    rows.append((policy, max(measured), measured[STEPS - 1]))
table(["", "at once, at most", f"at once in step {STEPS}"], rows)
assert max(record.running for record in by_strips[0].trace) == STRIPS
assert max(record.running for record in by_blocks[0].trace) == 256

# %% [markdown]
# In every step the real model ran exactly as many as the silent one: what the first measurement said about thousands of
# requests holds for this one. (All 256 fit at once, so here the crowd was the limit, not the memory.) Now the seconds:

# %% tags=["nbval-ignore-output"]
rows = []
for policy, (llm, requests, seconds) in real.items():
    ttft = [request.metrics.ttft for request in requests if request.metrics.ttft is not None]
    speed = llm.stats.num_generation_tokens / seconds
    first = float(np.mean(ttft))
    rows.append((policy, seconds, speed, len(ttft), first, max(ttft), len(crowd) - len(ttft)))
table(
    [
        "",
        "seconds",
        "tokens per second",
        "got a first token",
        "TTFT of these, mean (s)",
        "worst (s)",
        "still wait",
    ],
    rows,
)
times = rows[1][2] / rows[0][2]
say(f"From blocks: {times:.1f} times the tokens per second, the computing of prompts included.")

# %% [markdown]
# [Throughput](../docs/glossary.md#throughput) has grown by much less than the number of requests, if at all: a
# processor can only multiply so fast, and the 256 prompts were a good part of the work. Where the limit lies we see
# below. Be careful with the column of the [TTFT](../docs/glossary.md#ttft): in strips it is the mean of the few who
# had got in when we stopped. Everybody who still waits has a longer one, and it is not in the table.
#
# Nothing is free: the eight who got a strip had their first token sooner than anybody of the 256, whose prompts were
# all computed in one step. A server that minds sets `max_num_batched_tokens` lower (lessons 08 and 11). We do so now.
#
# ### Real lengths, with the real model
#
# The trace itself, from its first conversation on, in the order in which they came; only those longer than 4096 are
# skipped. SmolLM2 gets random tokens in exactly these lengths, at most 2048 in a step. Filling the budget takes many
# prompts, so this is the longest part of the lesson. Both policies go the same number of steps; then we stop. All
# came before the first step, so a TTFT is the sum of the steps up to the first token, however long you wait between
# the cells.

# %%
CHUNK, CHAT_STEPS = 2048, 19
arrivals = np.flatnonzero(~too_long)[:150]  # far more than get in
chats = trace[arrivals]
say(f"{len(chats)} conversations wait; {arrivals[-1] + 1 - len(chats)} were skipped as too long.")
chat_llms = {policy: make_llm(size, CHUNK) for policy, size in POLICIES.items()}
asked = {policy: queue(llm.engine, chats) for policy, llm in chat_llms.items()}
for _ in range(CHAT_STEPS):
    chat_llms["strips"].engine.step()
for _ in range(CHAT_STEPS // 4):
    chat_llms["blocks"].engine.step()

# %%
while len(chat_llms["blocks"].trace) < CHAT_STEPS:
    chat_llms["blocks"].engine.step()
rows, peak, held = [], {}, {}
for policy, llm in chat_llms.items():
    silent, _ = replay(chats, POLICIES[policy], most_steps=CHAT_STEPS, chunk=CHUNK)
    for what in ("running", "used_bytes"):
        assert [getattr(r, what) for r in llm.trace] == [getattr(r, what) for r in silent.trace]
    peak[policy] = max(record.running for record in llm.trace)
    held[policy] = 100 * llm.trace[-1].used_bytes / BUDGET
    computed = llm.stats.num_prefill_tokens
    inside = [i for i, r in enumerate(asked[policy]) if r.metrics.ttft is not None]
    rows.append((policy, peak[policy], computed, len(inside), held[policy]))
names = ["at once, at most", "prompt tokens computed", "got a first token"]
table(["", *names, "% of the budget holds tokens, last step"], rows)
_, patient = replay(chats, MAX_LEN, chunk=CHUNK)
last = max(patient[i].metrics.ttft for i in inside)
say(f"""
    From blocks {len(inside)} had their first token within {CHAT_STEPS} steps. In strips the last
    of these {len(inside)} has it after {number(last)} steps, says the silent model.
""")
assert peak == {"strips": STRIPS, "blocks": 63} and held["strips"] < 15 < 95 < held["blocks"]
assert computed > 30_000 and last > 20 * CHAT_STEPS

# %% tags=["nbval-ignore-output"]
rows = []
for policy, llm in chat_llms.items():
    firsts = [r.metrics.first_token_time for r in asked[policy] if r.metrics.ttft is not None]
    ttft = [sum(step.duration for step in llm.trace if step.time < first) for first in firsts]
    seconds = sum(step.duration for step in llm.trace)
    only = [step for step in llm.trace if not step.prefill_tokens]
    a_step = float(np.median([step.duration for step in only]))
    decoding = float(np.median([step.decode_tokens / step.duration for step in only]))
    reading = seconds - sum(step.duration for step in only)
    speed = (llm.stats.num_prefill_tokens + llm.stats.num_generation_tokens) / seconds
    rows.append((policy, seconds, speed, decoding, 1e3 * a_step, float(np.mean(ttft)), max(ttft)))
speeds = ["tokens/s, prompts and answers", "tokens/s, steps that only decode"]
names = ["seconds", *speeds, "ms of such a step", "TTFT of who got in, mean (s)", "worst (s)"]
table(["", *names], rows)
strips_s = last * rows[0][4] / 1e3 + reading * chats[inside, 0].sum() / computed
say(f"""
    Of the {seconds:.0f} s with blocks, {reading:.0f} s went to steps that compute prompts. The
    others write {rows[1][3] / rows[0][3]:.1f} times the tokens per second of strips. The last of
    the {len(inside)} had its first token after **{max(ttft):.0f} s**. In strips it would be
    about **{strips_s:.0f} s**, estimated: {number(last)} steps and the same prompts.
""")

# %% [markdown]
# On a CPU that is less than so many more requests might promise, for two reasons. A prompt gains nothing from
# company: thousands of its tokens are multiplied together anyway, each has to be computed once under either policy,
# and on a CPU that is where the seconds go. And in a step that only decodes, a crowd shares the weights, but each of
# these long conversations reads its own keys. What blocks take away for certain is the waiting at the door.
#
# ## The picture
#
# The budget over time: first the real model with real lengths, by the step; then all conversations with the silent
# model, until the last has ended.

# %%
by_step = {p: [replace(r, time=r.index) for r in llm.trace] for p, llm in chat_llms.items()}
show(
    memory_over_time(by_step, BUDGET, x_label="step"),
    "KV memory of SmolLM2 serving real lengths: eight strips reserve the whole budget at once and "
    "leave most of it empty; blocks fill it with tokens, chunk by chunk, until it is full.",
)
share = {
    policy: sum(r.used_bytes for r in llm.trace) / sum(r.reserved_bytes for r in llm.trace)
    for policy, llm in chat_llms.items()
}
say(f"""
    Of what was reserved in these {CHAT_STEPS} steps, {100 * share["strips"]:.0f} % held tokens in
    strips, {100 * share["blocks"]:.1f} % in blocks.
""")
assert share["strips"] < 0.15 < 0.95 < share["blocks"]
show(
    memory_over_time(
        {policy: list(served["conversations", policy][0].trace) for policy in POLICIES},
        BUDGET,
        x_label="step",
    ),
    "All conversations, to the end: blocks fill the budget with tokens and are done "
    "in a third of the steps.",
)

# %% [markdown]
# ## Why
#
# **In strips:** slots divided by the longest length allowed. **From blocks:** slots divided by what a request
# *holds*, on average over the time it runs. With a prompt of $p$ and an answer of $a$ tokens it begins with $p$, ends
# with $p + a$ and takes $a$ steps. So it holds $p + a/2$ on average, and counts $a$ times. The last block is half
# empty (lesson 04):
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
# Right for conversations, too low for instructions. Why? The formula is for traffic that goes on and on. Here the
# door is soon empty:

# %%
waited = sum(record.waiting > 0 for record in served["instructions", "blocks"][0].trace)
longest = instructions[:, 1].max()
say(f"""
    Others waited for {waited} steps only; the longest answer takes {longest}. So the long ones,
    which hold most, had not grown long when we counted.
""")
assert waited < longest

# %% [markdown]
# If that is the cause, a longer queue has to bring the two together:

# %%
rows, off = [], {2000: abs(running["instructions", "blocks"] / predicted["instructions"] - 1)}
for count in (6000, 8000):
    more = lognormal_lengths("alpaca", count, seed=0)
    engine, _ = replay(more, 16)
    waited = sum(record.waiting > 0 for record in engine.trace)
    steady, by_formula = at_once(engine), SLOTS / holds(more)
    off[count] = abs(steady / by_formula - 1)
    rows.append((f"{count} instructions", more[:, 1].max(), waited, by_formula, steady))
table(["", "longest answer", "steps in which others waited", "predicted", "measured"], rows)
assert off[2000] > off[6000] > off[8000] and off[6000] < 0.12 and off[8000] < 0.05
answers = np.sort(more[:6000, 1])
assert answers[-1] > 1.9 * answers[-2] and answers[-1] > 2 * rows[0][2]

# %% [markdown]
# It does, slowly. Among the first 6000 is one answer almost twice as long as any other; it counts in the formula, and
# the queue was empty long before it ended. Averages of lengths that differ so much need long traffic.
#
# The formula knows three things about the traffic and one about the block. The longest length is not among them:

# %%
for max_len in (1024, 2048):
    strips, _ = replay(instructions, max_len, max_len, most_steps=5)
    assert max(record.running for record in strips.trace) == SLOTS // max_len
blocks, _ = replay(instructions, 16, 1024, most_steps=150)
as_before = list(served["instructions", "blocks"][0].trace)[:150]
assert [r.running for r in blocks.trace] == [r.running for r in as_before]

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
        points["longer queue"] = [(MAX_LEN, steady)]
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
# requests: a server that accepts less refuses some. Of the two dots at the top, the upper is the queue of 2000, the
# lower that of 8000.) All lines rise and fall together; the distance between them stays. It grows with the longest
# length, which is a promise, and shrinks with the lengths that really come.
#
# **Beside the paper.** It has 7 at once in strips, and from blocks:

# %%
paper = {name: PAPER_RUNNING[name]["paged 16"] for name in ("sharegpt", "alpaca")}
assert {PAPER_RUNNING[name]["maximum"] for name in paper} == {7.0}
rows = []
for name, theirs in paper.items():
    lengths = lognormal_lengths(name, 4000, seed=0)
    rows.append((name, theirs, 14_648 / holds(lengths)))
table(["at once from blocks", "the paper", "our arithmetic for its memory (lesson 03)"], rows)
apart = [abs(ours / theirs - 1) for _, theirs, ours in rows]
say(f"They differ by {100 * apart[0]:.0f} % and by {100 * apart[1]:.0f} %.")
assert max(apart) < 0.15

# %% [markdown]
# Close, although neither knows of the other. Not equal, and we know two causes: the paper drew its lengths from the
# real data, of which we have only the means (the spread is ours); and its requests arrived one by one, at a given
# rate, while ours all wait at the door.
#
# ### Where every millisecond goes
#
# More at once makes a step longer. By how much, and what takes the time? Now clocks go around the parts, for a few more
# steps of the same two engines, with eight requests and with the crowd.
#
# **One thing has to be switched off for that.** On most CPUs with a C++ compiler, all layers of the model are
# one call, and in it there is no place for a clock. The backend says so (`fuses_layers`), and can be told not to: then
# each layer is called by itself. That is another way to the same numbers, and a slower one. So every watched step has
# a neighbour that runs as yours do, without clocks, and a third that only calls layer by layer.


# %%
def put_clocks(watch, engine):
    """Which call counts to which part."""
    model, runner = engine.runner.model, engine.runner
    watch.around(engine, "step", "bookkeeping")
    watch.around(engine.scheduler, "schedule", "scheduler")
    watch.around(runner, "forward", "norms, rotary …")
    watch.around(runner.builder, "build", "bookkeeping")
    for name in ("write_kv", "paged_attention"):
        watch.around(runner.backend, name, "attention")
    for name in ("compute_logits", "argmax_tokens"):  # the second needs no logits, for greedy rows
        watch.around(model, name, "head")
    watch.around(engine_module, "sample", "sampler")
    watch.around(runner, "greedy_tokens", "sampler")
    for name, module in model.named_modules():
        if name.endswith(("qkv_proj", "o_proj", "gate_up_proj", "down_proj")):
            watch.around(module, "forward", "weights")


# %%
def step(engine, *, clocks, fused):
    """One step; returns its seconds, and those of each part if there are clocks."""
    backend = engine.runner.backend
    if not fused and isinstance(backend, CpuBackend):
        engine.runner.backend = CpuBackend(fuses_layers=False)
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    with Stopwatch(wait=wait) as watch:
        if clocks:
            put_clocks(watch, engine)
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
    engine.runner.backend = backend
    return seconds, watch.take()


# %%
PARTS = ["weights", "attention", "norms, rotary …", "head", "sampler", "scheduler", "bookkeeping"]
WAYS = {
    "as you run it": {"clocks": False, "fused": True},
    "layer by layer": {"clocks": False, "fused": False},
    "with clocks": {"clocks": True, "fused": False},
}


def take_turns(llm, rounds=8):
    """Decode steps in each way, in turns: medians of the seconds, and of the parts."""
    seconds, laps = {way: [] for way in WAYS}, []
    while len(laps) < rounds:
        for way, how in WAYS.items():
            taken, lap = step(llm.engine, **how)
            if not llm.trace[-1].prefill_tokens:
                seconds[way].append(taken)
                laps += [lap] if lap else []
    parts = {part: float(np.median([lap[part] for lap in laps])) for part in PARTS}
    return {way: float(np.median(taken)) for way, taken in seconds.items()}, parts


# %% tags=["nbval-ignore-output"]
whole, steps = {}, {}
for name, (llm, *_) in {"eight requests": by_strips, "the crowd": by_blocks}.items():
    whole[name], steps[name] = take_turns(llm)
table(
    ["ms of a decode step", *steps],
    [(part, *(1e3 * parts[part] for parts in steps.values())) for part in PARTS],
)
table(
    ["ms of the whole step", *whole],
    [(way, *(1e3 * seconds[way] for seconds in whole.values())) for way in WAYS],
)
few, many = steps.values()
compare(my_weights_percent, round(100 * many["weights"] / sum(many.values())), "percent")

# %% tags=["nbval-ignore-output"]
fresh = make_llm(16)
queue(fresh.engine, crowd)
_, prompts = step(fresh.engine, clocks=True, fused=False)  # the first step: prefill
show(
    step_parts({**steps, "all prompts of the crowd": {p: prompts.get(p, 0.0) for p in PARTS}}),
    "Three bars: what a decode step of eight, one of the crowd, and the step that computes the "
    "prompts of the crowd spend their time on.",
)
del fresh
decoding = by_blocks[0].trace[-1].decode_tokens
few_s, many_s = (seconds["as you run it"] for seconds in whole.values())
added = [100 * (s["with clocks"] / s["as you run it"] - 1) for s in whole.values()]
say(f"""
    The crowd's step does {decoding / STRIPS:.0f} times the work of the small one in
    {many_s / few_s:.1f} times the time. Scheduler and bookkeeping take
    {1e6 * (many["scheduler"] + many["bookkeeping"]) / decoding:.0f} µs for each request,
    {100 * (many["scheduler"] + many["bookkeeping"]) / many_s:.1f} % of the step. To be watched
    costs {added[0]:.0f} % with eight requests, {added[1]:.0f} % with the crowd: these are in the
    parts above, not in the tokens per second.

    GPU figures of this engine, as far as they are recorded:
""")
print(goals_text())

# %% [markdown]
# How to read it:
#
# - **weights** are read once in a step, for eight rows or for hundreds. With few rows, reading is what takes the
#   time; with many it is the multiplying. That is why a crowd costs less than its number.
# - **attention** reads each request's own keys. Nobody shares them, so it grows with the number and with the lengths;
#   these requests are short.
# - **the head** is one matrix, but the largest: it has a row for each word of the vocabulary.
# - **scheduler and bookkeeping** are Python, once for each request and step. They are what
#   most of this course is about, and a small part here. A GPU makes the model faster and leaves Python as it is, so
#   there this part weighs more.
#
# ### What your laptop ran
#
# Lesson 05 ended on plain torch, lesson 01 on a model in plain torch. Both are in the engine, and on a CPU without a C++
# compiler both serve (weights laid out once more for the processor, no more). With a compiler something else ran above:
# the folder [minipaged/cpu](../minipaged/cpu), code for speed, in C++, and behind one door. `LLM` hands it the model
# and the attention backend, and takes what comes back:

# %%
show_source(accelerate)

# %% [markdown]
# | what lessons showed | in plain torch | in `minipaged/cpu` |
# |:--|:--|:--|
# | a key goes to its slot (04, 05) | `LayerKV.write` in `cache/storage.py` | `write_kv` in `csrc/layers.cpp` |
# | one query reads through the table (05, 07) | `attend_gathered` in `attention/torch_backend.py` | `csrc/decode.cpp` |
# | a prompt does (08) | `attend_prefill`, same file | `csrc/prefill.cpp`, if our products are the faster; else torch's |
# | the layers of the model (01) | `model/llama.py` | `CpuLlama` in `modules.py`, `csrc/linear.cpp` or oneDNN's products: what `calibrate.py` measured to be faster |
# | the greedy token | the sampler, from logits | in the head's product, if it is ours, without logits |
#
# The two choose the same tokens, here in float32, where rounding is small. `attention_backend="torch"` takes the
# folder away. (So does a machine without a compiler; `CXX=false` pretends to be one.)

# %% tags=["nbval-ignore-output"]
plain = load_model("smollm2-135m", dtype=torch.float32, device="cpu")
small = {"device": "cpu", "num_blocks": 8, "max_model_len": 64}


def ask(llm):
    """The answer, what made it, and its milliseconds a token."""
    llm.generate("Paris is", exactly(2), use_tqdm=False)
    (output,) = llm.generate("The sky is blue because", exactly(24), use_tqdm=False)
    model, backend = llm.engine.runner.model, llm.engine.runner.backend
    parts = (model, model.layers[0], model.lm_head, backend)
    kinds = " · ".join(type(part).__name__ for part in parts)
    return output.outputs[0].text, kinds, 1e3 * output.metrics.tpot


in_torch = ask(LLM(plain, attention_backend="torch", **small))
fast, _ = accelerate(plain, get_backend("auto", "cpu"))  # `plain` is used up now
compiled = ask(LLM(fast, **small))
assert in_torch[0] == compiled[0]
print(in_torch[0])
del plain, fast
table(["one request, float32", "ms a token"], [in_torch[1:], compiled[1:]])

# %% [markdown]
# And this is where a token's slot is written on your laptop, if it has a compiler. Blocks are gone by then: a slot is
# a row of one long array, as in lesson 04.

# %%
layers_cpp = (Path(minipaged.__file__).parent / "cpu/csrc/layers.cpp").read_text()
begin = layers_cpp.index("// cache[slots[row]]")
print(layers_cpp[begin : layers_cpp.index("\n}\n", begin) + 2])

# %% [markdown]
# ## The code as it stands
#
# A step plans, computes, commits; nothing counts before the commit. The scheduler is lesson 11's, the model lesson 01's,
# its attention that of lessons 05 to 08. Two helpers you have not met, and they decide nothing: one writes the trace
# that the pictures above are drawn from, one turns new tokens into text and outputs.

# %%
show_source(Engine._advance, Engine._compute, Engine._commit)

# %% [markdown]
# Two things to notice. When anything raises, `_recover` sends everybody back to the queue: their tokens are known,
# so nothing is lost but time. If that is cut short too, `_in_doubt` is still set, and the next step begins with it. And
# the only place where a request becomes longer is `_commit`.
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | the budget is never exceeded, in no step | the card runs out of memory, and everybody's request dies |
# | every block comes home | the server slows down over days, and a restart helps |
# | the policy changes when a token is computed, never which | answers depend on who else is there |
# | everybody is served, in full | somebody waits for ever |
#
# The budget, at each of the thousands of steps above, with the real model and with the silent one:

# %%
llms = [run[0] for run in real.values()] + list(chat_llms.values())
engines = [llm.engine for llm in llms] + [engine for engine, _ in served.values()]
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
# The same tokens. In 16 bits, rounding can tip a choice between two words, and it differs with the number of rows in
# a batch. So we compare in float32: the real model, six short requests, in a budget that holds two strips.

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
# Somebody puts a web page in front of the engine. Each reader gets the answer as it grows:


# %%
def answer_as_it_grows(engine, name, prompt, answer):
    engine.add_request(name, prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
    (request,) = engine.requests[name].samples
    while not request.output.finish_reason:
        engine.step()
        yield request.output.token_ids


engine = silent_engine(num_blocks=64, block_size=16)
assert len(list(answer_as_it_grows(engine, "test", [0] * 60, 100))[-1]) == 100
assert engine.pool.num_free == 64

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
# Closing a generator ends the *reading*. Nobody told the engine, so it goes on writing to `max_tokens`, for people
# who have left, and their blocks grow all the time. Nothing is lost for ever, so no test of leaks sees it; but the
# busier the page, the more ghosts. Several engines had this (ROCm's ATOM, pull requests 1562 and 1589; a relative in
# vLLM, pull request 49146).
#
# Whoever starts a request has to end it on every way out. In Python that is `finally`:
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
# <details><summary>1. The operator doubles the longest length, to 8192. What happens to the requests at once under each policy?</summary>
#
# In strips four instead of eight. From blocks nothing, as long as the same requests come.
# </details>
#
# <details><summary>2. All answers become twice as long, prompts stay. Does the number at once halve?</summary>
#
# No. A request holds its prompt and half of its answer on average, and only the second part doubles. For
# conversations with long prompts the number falls a little, for instructions by nearly half.
# </details>
#
# <details><summary>3. At the opening more requests run at once than an hour later. Why?</summary>
#
# They are all new: they hold a prompt and nothing else. Then they grow, all together, the pool runs dry, and the
# youngest are [preempted](../docs/glossary.md#preemption).
# </details>
#
# <details><summary>4. Twice as many requests at once. Is throughput doubled?</summary>
#
# Only while a step takes as long as before, that is, while reading the weights takes the time. Once the multiplying
# does, a step grows with its rows, and more at once means only that nobody waits at the door.
# </details>
#
# <details><summary>5. The silent model wrote no keys. Why could we believe what it said about memory?</summary>
#
# The scheduler decides by lengths and free blocks. Answers end at a given length here, so no token decides anything.
# The real model then ran as many as the silent one in every step, which an assertion checked.
# </details>

# %% [markdown]
# ## Summary
#
# - One budget: eight strips of 4096. From blocks a few dozen real conversations at once, or hundreds of instructions.
#   The complete traffic was run with the engine and a silent model; SmolLM2 itself served 256 instructions at once,
#   and filled the whole budget with conversations of real lengths, for a while.
# - In strips the longest length allowed decides; from blocks, what a request holds on average while it runs.
# - A crowd shares the reading of the weights. That is where throughput comes from, until arithmetic is the limit.
# - Plan, compute, commit. The budget is never exceeded, every block comes home, the tokens are the same.
# - Whoever starts a request ends it, on every way out.
#
# **Write it yourself:** [exercise 12](../exercises/12_capstone/12_capstone.ipynb), your pool, your table and your
# kernel in this engine.
#
# **Next:** [13 · Smaller K and V; and vLLM today](13_smaller_kv_and_vllm.ipynb) makes keys and values smaller, and
# compares all of this with vLLM today. To go back: [00 · Start here](00_start_here.ipynb), which has the map.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180), section 6.2 and figure 13: requests at once.
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: one plan
#   for each step.
# - P. Patel et al., *Splitwise*, 2024, [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure trace (Azure
#   Public Dataset, AzureLLMInferenceTrace_conv, Microsoft, CC-BY 4.0).
