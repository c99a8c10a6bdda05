# %% [markdown]
# # 03 · What contiguous preallocation wastes
#
# Lesson 02 counted the memory that tokens take. This one counts the memory that holds no token and that nobody else can have either:
# a server has set it aside, often for words that are never said. Before 2023, that was most of it.
#
# **You will be able to** name the kinds of waste, measure each of them on realistic traffic, and say why closing the holes is not
# enough.
#
# About 25 minutes. No model is needed here, only lengths; runs in seconds.

# %%
import numpy as np

from coursekit.contiguous import ContiguousArena, reserve
from coursekit.traffic import contiguous_traffic
from coursekit.figures import arena_map, arena_over_time, show, waste_bars
from coursekit.lesson import compare, number, say, show_source, table
from coursekit.replay import replay_contiguous
from coursekit.widgets import Stepper
from coursekit.workloads import lognormal_lengths

# %% [markdown]
# ## The question
#
# The plain way to keep keys and values is one tensor per request, and a tensor is contiguous: one *strip* of memory, with one slot
# for each token. It has to be made when the request starts, but how long the answer will be is known only when it ends. So
# the server makes a [reservation](../docs/glossary.md#reservation), by one of three rules:
#
# - **maximum**: as long as any request may become;
# - **power of two**: the prompt, and for the answer its true length rounded up to a power of two. That is a server that guesses each
#   answer's length within a factor of two;
# - **oracle**: exactly as long as the request will be. No server can know that. It is the best that contiguous memory could do.
#
# **Under each rule, how much of the memory holds tokens?**

# %% [markdown]
# ### The server
#
# Take that of the PagedAttention paper: OPT-13B, a model that keeps 800 KB for each token, on a card that has 12 GB left for keys and
# values. Requests have at most 2048 tokens. Their lengths are drawn to resemble real chats (ShareGPT): the means are those of the
# paper, and single requests differ widely from them.

# %%
KB_PER_TOKEN, MAX_LEN = 800, 2048
BUDGET = 12 * 10**9 // (KB_PER_TOKEN * 1024)  # slots: tokens that fit
lengths = lognormal_lengths("sharegpt", 2000, seed=0)  # int64 [2000, 2]: prompt, answer
total = lengths.sum(axis=1)
say(f"""
    The budget has {number(BUDGET)} slots. The {number(len(lengths))} requests have on average
    {total.mean():.0f} tokens; half are shorter than {np.median(total):.0f}, one in twenty is longer
    than {np.percentile(total, 95):.0f}.
""")

# %% [markdown]
# ## Your prediction
#
# All requests are there from the start, so somebody is always waiting for memory. Averaged over time, what share of the 12 GB holds
# tokens, in percent, under each rule?

# %%
my_share_maximum = None  # your guess, in percent
my_share_power_of_two = None  # your guess, in percent
my_share_oracle = None  # your guess, in percent

# %% [markdown]
# ## Measure
#
# `contiguous_traffic` plays the server without a model. Requests are served in the order in which they came; a strip goes into the
# first hole that is long enough (*first fit*); each running request gets one token a step. In each step, every slot of the budget
# is counted under exactly one heading.

# %%
RULES = {
    "maximum": "reserve the maximum",
    "power_of_two": "a power of two",
    "oracle": "the true length",
}
results = {rule: contiguous_traffic(lengths, BUDGET, MAX_LEN, rule) for rule in RULES}
assert all(abs(sum(result.waste.shares.values()) - 1) < 1e-9 for result in results.values())

# %%
held = {rule: 100 * result.waste.shares["used"] for rule, result in results.items()}
table(
    ["rule", "holds tokens, %", "requests at once"],
    [(words, held[rule], results[rule].running) for rule, words in RULES.items()],
)

# %%
wrong_maximum = {
    round(100 * total.mean() / MAX_LEN): "that is the mean final length over 2048; but a request "
        "starts shorter, and long ones stay longer and count more often",
    100: "the memory is always *reserved*; little of it holds a token",
}
unit = "percent under the maximum rule"
compare(my_share_maximum, round(held["maximum"]), unit, wrong_maximum)
wrong_power = {75: "so full such strips are when they end; most of the time they are still filling"}
unit = "percent under the power-of-two rule"
compare(my_share_power_of_two, round(held["power_of_two"]), unit, wrong_power)
wrong_oracle = {100: "no strip is too long, but each is reserved from the start and fills slowly"}
compare(my_share_oracle, round(held["oracle"]), "percent under the oracle", wrong_oracle)
assert results["maximum"].running == BUDGET // MAX_LEN
assert held["maximum"] < held["power_of_two"] < held["oracle"] < 50

# %% [markdown]
# Even the oracle, which knows the future, fills less than half. (Two studies: [the same beside the paper's
# figures](extra/03_beside_the_paper.ipynb), and [three claims checked](extra/03_claims_checked.ipynb), of "60 to 80 % wasted" among
# them.)

# %% [markdown]
# ## The picture
#
# Where is the rest of the memory?

# %%
show(
    waste_bars({words: results[rule].waste.shares for rule, words in RULES.items()}),
    "Three bars of equal length, one per rule, cut into tokens, room for tokens to come, room "
    "never used, and holes. Under the maximum most is never used; the others have larger holes.",
)

# %% [markdown]
# ## Why
#
# There are three kinds of waste, and each rule trades one for another.
#
# **Reserved for tokens to come** (dark grey). Say the answer will be 400 tokens long and has 50 now. The other 350 slots will
# be used, but nobody can use them *meanwhile*. Every rule has this, the oracle too. It follows from the lengths alone: a request with
# $p$ prompt tokens and $s$ steps holds $p$, $p + 1$, …, $p + s - 1$ tokens, one step after the other, and had room for all
# $p + s - 1$ from the start.
#
# **Never used** (light grey), or [internal fragmentation](../docs/glossary.md#internal-fragmentation). The reservation was
# too long. Better guesses make it smaller.
#
# **Holes** (palest), or [external fragmentation](../docs/glossary.md#external-fragmentation). Strips of different lengths
# come and go and leave gaps, and no gap is long enough for the next. Under the maximum rule all strips are equally long, and all
# that is left over is the end of the budget.

# %%
prompt, steps = lengths[:, 0], lengths[:, 1]  # a request runs one step for each answer token
held_now = (steps * prompt + steps * (steps - 1) // 2).sum()  # token slots x steps
held_at_end = (steps * (prompt + steps - 1)).sum()
wastes = [result.waste for result in results.values()]
now = [waste.used / (waste.used + waste.to_come) for waste in wastes]
say(f"Predicted: of the slots that will hold a token, **{100 * held_now / held_at_end:.0f} %** do "
    f"so now. Measured: {', '.join(f'{100 * share:.0f} %' for share in now)}.")

# %% [markdown]
# ### See the holes
#
# The third kind is best seen over time. Each column of the picture is one step of the oracle's server, and each height is a place
# in memory. A request appears as a grey band, as high as the number of its tokens at the end, and fills with blue from below;
# when it ends, it leaves white.

# %%
history = list(replay_contiguous(lengths[:600], BUDGET, MAX_LEN, "oracle"))
show(
    arena_over_time(history[:1500], BUDGET),
    "Contiguous memory over 1500 steps. Bands of different heights come and go, and each fills "
    "with tokens from below. White holes open between them and stay open.",
)

# %% [markdown]
# Why does nobody move into the white? Step through the moments at which a request ended or came. The bar is the memory. Below it
# is the request that waits, outlined in blue and to the same scale; its outline is laid over the largest hole.

# %%
placed = [[strip.start for strip in step.strips] for step in history]
changes = [i for i in range(1, 1500) if placed[i] != placed[i - 1] and history[i].waiting]
tightest = max(range(40), key=lambda i: history[changes[i]].free / history[changes[i]].waiting)


def draw(moment):
    step = history[changes[moment]]
    most = max((size for _, size in step.holes), default=0)
    text = f"Step {changes[moment]}: {step.free} slots free, the largest hole has {most}."
    return arena_map(step, BUDGET), text


Stepper(
    40,
    draw,
    start=tightest,
    shows="Memory as a bar of strips and holes. The waiting request is longer than the largest "
    "hole.",
)

# %%
waiting = [step for step in history if step.waiting]
stuck = [step for step in waiting if step.waiting <= step.free]
share_stuck = len(stuck) / len(waiting)
say(f"""
    In **{100 * share_stuck:.0f} %** of the steps, the request that waited would have fitted if all
    holes had been one.
""")
assert share_stuck > 0.5

# %% [markdown]
# ## Clean up instead?
#
# The holes could be closed: stop, move all strips together, go on. Disks do it, garbage collectors do it; it is called
# [compaction](../docs/glossary.md#compaction). What would the oracle gain?

# %%
packed = list(replay_contiguous(lengths[:600], BUDGET, MAX_LEN, "oracle", compact=True))
before, after = (
    100 * np.mean([step.used for step in run if step.waiting]) / BUDGET for run in (history, packed)
)
say(f"The share that holds tokens rises by {after - before:.0f} points, to **{after:.0f} %**.")
shares = results["oracle"].waste.shares
assert shares["to_come"] > 2 * shares["external"]

# %% [markdown]
# Moving so much memory costs less than one might think (a few milliseconds now and then, says the [study](extra/03_claims_checked.ipynb)).
# The case against it is what it cannot do:
#
# - it closes holes, but the room kept for tokens to come, more than twice as much, stays;
# - it helped an *oracle*; real rules waste more inside the strips, and moving strips does not help there;
# - strips still cannot share: two requests with the same beginning need two copies of it.

# %% [markdown]
# ## The code as it stands
#
# The three rules, and the *arena*, the memory from which strips are cut. A freed strip has to join the holes on both its sides, or
# the free memory falls into ever smaller pieces.

# %%
show_source(reserve, ContiguousArena.allocate, ContiguousArena.free)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | every slot is in exactly one strip or one hole | two requests share memory, or some is lost for ever |
# | no two holes touch | a request is refused although there is room for it |
# | a failed allocation changes nothing | a refusal leaks |
# | every byte of the budget is in exactly one kind of waste | percentages of different policies cannot be compared |

# %%
arena = ContiguousArena(100)
a, b, c = (arena.allocate(30) for _ in range(3))
arena.free(a)
arena.free(c)
print("holes:", arena.holes, " room for 50:", arena.allocate(50))
arena.free(b)
print("holes:", arena.holes, " room for 50:", arena.allocate(50))
arena.check_invariants()

# %% [markdown]
# ## Find the bug
#
# A server runs for weeks. One day it stops answering. No crash, no error; the card is almost empty; requests come in and wait.
# After a restart all is well, until it happens again. The log shows the last requests:

# %%
def serve_all(requests, arena):
    """First come, first served: admit while the first in line fits, then let the oldest end."""
    queue, running, served, idle = list(requests), [], [], 0
    while queue and idle < 100:
        start = arena.allocate(queue[0])
        if start is not None:
            running.append((start, queue.pop(0)))
        elif running:
            start, size = running.pop(0)
            arena.free(start)
            served.append(size)
        else:
            idle += 1  # nothing fits and nothing runs: wait and try again
    return served, queue


served, queue = serve_all([30, 70, 50, 120, 10, 10], ContiguousArena(100))
print("served:", served, " still waiting:", queue)

# %% [markdown]
# **Why do the two small ones wait? Decide before you run the next cell.**

# %%
lonely = ContiguousArena(100)
print("an empty arena has", lonely.num_free, "slots; a strip of 120:", lonely.allocate(120))

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The first in line needs more than there is *in all*. "Not now" is the answer for a request that does not fit at the moment; for
# this one it should have been "never", when the request arrived. Everybody after it waits too. The engine here refuses such a
# request when it is *added*, as you saw in lesson 02.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. All requests have exactly the same length. Which kinds of waste are left under the oracle?</summary>
#
# Only "to come": each strip fills up step by step. Equal strips leave holes of equal size, and the next one fits.
# </details>
#
# <details><summary>2. Why does the maximum rule have almost no external fragmentation?</summary>
#
# For the same reason: all strips are equally long. What is left over is the end of the budget, shorter than one strip.
# </details>
#
# <details><summary>3. An oracle wastes half of the memory. What does that say about working on better guesses?</summary>
#
# That it cannot be the solution: perfect guesses are not enough. The memory has to be given *while* the answer grows,
# not before.
# </details>
#
# <details><summary>4. What would a piece of memory have to look like, so that there are no holes at all?</summary>
#
# All pieces must have the same size, as in questions 1 and 2, so that every free piece fits every need. And they must be small, so
# that little is lost in the last one. Such a piece is a block, and lesson 04 is about blocks.
# </details>

# %% [markdown]
# ## Summary
#
# - Contiguous memory has to be reserved before the length is known. That wastes room for tokens to come, room never used,
#   and holes.
# - Rules trade one kind for another. Even a perfect guess filled less than half of the memory.
# - Compaction closes the holes, but the larger part of the waste is inside the strips.
#
# **Write it yourself:** [exercise 03](../exercises/03_contiguous_arena/03_contiguous_arena.ipynb), an arena and its waste.
#
# **Next:** [04 · Blocks and block tables](04_block_tables.ipynb). The same traffic, the same budget, once more.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 3 (800 KB a token, the kinds of waste), figure 2.
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: the server that
#   reserves the maximum.
