# %% [markdown]
# # 11 · The scheduler
#
# Blocks let many requests share one memory. Which request gets them? Before every step the
# [scheduler](../docs/glossary.md#scheduler) decides which requests compute which tokens, which ones wait, and which one
# gives way when the blocks run out in the middle of an answer. It does no arithmetic at all; it counts.
#
# **You will be able to** say what continuous batching gains and why; read a step's decisions; say what a preempted
# request costs in each of two ways; and name what must hold so that no request waits for ever.
#
# About 50 minutes. Runs in under half a minute on two CPU cores.

# %%
import torch

from minipaged import LLM, KVSpec, SamplingParams
from coursekit.figures import show
from coursekit.figures.scheduling import gantt, pool_in_step, running_over_steps
from coursekit.lesson import compare, number, say, show_source, table
from coursekit.timeline import Timeline
from coursekit.widgets import Stepper
from coursekit.workloads import load_mix
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

# %% [markdown]
# ## The question
#
# A batch has a number of *seats*, one for each request that runs. Answers differ in length, and the length is not known
# in advance. The old way is a [static batch](../docs/glossary.md#static-batching): take eight requests, run them until
# the last has ended, take the next eight. **[Continuous batching](../docs/glossary.md#continuous-batching)** decides
# anew before each step: a request that has ended leaves, and one that waits takes its seat.
#
# **How much does that gain? And what happens when all the requests that came in grow, and there is no block left?**
#
# All counting below is in steps, tokens and blocks, so it is the same on every machine. The model is the engine's
# tiny random Llama in float32: what it says makes no sense, but it says the same thing every time, and every wrong
# key changes it.

# %%
MODEL = LoadedModel(random_llama(), None, TINY, "tiny")
token_bytes = KVSpec.from_model(TINY, torch.float32).bytes_per_token
print(f"the tiny model: {TINY.num_layers} layers, {token_bytes} bytes per token")


def tiny_llm(**settings):
    """The engine on the tiny model, with nothing switched on that we have not asked for."""
    plain = {"max_model_len": 512, "enable_prefix_caching": False, "watermark": 0.0}
    plain |= {"device": "cpu", "max_num_batched_tokens": 2048}
    return LLM(MODEL, **(plain | settings))


def add(llm, name, token_ids, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add_request(name, token_ids, params)


def drain(llm):
    """Step until all have ended; request -> tokens of its answer."""
    answers = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    return answers


# %%
mix = load_mix("chat48")
prompts = {r.id: [token % TINY.vocab_size for token in r.prompt_token_ids] for r in mix}
lengths = [r.max_tokens for r in mix]
say(f"""
    The traffic: {len(mix)} chats, {number(sum(map(len, prompts.values())))} tokens of prompts,
    {number(sum(lengths))} tokens of answers. The shortest answer has {min(lengths)} tokens, the
    longest {max(lengths)}.
""")
assert (len(mix), sum(lengths), min(lengths), max(lengths)) == (48, 4265, 11, 384)

# %% [markdown]
# ## Your prediction
#
# 1. Static batches of eight. What percentage of the seats is idle, on average over the steps, because the request in
#    that seat has ended?
# 2. Static batches take 1320 steps for these chats. How many does continuous batching take, with the same eight seats?
# 3. No limit on seats, but only 100 blocks of 16 tokens. Requests are preempted, and their tokens must be computed
#    again. For every hundred tokens that had to be computed anyway, how many are computed again?

# %%
my_idle_percent = None  # your guess
my_steps = None  # your guess
my_again_percent = None  # your guess

# %% [markdown]
# ## Measure
#
# ### Static against continuous
#
# Both on the same engine, with blocks to spare. Static: give it eight requests, wait until all have ended, give it
# the next eight. Continuous: give it all at once, and let it run at most eight.

# %%
SEATS = 8
static = tiny_llm(num_blocks=512, max_num_seqs=SEATS)
static_answers = {}
for first in range(0, len(mix), SEATS):
    for request in mix[first : first + SEATS]:
        add(static, request.id, prompts[request.id], request.max_tokens)
    static_answers |= drain(static)

continuous = tiny_llm(num_blocks=512, max_num_seqs=SEATS)
for request in mix:
    add(continuous, request.id, prompts[request.id], request.max_tokens)
answers = drain(continuous)
print("answers that differ:", sum(answers[name] != static_answers[name] for name in answers))
assert answers == static_answers  # what runs beside a request does not change what it says

# %%
running = {
    "static batches": [record.running for record in static.trace],
    "continuous batching": [record.running for record in continuous.trace],
}
table(
    ["eight seats", "steps", "idle seats, all steps", "% idle"],
    [
        (name, len(line), SEATS * len(line) - sum(line), 100 - 100 * sum(line) / SEATS / len(line))
        for name, line in running.items()
    ],
)
static_steps, steps = map(len, running.values())
wrong_idle = {
    50: "as if lengths were spread evenly; but one long answer among eight holds seven seats for "
    "most of its time"
}
wrong_steps = {
    533: "that is all seats full in every step; at the end the last long answers run alone",
    660: "half of them; but more than half of the seats were idle",
}
idle = round(100 - 100 * sum(lengths) / SEATS / static_steps)
compare(my_idle_percent, idle, "percent idle", wrong_idle)
compare(my_steps, steps, "steps", wrong_steps)

# %% [markdown]
# A request gets one token in each step in which it runs, so the work is the same in both. Only the idle seats differ.
# And a static batch lasts as long as its longest answer, which can be worked out without running anything:

# %%
by_hand = sum(max(lengths[first : first + SEATS]) for first in range(0, len(mix), SEATS))
least = max(-(-sum(lengths) // SEATS), max(lengths))  # all seats always full, or the longest answer
say(f"""
    Static, by hand: {number(by_hand)} steps. No schedule with eight seats can need fewer than
    {number(least)}. Continuous batching took {number(steps)}, and never looked at a length.
""")
assert by_hand == static_steps == 1320 and all(sum(line) == 4265 for line in running.values())
assert least <= steps < 1.15 * least and static_steps > 2 * steps
assert all(record.running == SEATS for record in continuous.trace if record.waiting)

show(
    running_over_steps(running, SEATS),
    f"Requests running in each step. Static: {static_steps} steps, each batch starts with eight "
    f"and thins out. Continuous: {steps} steps, all seats taken until nothing waits.",
)

# %% [markdown]
# At the end of the lower picture a few long answers run alone, since nothing waits any more. In a busy server there is
# always something that waits.
#
# ### In order of arrival
#
# Now small enough to see each decision: twelve blocks of four tokens, and three requests A, B, C with prompts of 24, 28
# and 3 tokens. A takes six blocks. C needs one, and six are free. B, before it, needs seven.

# %%
BLOCK_SIZE, NUM_BLOCKS = 4, 12


def serve_small(lengths, **settings):
    """Serve A, B, C … of (prompt tokens, answer tokens); what happened, and the answers."""
    small = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 32}
    llm = tiny_llm(**(small | {"max_num_seqs": 8} | settings))
    timeline = Timeline(llm.engine)
    for index, (prompt, answer) in enumerate(lengths):
        token_ids = [(7 * index + 3 * i + 5) % 300 for i in range(prompt)]
        add(llm, "ABCDEFGH"[index], token_ids, answer)
    return timeline, drain(llm)


queue, _ = serve_small([(24, 8), (28, 8), (3, 8)])
first = queue.steps[0]
print({name: moment.state for name, moment in first.requests.items()}, "  free:", first.free)
entered = {name: states.index("prefill") for name, states in queue.states().items()}
print("enters in step:", entered)
assert first.free == 6 and entered == {"A": 0, "B": 8, "C": 8}

# %% [markdown]
# C waits as well, though there is room for it. **First come, first served**: if small ones overtook, a large one might
# wait for ever. It has a price, which you have just seen: six blocks idle for eight steps.
#
# And why does B wait, though six of its seven blocks are there? **Only a request that can finish its prompt is let
# in.** Two requests with half a prompt each could hold all blocks between them, and neither could go on.
#
# ### A budget of tokens
#
# A request that decodes computes one token, a prompt computes many. To keep steps short, a step has a [token
# budget](../docs/glossary.md#token-budget): decodes come first, and what is left is for prompts, in pieces if need be
# ([chunked prefill](../docs/glossary.md#chunked-prefill), [lesson 08](08_prefill_and_chunks.ipynb)).
#
# ### When the blocks run out
#
# Nothing was reserved for answers. They all grow into the same free blocks, until a decode finds none. Then one request
# must give its blocks back: [preemption](../docs/glossary.md#preemption). Five requests, twelve blocks.

# %%
FIVE = [(6, 18), (9, 14), (20, 8), (5, 16), (11, 6)]
SMALL = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
unhurried, wanted = serve_small(FIVE, num_blocks=100)
recompute, by_recompute = serve_small(FIVE, **SMALL)
swap, by_swap = serve_small(FIVE, preemption="swap", swap_space="1MiB", **SMALL)

for index, step in enumerate(recompute.steps):
    if step.preempted:
        print(f"step {index}: {step.preempted} gives way; {step.free} blocks free after the step")
print("the same answers as with a hundred blocks:", by_recompute == by_swap == wanted)
assert by_recompute == by_swap == wanted and unhurried.preemptions == 0 < recompute.preemptions
assert [step.preempted for step in recompute.steps if step.preempted] == [("D",), ("C",)]

# %% [markdown]
# First D, the youngest that runs; a step later C. Their blocks have gone to A and B, which were there before them.
# There are two ways to continue later:
#
# - **[Recompute](../docs/glossary.md#recompute)**: drop the keys and values. The prompt *and what has been said so
#   far* become the new prompt, and are computed again.
# - **[Swap](../docs/glossary.md#swap)**: copy the blocks to the host's memory, and later copy them back.
#
# Either way the answers are those of a machine with plenty of memory, token by token.
#
# ### What each way costs
#
# Count, on the 48 chats, with 100 blocks of 16: tokens computed again, and bytes moved.


# %%
def serve_mix(**settings):
    llm = tiny_llm(num_blocks=100, **settings)
    timeline = Timeline(llm.engine)
    for request in mix:
        add(llm, request.id, prompts[request.id], request.max_tokens)
    return llm, timeline, drain(llm)


block_kib = KVSpec.from_model(TINY, torch.float32).bytes_per_block(16) / 1024
runs = {
    "recompute": serve_mix(),
    "swap": serve_mix(preemption="swap", swap_space="64MiB"),
}
table(
    ["", "steps", "preemptions", "tokens computed", "of these, again", "KiB moved"],
    [
        (name, len(t.steps), t.preemptions, t.computed, t.again, t.blocks_moved * block_kib)
        for name, (_, t, _) in runs.items()
    ],
)
assert all(said == answers for _, _, said in runs.values())

# %%
once = sum(map(len, prompts.values())) + sum(lengths) - len(mix)
_, recomputed, _ = runs["recompute"]
_, swapped, _ = runs["swap"]
wrong_again = {
    10: "few requests are preempted, but each computes again all that it held",
    0: "a victim's keys and values are gone: prompt and answer so far are computed again",
}
again = round(100 * recomputed.again / once)
compare(my_again_percent, again, "computed again for each 100", wrong_again)
assert swapped.computed == once == recomputed.computed - recomputed.again
assert swapped.again == 0 == recomputed.blocks_moved
say(f"A victim held {recomputed.again / recomputed.preemptions:.0f} tokens on average.")

# %% [markdown]
# (`once` is what has to be computed in any case: prompts and answers, without the last token of each answer, which is
# never an input.)

# %% [markdown]
# ### Which is cheaper?
#
# Tokens against bytes: two speeds of the machine decide, how fast it computes prompts and how fast it copies blocks to
# the host. An A100, the paper's card, does at most 312 · 10¹² operations a second, and its bus carries 32 · 10⁹ bytes a
# second. A token takes two operations for each parameter; OPT-13B has 800 KiB of keys and values a token.


# %%
def microseconds_per_token(parameters, kv_bytes, operations=312e12, bus=32e9):
    """(recompute, swap) for one token, at the full speed of an A100 and its bus."""
    return 1e6 * 2 * parameters / operations, 1e6 * 2 * kv_bytes / bus


llama = KVSpec(num_layers=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
costs = {
    "OPT-13B": microseconds_per_token(13e9, 800 * 1024),
    "Llama 3 8B": microseconds_per_token(8e9, llama.bytes_per_token),
}
table(
    ["on an A100, µs a token", "recompute", "swap", "ratio"],
    [(name, again, moved, again / moved) for name, (again, moved) in costs.items()],
)
assert 1 < costs["OPT-13B"][0] / costs["OPT-13B"][1] < 2
assert costs["Llama 3 8B"][0] / costs["Llama 3 8B"][1] > 6

# %% [markdown]
# For OPT-13B the two are within a factor of two; the paper measured them about equal for blocks of 16 to 64 tokens (its
# section 7.3). Llama 3, whose query heads share their keys ([GQA](../docs/glossary.md#gqa)), has little to move. By this
# arithmetic swap should have won since. Yet vLLM today only recomputes; "Why" comes back to that. (No machine reaches
# these full speeds. Both ways, timed on yours, are in the study [Recompute or swap](extra/11_recompute_or_swap.ipynb).)
#
# ## The picture
#
# Five requests in twelve blocks, each step a column. First recompute.

# %%
show(
    gantt(recompute.states()),
    "A chart of five requests over the steps: A and B run through; C and D are preempted, wait, "
    "compute their prompts again and finish; E enters last.",
)
assert [step.admitted for step in recompute.steps if step.admitted][-2:] == [("C",), ("D", "E")]

# %% [markdown]
# D computed its prompt in step 2 and gave way in step 3, before it could decode. C comes back as soon as there is room
# for all of it, and computes prompt and answer again (the second black bar). It was preempted after D, and yet returns
# first: it is older. D, in turn, comes back in the very step in which E enters, before it.
#
# The same with swap: no second black bars, since nothing is computed again (the one black step when a request returns is
# its newest token). A request that comes back goes on at once. So requests grow at other times, and others must leave:
# here there are four preemptions instead of two. That is chance, not a rule: on the 48 chats both ways had the same
# number.

# %%
show(
    gantt(swap.states()),
    "The same chart with swap: C, D and E leave with their blocks and come back with them: "
    f"{swap.preemptions} preemptions instead of {recompute.preemptions}.",
)
assert (recompute.preemptions, swap.preemptions) == (2, 4)
assert recomputed.preemptions == swapped.preemptions
assert swap.again == 0 < recompute.again

# %% [markdown]
# Walk through the first chart. Blue blocks were taken in this step. Watch the order of the queue, and when the pool
# fills. The steps of the two preemptions are 3 and 4.


# %%
def draw(step):
    view, before = recompute.steps[step], recompute.steps[step - 1] if step else None
    figure = pool_in_step(view, before, num_blocks=NUM_BLOCKS)
    gone = " and ".join(view.preempted)
    words = f"Step {step}: {view.free} of {NUM_BLOCKS} blocks free" + (
        f"; {gone} gave way." if gone else "."
    )
    return figure, words


shows = "The twelve blocks with the request that holds each, the running requests, and the queue."
Stepper(len(recompute.steps), draw, start=3, shows=shows)

# %% [markdown]
# ## Why
#
# **Why the youngest?** Running requests and queue together are always in order of arrival: all that run are older than
# all that wait. Preempting the youngest keeps it so, and the oldest can never be preempted, so it ends. Then the next is
# the oldest. *No request waits for ever*, whatever the others do. Preempt the oldest instead, and two long requests may
# take turns throwing each other out. The order, in all steps of the 48 chats:

# %%
RUNS = ("prefill", "decode")
arrival = {request.id: index for index, request in enumerate(mix)}
for timeline in (recomputed, swapped):
    for step in timeline.steps:
        inside = [arrival[n] for n, m in step.requests.items() if m.state in RUNS]
        outside = [arrival[n] for n, m in step.requests.items() if m.state not in RUNS]
        assert not outside or max(inside) < min(outside)
    assert not any(mix[0].id in step.preempted for step in timeline.steps)
print(
    "all that run are older than all that wait, in",
    len(recomputed.steps),
    "+",
    len(swapped.steps),
    "steps",
)

# %% [markdown]
# **Why not admit requests more carefully?** That is possible: a [watermark](../docs/glossary.md#watermark) keeps some
# blocks free when a request is admitted, for the running ones to grow into. What does it bring, and what does it cost?

# %%
marks = {share: serve_mix(watermark=share)[1] for share in (0.0, 0.01, 0.05, 0.1, 0.2, 0.4)}
table(
    ["blocks kept free", "preemptions", "computed again", "steps"],
    [(f"{100 * s:.0f} %", t.preemptions, t.again, len(t.steps)) for s, t in marks.items()],
)
assert marks[0.05].preemptions < marks[0.0].preemptions / 2 and marks[0.4].preemptions == 0
assert len(marks[0.05].steps) < len(marks[0.0].steps) and len(marks[0.4].steps) > 560

# %% [markdown]
# A small watermark is free: with 5 % there are less than half as many preemptions, and even a few steps fewer. A large
# one is expensive: with 40 % no request is ever preempted, and it takes far more steps, because memory stands empty *just
# in case*. You have met that before: it is a [reservation](../docs/glossary.md#reservation). Preemption is not a failure
# of the scheduler. It is what makes reservations unnecessary. (The engine's default is 1 %.)
#
# **Why does vLLM only recompute?** Its documents say: "In vLLM V1, the default preemption mode is `RECOMPUTE` rather than
# `SWAP`, as recomputation has lower overhead in the V1 architecture." One reason can be measured here. With [prefix
# caching](../docs/glossary.md#prefix-caching) ([lesson 10](10_sharing_prefixes.ipynb)) the content of a block that is
# given up stays known until the block is needed. A victim that returns finds part of its own keys still there:

# %%
_, cached, said = serve_mix(enable_prefix_caching=True)
say(f"""
    Computed again: {number(recomputed.again)} tokens without prefix caching,
    {number(cached.again)} with it.
""")
assert said == answers and cached.preemptions == recomputed.preemptions
assert 0.5 < cached.again / recomputed.again < 2 / 3

# %% [markdown]
# More than a third of the work is saved, without moving a byte, and without a line of code for swapping. And recomputing
# shares a step with the decodes of others, while a copy has to be waited for. So an engine without swap loses less than
# the arithmetic says, and is simpler.
#
# ## The code as it stands
#
# One step's plan, by one rule: the numbered lines are the whole of it. A decode is a request that misses one token, so
# no line tells decodes and chunks apart.

# %%
from minipaged.core.scheduler import Scheduler

show_source(Scheduler.schedule, Scheduler._compute, Scheduler._make_room, Scheduler._may_enter)
show_source(Scheduler.preempt_youngest)

# %% [markdown]
# In the exercise you write this algorithm yourself: running requests first, the youngest gives way, then those that
# wait, in order. In three points the engine does more.
#
# 1. **More than one token.** A request computes what it misses, as far as the step's *budget* reaches. In the exercise
#    each gets one token.
# 2. **Shared blocks.** A request that enters takes the blocks that it finds in the prefix cache (`hits`). And when a
#    prompt is computed, the other samples of the same call (`waiting_siblings`) fork its table and run from then on.
# 3. **A condition to enter.** The blocks of its whole prompt are free, and those of its siblings, beside a watermark.
#    In the exercise a request needs room for its tokens and one more.
#
# Three questions to read it with. Why does a preempted request go to the *left* of the queue? Why does the second loop
# stop at the first one that may not enter, rather than try the next? Why does an empty engine ignore the watermark?
#
# <details><summary>Answers</summary>
#
# It is older than all that wait, and stays in front of them. The next one would overtake. And in an empty engine
# there is no other request to grow into the blocks kept free, while a request that fits only without them would wait for ever.
# </details>
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | what runs is older than what waits | a request waits for ever |
# | a request that is let in can finish its prompt | half prompts hold all blocks, and none can go on |
# | a preempted request gives the answer it would have given | wrong answers, only under load |
# | what can never fit is refused when it is added | it waits for ever, and so do all after it |
# | a step with requests does something, or raises | a server that is up, and answers nothing |
#
# The first three you have checked. The fourth: twelve blocks hold 48 tokens.

# %%
llm = tiny_llm(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
try:
    add(llm, "too long", [5] * 50, 10)
except ValueError as error:
    print("ValueError:", error)
assert not llm.engine.has_unfinished_requests()

# %% [markdown]
# And one whose *prompt* fits while its answer does not? That cannot be known in advance. It runs until it is alone and
# the pool is full; then it ends, and says so. **How many tokens does it get, with a prompt of 40?**

# %%
add(llm, "long answer", [5] * 40, 30)
while llm.engine.has_unfinished_requests():
    outputs = llm.engine.step()
(completion,) = outputs[0].outputs
print(completion.finish_reason, len(completion.token_ids))
assert completion.finish_reason == "length" and len(completion.token_ids) == 48 - 40 + 1

# %% [markdown]
# Eight that are stored, and the last, which never needs to be. The fifth rule: break something on purpose. The engine
# keeps a tensor with one row for the block table of each running request. Here all its rows are taken, as if requests
# that ended had never given theirs back. The next request can never enter.

# %%
manager = llm.engine.manager
manager._free_rows.clear()
add(llm, "unlucky", [5] * 4, 10)
try:
    llm.engine.step()
except RuntimeError as error:
    print("RuntimeError:", error)
    message = str(error)
assert "scheduled nothing" in message

# %% [markdown]
# Without that line the loop around `step` would spin for ever, in a server that answers health checks and nothing
# else. A scheduler that raises tells what is wrong; one that waits is a mystery.
#
# ## Find the bug
#
# An engine with recompute passes its tests: greedy answers equal those of another library, alone and twenty at once.
# In production, at busy hours, some answers begin well and then lose the thread. Nothing is raised. The lengths are
# right. The same question a minute later is answered well.
#
# Here it is, with three requests and 18 blocks of four, beside the right engine.

# %%
from minipaged.core.kv_cache_manager import KVCacheManager

THREE, TIGHT = [(5, 24), (9, 20), (8, 20)], 18
right, right_answers = serve_small(THREE, num_blocks=TIGHT)
original = KVCacheManager.leave_by_recompute


def leave_carelessly(self, request):
    original(self, request)
    said = list(request.output.token_ids)
    request.tokens = request.parent.prompt_token_ids + said[-1:]


KVCacheManager.leave_by_recompute = leave_carelessly
broken, broken_answers = serve_small(THREE, num_blocks=TIGHT)
KVCacheManager.leave_by_recompute = original
print("preempted:", [step.preempted for step in broken.steps if step.preempted])


# %%
def first_difference(name):
    pairs = enumerate(zip(broken_answers[name], right_answers[name], strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)


wrong_from = {name: first_difference(name) for name in right_answers}
for name, index in wrong_from.items():
    print(name, "all right" if index is None else f"right for {index} tokens, then wrong")
print("tokens that the right engine computed:", right.computed)
assert wrong_from == {"A": None, "B": None, "C": 16}
assert {n: len(said) for n, said in broken_answers.items()} == {"A": 24, "B": 20, "C": 20}

# %% [markdown]
# **What is wrong with C? Decide first. If you are right, you can say how many tokens the broken engine computed.**
# C's prompt has 8 tokens.

# %%
my_computed = None  # your guess

# %%
wrong_computed = {
    right.computed: "as many as the right engine; but what C had said already is not computed again"
}
compare(my_computed, broken.computed, "tokens computed", wrong_computed)
(when,) = [index for index, step in enumerate(right.steps) if step.preempted]
spoken = right.steps[when - 1].requests["C"].stored - 8 + 1  # the newest is not stored yet
(back,) = [i for i, step in enumerate(right.steps) if "C" in step.admitted and i >= when]
(again,) = [i for i, step in enumerate(broken.steps) if "C" in step.admitted and i >= when]
print(f"preempted in step {when}, after {spoken} tokens of its answer")
print("computed when it came back, right :", right.steps[back].requests["C"].tokens)
print("computed when it came back, broken:", broken.steps[again].requests["C"].tokens)

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# C was preempted in the middle of its answer. When it came back, the broken engine computed the *prompt* and the last
# token; all the rest of its answer so far was missing. It goes on from a text that it never wrote. The caller's list of
# tokens is kept elsewhere, so nothing is lost there, and the length is right. A test without a shortage of blocks cannot
# see it.
# </details>
#
# The proof: what is missing is exactly what had been said, but for its last token.

# %%
assert spoken == wrong_from["C"]
assert right.steps[back].requests["C"].tokens == 8 + spoken
assert broken.steps[again].requests["C"].tokens == 8 + 1
assert right.computed - broken.computed == spoken - 1
print(f"missing: {right.computed - broken.computed} tokens, all that C had said but the last")
roomy, roomy_answers = serve_small(THREE, num_blocks=100)
assert roomy_answers == right_answers and roomy.preemptions == 0

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. All answers have the same length. What does continuous batching gain over static batches?</summary>
#
# If all are there at the start: nothing, all seats become free together. It still gains when requests arrive over time:
# a newcomer need not wait for the end of a batch.
# </details>
#
# <details><summary>2. A request with a very long prompt waits at the head of the queue, and the pool is half free. Who suffers, and what would you lose by letting others pass?</summary>
#
# All requests after it. Let them pass, and there may always be another short one: the long one waits for ever, unless
# something else (an age, a priority) limits how often it is passed.
# </details>
#
# <details><summary>3. A preempted request had a prompt of 100 tokens and had produced 40. How many tokens are computed when it returns, and how many new tokens come out of that?</summary>
#
# 140: the 139 that were stored, and the newest, which was not yet. One new token comes out, from the last row.
# `max_tokens` still counts from the original prompt.
# </details>
#
# <details><summary>4. The host's memory is full. What does an engine set to swap do with a victim?</summary>
#
# It recomputes: `leave_by_swap` says no and has changed nothing. The answer is the same.
# </details>

# %% [markdown]
# ## Summary
#
# - Static batches run as long as their longest answer. Deciding anew at each step fills the seats as they become free.
# - First come, first served; only a request that can finish its prompt enters; decodes come first, within a budget of
#   tokens.
# - When blocks run out, the youngest gives way, and returns before any newcomer. So no request waits for ever.
# - Recompute costs the tokens held; swap costs moving their blocks, twice. The ratio of prefill speed to bus speed
#   decides.
# - What can never fit is refused; a step that can do nothing raises.
#
# **Write it yourself:** [exercise 11](../exercises/11_scheduler_step/11_scheduler_step.ipynb), one step of a
# scheduler with preemption.
#
# **Next:** [12 · The whole engine](12_engine.ipynb) puts it all together. To go back:
# [10 · Sharing prefixes](10_sharing_prefixes.ipynb).
#
# ### Sources
#
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022:
#   scheduling at each iteration.
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 4.5, scheduling and preemption; 7.3, recompute
#   against swap.
# - A. Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, OSDI 2024,
#   [arXiv:2403.02310](https://arxiv.org/abs/2403.02310): decodes first, prompts in chunks.
# - vLLM, [*Optimization and Tuning*](https://docs.vllm.ai/en/stable/configuration/optimization/), section Preemption.
