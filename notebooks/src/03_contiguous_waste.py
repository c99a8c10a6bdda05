# %% [markdown]
# # 03 · What contiguous preallocation wastes
#
# Lesson 02 counted the memory that tokens take. This one counts the memory that holds no token and that nobody else can have either:
# a server has set it aside, often for words that are never said. Before 2023, that was most of it.
#
# **You will be able to** name the kinds of waste, measure each of them on realistic traffic, and say what it would cost to close
# the holes, and why that is not enough.
#
# About 40 minutes. No model is needed here, only lengths; runs in seconds.

# %%
import numpy as np

from coursekit.traffic import contiguous_traffic
from coursekit.commands.bench_memory import PAPER_RUNNING, PAPER_SHARE
from coursekit.figures import (
    arena_map,
    arena_over_time,
    lines_against_length,
    show,
    waste_bars,
)
from coursekit.lesson import compare, number, say, show_source, table
from coursekit.replay import replay_contiguous
from coursekit.widgets import Stepper
from coursekit.workloads import azure_lengths, lognormal_lengths

# %% [markdown]
# ## The question
#
# The plain way to keep keys and values is one tensor per request, and a tensor is contiguous: one *strip* of memory, with one slot
# for each token. It has to be made when the request starts, but how long the answer will be is known only when it ends. So
# the server makes a [reservation](../docs/glossary.md#reservation), by one of three rules:
#
# - **maximum**: as long as any request may become;
# - **power of two**: the prompt, and for the answer the next power of two above its true length. That is a server that guesses each
#   answer's length within a factor of two;
# - **oracle**: exactly as long as the request will be. No server can know that. It is the best that contiguous memory could do.
#
# **Under each rule, how much of the memory holds tokens?**

# %% [markdown]
# ### The server
#
# Take that of the PagedAttention paper: a model of 13 billion parameters (OPT-13B) on a card of 40 GB, which leaves 12 GB for
# keys and values. Requests have at most 2048 tokens. Their lengths are drawn to resemble real chats (ShareGPT): the means are
# those of the paper, and single requests differ widely from them.

# %%
KB_PER_TOKEN, MAX_LEN = 800, 2048
BUDGET = 12 * 10**9 // (KB_PER_TOKEN * 1024)  # slots: tokens that fit
lengths = lognormal_lengths("sharegpt", 2000, seed=0)  # int64 [2000, 2]: prompt, answer
total = lengths.sum(axis=1)
say(f"""
    The budget has {number(BUDGET)} slots. The {number(len(lengths))} requests have on average
    {lengths[:, 0].mean():.0f} prompt and {lengths[:, 1].mean():.0f} answer tokens. Half of them are
    shorter than {np.median(total):.0f} in all, one in twenty is longer than
    {np.percentile(total, 95):.0f}.
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
for rule, result in results.items():
    print(f"{rule:13} {result.steps:>6} steps, every slot counted exactly once in each")
    assert abs(sum(result.waste.shares.values()) - 1) < 1e-9

# %%
held = {rule: 100 * result.waste.shares["used"] for rule, result in results.items()}
table(
    ["rule", "holds tokens, %", "in the paper, %", "requests at once", "in the paper"],
    [
        (words, held[r], 100 * PAPER_SHARE[r], results[r].running, PAPER_RUNNING["sharegpt"][r])
        for r, words in RULES.items()
    ],
)

# %%
wrong_share_maximum = {
    14: "that is one request in seven strips; the others run at the same time",
    round(100 * total.mean() / MAX_LEN): "that is the mean final length over 2048; on average over "
        "its steps a request holds less, but long requests stay longer and count more often",
    100: "the memory is always *reserved*; little of it holds a token",
}
unit = "percent under the maximum rule"
compare(my_share_maximum, round(held["maximum"]), unit, wrong_share_maximum)
wrong_share_power_of_two = {
    75: "that is how full such strips are when they end; most of the time they are still filling",
}
unit = "percent under the power-of-two rule"
compare(my_share_power_of_two, round(held["power_of_two"]), unit, wrong_share_power_of_two)
wrong_share_oracle = {
    100: "no strip is too long, but each is reserved from the start and fills one token at a time",
    80: "that leaves room for holes; it forgets that strips fill one token at a time",
}
compare(my_share_oracle, round(held["oracle"]), "percent under the oracle", wrong_share_oracle)
at_once = BUDGET // MAX_LEN
assert results["maximum"].running == at_once == 7
assert held["maximum"] < 25 < 38 < held["power_of_two"] < held["oracle"] < 50

# %% [markdown]
# Even the oracle, which knows the future, fills less than half. (The maximum rule comes close to the paper; the two others hold more
# tokens here than there. [Why](extra/03_beside_the_paper.ipynb) is a study of its own: it is mostly the allocator, not the requests.)

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
# be used, but nobody can use them *meanwhile*. Every rule has this, the oracle too: it is the price of reserving in
# advance at all. It can be computed from the lengths alone: a request with $p$ prompt tokens and $s$ steps holds $p$, $p + 1$, …,
# $p + s - 1$ tokens, one step after the other, and had room for all $p + s - 1$ from the start (next cell).
#
# **Never used** (light grey), or [internal fragmentation](../docs/glossary.md#internal-fragmentation). The reservation was
# too long. Better guesses make it smaller.
#
# **Holes** (palest), or [external fragmentation](../docs/glossary.md#external-fragmentation). Strips of different lengths
# come and go and leave gaps, and no gap is long enough for the next. Under the maximum rule all strips are equally long, and all
# that is left over is the end of the budget. The two rules that save memory by guessing have holes instead.

# %%
prompt, steps = lengths[:, 0], lengths[:, 1]  # a request runs one step for each answer token
held_now = (steps * prompt + steps * (steps - 1) // 2).sum()  # token slots x steps
held_at_end = (steps * (prompt + steps - 1)).sum()
shares = {rule: result.waste.shares for rule, result in results.items()}
now = {r: t.waste.used / (t.waste.used + t.waste.to_come) for r, t in results.items()}
say(
    f"Predicted from the lengths: of the slots that will ever hold a token, "
    f"**{100 * held_now / held_at_end:.0f} %** hold one now. Measured: "
    f"{', '.join(f'{100 * share:.0f} %' for share in now.values())}."
)
assert all(abs(share - held_now / held_at_end) < 0.01 for share in now.values())
assert (
    shares["oracle"]["never"]
    == 0
    < shares["power_of_two"]["never"]
    < shares["maximum"]["never"]
)
assert shares["maximum"]["external"] < 0.05 < 0.1 < shares["oracle"]["external"]
assert all(share["to_come"] > 0.15 for share in shares.values())

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
# ### The longer the maximum, the worse
#
# Under the first rule the number of requests at once does not depend on the requests at all. Allow them to be twice as long, and
# all reservations double, although the requests stay as they were. On average a request holds a certain number of tokens,
# whatever was reserved; so the share that holds tokens should be that number divided by the longest length allowed. The line is
# this prediction, the dots are measured:

# %%
longer = {}
for max_len in range(2048, 16385, 1024):
    waste = contiguous_traffic(lengths, 7 * 16384, max_len, "maximum").waste
    longer[max_len] = waste.used / (waste.used + waste.to_come + waste.never)
tokens_held = held_now / steps.sum()  # by a request, on average over its steps
print(f"a request holds {tokens_held:.0f} tokens on average over its steps")
assert all(abs(share * n / tokens_held - 1) < 0.03 for n, share in longer.items())

# %%
show(
    lines_against_length(
        {
            "predicted\n(dots: measured)": [
                (n, 100 * tokens_held / n) for n in range(2048, 16385, 128)
            ]
        },
        points=[(n, 100 * share) for n, share in longer.items()],
        points_label="",
        x_label="longest request allowed (tokens)",
        y_label="reserved memory that holds tokens (%)",
    ),
    "The share of reserved memory that holds tokens, against the longest length allowed: it "
    "falls as one over that length, and the measured dots lie on the predicted line.",
)

# %% [markdown]
# ### "Up to 60 %": a claim checked
#
# One reads that servers before paging wasted "60 to 80 %" of their KV memory (the announcement of vLLM, June 2023), or "up to
# 60 %". Is that so? It depends on three things that are rarely stated with it: the rule, the traffic, and the maximum. Here are
# our figures, with recorded traffic as well: the conversations and the code completions of two Azure services. Each budget has
# room for seven of the longest requests and a little more, as above.

# %%
traffic = {  # lengths, longest request allowed, slots
    "ShareGPT-like": (lengths, MAX_LEN, BUDGET),
    "Azure conversations": (azure_lengths("conv")[:3000], 16384, 7 * 16384 + 2048),
    "Azure code": (azure_lengths("code")[:3000], 8192, 7 * 8192 + 1024),
}
wasted = {}
for name, (pairs, max_len, budget) in traffic.items():
    outcome = [contiguous_traffic(pairs, budget, max_len, rule) for rule in RULES]
    wasted[name] = [100 * (1 - result.waste.shares["used"]) for result in outcome]
table(
    ["wasted, %", *RULES.values()],
    [(name, *(round(w) for w in row)) for name, row in wasted.items()],
)

# %%
everywhere = [waste for row in wasted.values() for waste in row]
print(f"from {min(everywhere):.0f} % to {max(everywhere):.0f} % wasted, over all rules and traffic")
assert all(60 <= round(waste) <= 80 for waste in wasted["ShareGPT-like"][:2])
assert max(everywhere) > 90 and min(everywhere) < 40

# %% [markdown]
# On chats like those of the paper, the two rules that a real server could use waste between 60 and 80 percent: there, the
# claim holds. "Up to 60" is too low: with a long maximum it is above ninety. And on code, where prompts are long and answers
# short, a good guess would have wasted less than forty. A percentage means little unless its traffic is named.

# %% [markdown]
# ## Clean up instead?
#
# The holes could be closed: stop, move all strips together, go on. Disks do it, garbage collectors do it; it is called
# [compaction](../docs/glossary.md#compaction). The paper (section 3.1) calls it impractical because the cache is so large. Try it,
# and count the slots that have to be copied.

# %%
packed = list(replay_contiguous(lengths[:600], BUDGET, MAX_LEN, "oracle", compact=True))
moves = [step.moved for step in packed if step.moved]


def share_used(snapshots):
    return np.mean([step.used for step in snapshots if step.waiting]) / BUDGET

# %%
gain = 100 * (share_used(packed) - share_used(history))
bytes_moved = np.mean(moves) * KB_PER_TOKEN * 1024
say(f"""
    {len(moves)} compactions in {number(len(packed))} steps. The share that holds tokens rises by
    {gain:.0f} points, to **{100 * share_used(packed):.0f} %**. Each compaction moves
    {bytes_moved / 1e9:.1f} GB on average.
""")
assert 3 < gain < 12 and 2e9 < bytes_moved < 8e9

# %% [markdown]
# What does moving cost? Each byte is read once and written once. The paper's card, an A100 with 40 GB, moves at most 1 555 GB a
# second, and everybody waits meanwhile.

# %%
A100 = 1555e9  # bytes per second, from its data sheet
pause = 2 * bytes_moved / A100
per_step = sum(moves) * KB_PER_TOKEN * 1024 * 2 / A100 / len(packed)
say(f"One pause: {1000 * pause:.1f} ms. Spread over all steps: {1000 * per_step:.2f} ms each.")
assert pause < 0.01 and per_step < 0.001

# %% [markdown]
# So on this card, with this traffic, compaction is *not* ruinous: a pause of some milliseconds now and then, next to nothing on
# average. We expected worse. The case against it is what it cannot do:
#
# - it closes holes, but the room kept for tokens to come, more than twice as much, stays;
# - it helped an *oracle*; real rules waste more inside the strips, and moving strips does not help there;
# - strips still cannot share: two requests with the same beginning need two copies of it.

# %%
after = share_used(packed)
print(f"after compaction an oracle still loses {100 * (1 - after):.0f} % of the memory")
assert after < 0.6
assert shares["oracle"]["to_come"] > 2 * shares["oracle"]["external"]

# %% [markdown]
# ## The code as it stands
#
# The three rules, and the *arena*, the memory from which strips are cut. Finding a hole is easy. Giving back takes more care: a
# freed strip has to join the holes on both its sides, or the free memory falls into ever smaller pieces.

# %%
from coursekit.contiguous import ContiguousArena, reserve

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
arena.check_invariants()
arena.free(a)
arena.free(c)
print("holes:", arena.holes, " room for 50:", arena.allocate(50))
assert arena.holes == [(0, 30), (60, 40)]
arena.free(b)
print("holes:", arena.holes)
assert arena.holes == [(0, 100)] and arena.allocate(50) == 0
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
assert lonely.num_free == 100
assert served == [30, 70, 50] and queue[0] > lonely.num_slots

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The first in line needs more than there is *in all*. "Not now" is the answer for a request that does not fit at the
# moment; for this one it should have been "never", and it should have been said when the request arrived. As the server is first
# come, first served, everybody after it waits too. The engine here refuses such a request when it is *added*, with both numbers
# in the message, as you saw in lesson 02.
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
# <details><summary>3. A server reserves the maximum, and its operator doubles the longest length. What happens to the requests at once?</summary>
#
# Half as many run at once, even if nobody ever sends a longer request.
# </details>
#
# <details><summary>4. An oracle wastes half of the memory. What does that say about working on better guesses?</summary>
#
# That it cannot be the solution: perfect guesses are not enough. The memory has to be given *while* the answer grows,
# not before.
# </details>
#
# <details><summary>5. What would a piece of memory have to look like, so that there are no holes at all?</summary>
#
# All pieces must have the same size, as in questions 1 and 2, so that every free piece fits every need. And they must be small, so
# that little is lost in the last one. Such a piece is a block, and lesson 04 is about blocks.
# </details>

# %% [markdown]
# ## Summary
#
# - Contiguous memory has to be reserved before the length is known. That wastes room for tokens to come, room never used,
#   and holes.
# - How full the strips are follows from the lengths; how much is lost to holes depends on the allocator.
# - Rules trade one kind for another. Even a perfect guess filled less than half of the memory.
# - Reserving the maximum gets worse in proportion to the maximum.
# - Compaction is affordable and closes the holes, but the larger part of the waste is inside the strips.
#
# **Write it yourself:** [exercise 03](../exercises/03_contiguous_arena/03_contiguous_arena.ipynb), an arena and its waste.
#
# **Next:** [04 · Blocks and block tables](04_block_tables.ipynb). The same traffic, the same budget, once more.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 3.1 on the kinds of waste and on compaction, figures 2 and 13.
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: the server that
#   reserves the maximum.
# - P. Patel et al., *Splitwise: Efficient Generative LLM Inference Using Phase Splitting*, ISCA 2024,
#   [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure traces (Azure Public Dataset, Microsoft, CC-BY 4.0).
# - D. Knuth, *The Art of Computer Programming*, volume 1, section 2.5: first fit, best fit, buddies.
