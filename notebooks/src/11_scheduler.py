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
# About 35 minutes. Runs in under half a minute on two CPU cores.

# %%
from coursekit.figures import show
from coursekit.figures.scheduling import gantt, pool_in_step, running_over_steps
from coursekit.lesson import compare, number, say, show_source, table
from coursekit.small_engine import serve_lengths, serve_to_end, small_llm, small_mix
from coursekit.timeline import Timeline
from coursekit.widgets import Stepper
from coursekit.workloads import Request

# %% [markdown]
# ## The question
#
# A batch has a number of *seats*, one for each request that runs. Answers differ in length, and the length is not known
# in advance. The old way is a [static batch](../docs/glossary.md#static-batching): take eight requests, run them until
# the last has ended, take the next eight. **[Continuous batching](../docs/glossary.md#continuous-batching)** decides
# anew before each step: a request that has ended leaves, and one that waits takes its seat.
#
# **How much does that gain? And what happens when all requests grow, and there is no block left?**
#
# We count steps, tokens and blocks, so the results are the same on every machine. `small_llm` is the engine with a tiny
# random Llama: what it says makes no sense, but it says the same thing every time, and every wrong key changes it.

# %%
mix = small_mix()
lengths = [request.max_tokens for request in mix]
say(f"""
    The traffic: {len(mix)} chats, {number(sum(len(r.prompt_token_ids) for r in mix))} tokens of
    prompts, {number(sum(lengths))} tokens of answers. The shortest answer has {min(lengths)}
    tokens, the longest {max(lengths)}.
""")

# %% [markdown]
# ## Your prediction
#
# 1. Static batches of eight. What percentage of the seats is idle, on average over the steps, because the request in
#    that seat has ended?
# 2. Static batches take 1320 steps for these chats. How many does continuous batching take, with the same eight seats?
# 3. No limit on seats, but only 100 blocks of 16 tokens. Requests lose their blocks to others, and their tokens must be
#    computed again. For every hundred tokens that had to be computed anyway, how many are computed again?

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
static = small_llm(num_blocks=512, max_num_seqs=SEATS)
static_answers = {}
for first in range(0, len(mix), SEATS):
    static_answers |= serve_to_end(static, mix[first : first + SEATS])
continuous = small_llm(num_blocks=512, max_num_seqs=SEATS)
answers = serve_to_end(continuous, mix)
print("answers that differ:", sum(answers[name] != static_answers[name] for name in answers))
assert answers == static_answers  # what runs beside a request does not change what it says

# %%
running = {
    "static batches": [record.running for record in static.trace],
    "continuous batching": [record.running for record in continuous.trace],
}
idle = {name: SEATS * len(line) - sum(line) for name, line in running.items()}
table(
    ["eight seats", "steps", "idle seats, all steps", "% idle"],
    [(n, len(line), idle[n], 100 * idle[n] / SEATS / len(line)) for n, line in running.items()],
)
even = (
    "as if lengths were spread evenly; but one long answer among eight holds seven seats for "
    "most of its time"
)
full = "that is all seats full in every step; at the end the last long answers run alone"
half = "half of them; but more than half of the seats were idle"
static_steps, steps = map(len, running.values())
percent = round(100 * idle["static batches"] / SEATS / static_steps)
compare(my_idle_percent, percent, "percent idle", {50: even})
compare(my_steps, steps, "steps", {533: full, 660: half})

# %% [markdown]
# A request gets one token in each step in which it runs, so the work is the same in both. Only the idle seats differ.
# A static batch lasts as long as its longest answer, so its steps can be worked out without running anything:

# %%
by_hand = sum(max(lengths[first : first + SEATS]) for first in range(0, len(mix), SEATS))
least = -(-sum(lengths) // SEATS)  # all seats always full
say(f"""
    Static, by hand: {number(by_hand)} steps. No schedule with eight seats can need fewer than
    {number(least)}. Continuous batching took {number(steps)}, and never looked at a length.
""")
assert by_hand == static_steps == 1320 and least <= steps < 1.15 * least
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
# and 3 tokens. A takes six blocks, and six are free. B needs seven. C, after it, needs one.

# %%
queue, _ = serve_lengths([(24, 8), (28, 8), (3, 8)])
first = queue.steps[0]
print({name: moment.state for name, moment in first.requests.items()}, "  free:", first.free)
entered = {name: states.index("prefill") for name, states in queue.states().items()}
print("enters in step:", entered)
assert first.free == 6 and entered == {"A": 0, "B": 8, "C": 8}

# %% [markdown]
# C waits as well, though there is room for it. **First come, first served**: if small ones overtook, a large one might
# wait for ever. The price is what you see: six blocks idle for eight steps.
#
# And why does B wait, though six of its seven blocks are there? **Only a request that can finish its prompt is let
# in.** Two requests with half a prompt each could hold all blocks between them, and neither could go on.
#
# One more limit keeps a step short: a [token budget](../docs/glossary.md#token-budget). Decodes, of one token each, come
# first; what is left is for prompts, in chunks if need be ([lesson 08](08_prefill_and_chunks.ipynb)).
#
# ### When the blocks run out
#
# Nothing was reserved for answers. They all grow into the same free blocks, until a decode finds none. Then one request
# must give its blocks back: [preemption](../docs/glossary.md#preemption). There are two ways to continue it later:
#
# - **[Recompute](../docs/glossary.md#recompute)**: drop the keys and values. The prompt *and what has been said so
#   far* become the new prompt, and are computed again.
# - **[Swap](../docs/glossary.md#swap)**: copy the blocks to the host's memory, and later copy them back.
#
# Five requests, twelve blocks, four seats:

# %%
FIVE = [(6, 18), (9, 14), (20, 8), (5, 16), (11, 6)]
small = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
_, wanted = serve_lengths(FIVE, num_blocks=100)
recompute, by_recompute = serve_lengths(FIVE, **small)
_, by_swap = serve_lengths(FIVE, preemption="swap", swap_space="1MiB", **small)
for index, step in enumerate(recompute.steps):
    if step.preempted:
        print(f"step {index}: {step.preempted[0]} gives way; {step.free} blocks free afterwards")
print("the same answers as with a hundred blocks:", by_recompute == by_swap == wanted)
assert by_recompute == by_swap == wanted
assert [step.preempted for step in recompute.steps if step.preempted] == [("D",), ("C",)]

# %% [markdown]
# First D, the youngest that runs; a step later C. Their blocks go to requests that were there before them. Either way the
# answers are those of a machine with plenty of memory, token by token.
#
# What does each way cost? The 48 chats again, now with 100 blocks of 16 and no limit on seats:


# %%
def serve_mix(**settings):
    """Serve the chats with 100 blocks: what happened, and the answers."""
    llm = small_llm(num_blocks=100, **settings)
    return Timeline(llm.engine), serve_to_end(llm, mix)


recomputed, said = serve_mix()
swapped, said_too = serve_mix(preemption="swap", swap_space="64MiB")
table(
    ["", "preemptions", "tokens computed", "of these, again", "blocks moved"],
    [
        (name, t.preemptions, t.computed, t.again, t.blocks_moved)
        for name, t in (("by recompute", recomputed), ("by swap", swapped))
    ],
)
assert said == said_too == answers

# %%
once = swapped.computed  # what has to be computed in any case
again = round(100 * recomputed.again / once)
few = "few requests are preempted, but each computes again all that it held"
gone = "the keys and values are gone: prompt and answer so far are computed again"
compare(my_again_percent, again, "computed again for each 100", {10: few, 0: gone})
say(f"A preempted request held {recomputed.again / recomputed.preemptions:.0f} tokens on average.")
assert recomputed.computed - recomputed.again == once and swapped.again == 0

# %% [markdown]
# Tokens computed again, or blocks moved out and back: two speeds of the machine decide which is cheaper. On paper swap
# wins by far for today's models, and yet vLLM only recomputes. Why, and both ways timed on your machine, is the study
# [Recompute or swap](extra/11_recompute_or_swap.ipynb).
#
# ## The picture
#
# The five requests in twelve blocks, with recompute. Each column is a step.

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
# Walk through the chart. Blue blocks were taken in this step. Watch the order of the queue, and when the pool fills. The
# steps of the two preemptions are 3 and 4.


# %%
def draw(step):
    view, before = recompute.steps[step], recompute.steps[step - 1] if step else None
    words = f"Step {step}: {view.free} of 12 blocks free" + (
        f"; {view.preempted[0]} gave way." if view.preempted else "."
    )
    return pool_in_step(view, before, num_blocks=12), words


shows = "The twelve blocks with the request that holds each, the running requests, and the queue."
Stepper(len(recompute.steps), draw, start=3, shows=shows)

# %% [markdown]
# ## Why
#
# **Why the youngest?** Running requests and queue together are always in order of arrival: all that run are older than
# all that wait. Preempting the youngest keeps it so, and the oldest can never be preempted, so it ends. Then the next is
# the oldest. *No request waits for ever*, whatever the others do. Preempt the oldest instead, and two long requests may
# take turns throwing each other out. Does the order hold, in all steps of the 48 chats?

# %%
for step in recomputed.steps + swapped.steps:  # requests are listed in order of arrival
    runs = [moment.state in ("prefill", "decode") for moment in step.requests.values()]
    assert runs == sorted(runs, reverse=True)
    assert mix[0].id not in step.preempted
count = len(recomputed.steps + swapped.steps)
print(f"in all {count} steps, those that run are older than those that wait")

# %% [markdown]
# **Why not admit requests more carefully?** That is possible: a [watermark](../docs/glossary.md#watermark) keeps some
# blocks free when a request is admitted, for the running ones to grow into. What does it bring, and what does it cost?

# %%
marks = {share: serve_mix(watermark=share)[0] for share in (0.0, 0.01, 0.05, 0.1, 0.2, 0.4)}
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
# ## The code as it stands
#
# One step's plan, by one rule: the numbered lines are the whole of it. A decode is a request that misses one token, so
# no line tells decodes and chunks apart. In the exercise you write this algorithm yourself, for requests that get one
# token each.

# %%
from minipaged.core.scheduler import Scheduler

show_source(Scheduler.schedule, Scheduler._compute, Scheduler._make_room, Scheduler._may_enter)
show_source(Scheduler.preempt_youngest)

# %% [markdown]
# You know two of its mechanisms from earlier lessons: `hits` are blocks found in the prefix cache (lesson 10), and
# `waiting_siblings` are the other samples of the same call, which fork its table (lesson 09).
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
# The first three you have checked, and the last is at the end of `schedule`. The fourth: twelve blocks hold 48 tokens.

# %%
llm = small_llm(block_size=4, num_blocks=12)
try:
    serve_to_end(llm, [Request("too long", [5] * 50, 10)])
except ValueError as error:
    print("ValueError:", error)
assert not llm.engine.has_unfinished_requests()

# %% [markdown]
# And one whose *prompt* fits while its answer does not? That cannot be known in advance. It runs until it is alone and
# the pool is full; then it ends, and says so. **How many tokens does it get, with a prompt of 40?**

# %%
(long_answer,) = serve_to_end(llm, [Request("long answer", [5] * 40, 30)]).values()
print("tokens of the answer:", len(long_answer))
assert len(long_answer) == 48 - 40 + 1

# %% [markdown]
# Eight that are stored, and the last, which never needs to be.
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

THREE = [(5, 24), (9, 20), (8, 20)]
right, right_answers = serve_lengths(THREE, num_blocks=18)
original = KVCacheManager.leave_by_recompute


def leave_carelessly(self, request):
    original(self, request)
    said = list(request.output.token_ids)
    request.tokens = request.parent.prompt_token_ids + said[-1:]


KVCacheManager.leave_by_recompute = leave_carelessly
broken, broken_answers = serve_lengths(THREE, num_blocks=18)
KVCacheManager.leave_by_recompute = original
print("preempted:", [step.preempted for step in broken.steps if step.preempted])
for name, said in right_answers.items():
    same = [a == b for a, b in zip(said, broken_answers[name], strict=True)]
    print(name, "all right" if all(same) else f"right for {same.index(False)} tokens, then wrong")
print("tokens that the right engine computed:", right.computed)

# %% [markdown]
# **What is wrong with C? Decide first. If you are right, you can say how many tokens the broken engine computed.**
# C's prompt has 8 tokens.

# %%
my_computed = None  # your guess

# %%
alike = "as many as the right engine; but what C had said already is not computed again"
compare(my_computed, broken.computed, "tokens", {right.computed: alike})
for name, timeline in (("right", right), ("broken", broken)):
    came_back = [step for step in timeline.steps if "C" in step.admitted][-1]
    print(f"computed when C came back, {name}:", came_back.requests["C"].tokens)

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
print(f"missing: {right.computed - broken.computed} tokens, all that C had said but the last")
assert same.index(False) == 16 and right.computed - broken.computed == 16 - 1
assert right_answers["A"] == broken_answers["A"] and right_answers["B"] == broken_answers["B"]

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
# <details><summary>4. The host's memory is full. What does an engine set to swap do with a request that has to give way?</summary>
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
# - Recompute costs the tokens held; swap costs moving their blocks, twice.
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
