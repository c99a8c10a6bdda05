# %% [markdown]
# # 03 · Exercise: a contiguous arena and its waste
#
# The lesson is [03 · What contiguous preallocation wastes](../../notebooks/03_contiguous_waste.ipynb). There a server gave
# out memory in strips, and most of it never held a token. Here you write the arena that gives out the strips, and the
# account that says where the rest went.
#
# Each task has one cell for your answer, and a check below it. The check takes that cell alone and runs it in a
# process of its own: an import or a helper that you need must stand in the same cell. Run the check as often as
# you like; it shows the input, what was expected, what your code answered, and what usually causes that.

# %%
from coursekit.checks import attempt, check
from coursekit.given.strips import Strip, moments
from coursekit.lesson import show_source

# %% [markdown]
# ## Task 1 · A first-fit arena
#
# *About 15 lines · difficulty 3 of 5 · 30 minutes · 4 points*
#
# An arena is a row of slots, `0 … num_slots - 1`. It gives out strips of neighbouring slots; what lies between the strips are
# the holes.
#
# **Contract.**
# - `holes`: a list of pairs `(start, size)`, by start. No hole has size 0, and no two of them touch: touching holes are one.
# - `allocate(size)`, `size` at least 1: a strip at the beginning of the *first* hole that is long enough; the answer is its
#   first slot. When no hole is long enough it answers `None`, and nothing has changed.
# - `free(start)`: the strip that begins at slot `start` becomes a hole again. When no strip begins there it raises
#   `ValueError`, and nothing has changed.
#
# The constructor is given: one hole, no strip. You may change it, and keep what you like in which form you like, as long as
# `holes` can be read.
#
# **Example.** An arena of 10. `allocate(3)`, `allocate(3)` and `allocate(4)` answer 0, 3 and 6, and `holes` is `[]`. After
# `free(0)` and `free(6)` it is `[(0, 3), (6, 4)]`: seven slots are free, and `allocate(5)` still answers `None`. `free(3)` joins
# all three: `[(0, 10)]`, and `allocate(5)` answers 0.
#
# <details><summary>Hint 1</summary>
#
# The first hole that is long enough is found by walking through `holes` in order. What is left of it stays in the list at the
# same place, and begins later. When may nothing be left in the list?
#
# <details><summary>Hint 2</summary>
#
# `free` only knows where the strip begins, so you need a note of how long each one is: a dict from start to size. Taking a key
# out of it also tells you whether there was such a strip.
#
# <details><summary>Hint 3</summary>
#
# The plain way to join: put the new hole into the list, sort it, and build the list anew. A hole that begins where the last one
# of the new list ends makes that one longer; any other is added to it. That handles the left neighbour, the right one, both and
# none in the same three lines.
#
# </details></details></details>

# %% nbgrader={"grade_id": "arena", "solution": true}
class MyArena:
    """Slots 0 … num_slots - 1 in a row, given out in strips by first fit."""

    def __init__(self, num_slots):
        self.holes = [(0, num_slots)]  # (start, size), by start
        self.strips = {}  # start -> size

    def allocate(self, size):
        """Reserve `size` slots in a row: the first of them, or None if no hole is long enough."""
        ### BEGIN SOLUTION
        for i, (start, hole) in enumerate(self.holes):
            if hole >= size:
                rest = (start + size, hole - size)
                self.holes[i : i + 1] = [rest] if hole > size else []
                self.strips[start] = size
                return start
        return None
        ### END SOLUTION

    def free(self, start):
        """Give back the strip that begins at `start`; ValueError when none does."""
        ### BEGIN SOLUTION
        if start not in self.strips:
            raise ValueError(f"no strip begins at slot {start}")
        joined = []
        for begin, size in sorted([*self.holes, (start, self.strips.pop(start))]):
            if joined and sum(joined[-1]) == begin:
                begin, size = joined[-1][0], joined.pop()[1] + size
            joined.append((begin, size))
        self.holes = joined
        ### END SOLUTION

# %%
with attempt():
    arena = MyArena(10)
    print("three strips begin at", [arena.allocate(size) for size in (3, 3, 4)])
    arena.free(0)
    arena.free(6)
    print("holes:", arena.holes, " five in a row:", arena.allocate(5))
    arena.free(3)
    print("holes:", arena.holes, " five in a row:", arena.allocate(5))

# %% nbgrader={"grade_id": "arena-check", "grade": true}
check.arena(MyArena)

# %% [markdown]
# ## Task 2 · An account of waste
#
# *About 12 lines · difficulty 2 of 5 · 20 minutes · 3 points*
#
# At one moment a server looks at its arena: where is every slot? This is what it knows of each request in it.

# %%
show_source(Strip)

# %% [markdown]
# **Contract.** `waste(num_slots, strips, holes, next_size)` answers a dict with the five shares below, numbers from 0 to 1. Each
# is a share of *all* `num_slots` slots, so together they make 1.
# - `"used"`: holds a token.
# - `"to_come"`: reserved, and a token will come. It is used later; nobody else can use it meanwhile.
# - `"never"`: reserved, and no token ever comes (internal fragmentation).
# - `"external"`: in a hole too short for the request that waits next, which needs `next_size` slots (external fragmentation).
# - `"free"`: in the other holes.
#
# `strips` is a list of `Strip`, `holes` a list of pairs `(start, size)`; together they fill the arena. Each hole is judged by
# itself. `next_size` is `None` when nobody waits: then no hole is too short.
#
# **Example.** 100 slots. One request has reserved 40 of them, holds 10 tokens and will end with 25; another has reserved 20, holds
# 20 and will end with 20. The holes are `[(40, 10), (70, 30)]`, and the next request needs 16. Used: 10 + 20 = 30 slots, 0.3. To
# come: 25 - 10 = 15, 0.15. Never: 40 - 25 = 15, 0.15. External: 10 of them, 0.1. Free: 30, 0.3.
#
# <details><summary>Hint 1</summary>
#
# Draw one strip: tokens from its beginning, then room for tokens to come, then the rest. Which two of its three numbers bound each
# of the three parts?
#
# <details><summary>Hint 2</summary>
#
# Count slots first, in all five kinds, and divide at the end, every count by the same number. If the five do not add up to
# `num_slots`, a slot was counted twice or not at all.
#
# <details><summary>Hint 3</summary>
#
# `to_come` sums up `final_tokens - num_tokens`, and `never` sums up `reserved - final_tokens`. A hole of exactly `next_size`
# slots is long enough. What is free is what all holes have together, less the external slots.
#
# </details></details></details>

# %% nbgrader={"grade_id": "waste", "solution": true}
def waste(num_slots, strips, holes, next_size):
    """Where all slots are: a dict of five shares, each of `num_slots`."""
    ### BEGIN SOLUTION
    sizes = [size for _, size in holes]
    short = [size for size in sizes if next_size is not None and size < next_size]
    slots = {
        "used": sum(strip.num_tokens for strip in strips),
        "to_come": sum(strip.final_tokens - strip.num_tokens for strip in strips),
        "never": sum(strip.reserved - strip.final_tokens for strip in strips),
        "external": sum(short),
        "free": sum(sizes) - sum(short),
    }
    return {kind: count / num_slots for kind, count in slots.items()}
    ### END SOLUTION

# %%
with attempt():
    strips = [Strip(40, num_tokens=10, final_tokens=25), Strip(20, num_tokens=20, final_tokens=20)]
    shares = waste(100, strips, [(40, 10), (70, 30)], next_size=16)
    print({kind: round(share, 3) for kind, share in shares.items()})

# %% nbgrader={"grade_id": "waste-check", "grade": true}
check.waste(waste)

# %% [markdown]
# ## Your arena as a server
#
# Both together, on the traffic of the lesson: its first 300 requests, the budget of 14 648 slots, at most 2048 tokens. `moments`
# serves them from your arena and shows each step in which somebody waits; your account says where the slots are, and the shares
# are averaged over the steps.

# %%
from collections import Counter

from coursekit.workloads import lognormal_lengths

BUDGET, MAX_LEN = 14_648, 2048
lengths = lognormal_lengths("sharegpt", 300, seed=0)  # int64 [300, 2]: prompt, answer
rules = {"maximum": lambda p, g: MAX_LEN, "oracle": lambda p, g: p + g - 1}


def average_shares(rule):
    """Your shares under one rule of the lesson, averaged over the steps in which somebody waits."""
    total, steps, arena = Counter(), 0, MyArena(BUDGET)
    for strips, next_size in moments(arena, lengths.tolist(), rules[rule]):
        total.update(waste(BUDGET, strips, arena.holes, next_size))
        steps += 1
    return {kind: share / steps for kind, share in total.items()}

# %% [markdown]
# The lesson's own arena and account, written in another way, must come to the same shares.

# %%
from coursekit.traffic import contiguous_traffic

with attempt():
    for rule in rules:
        mine = average_shares(rule)
        engines = contiguous_traffic(lengths, BUDGET, MAX_LEN, rule).waste.shares
        percent = ", ".join(f"{kind} {100 * share:.1f}" for kind, share in mine.items())
        same = all(abs(mine[kind] - engines[kind]) < 1e-9 for kind in mine)
        print(f"{rule:8} %: {percent}")
        print(f"{'':8} the engine's: {'the same' if same else engines}")

# %% [markdown]
# ## Where this leads
#
# The arena of the lesson is [contiguous.py](../../coursekit/contiguous.py). It joins a freed strip to its neighbours without
# building the list anew, and can also choose the shortest hole (best fit): does that waste less? Its account is `WasteReport` in
# [waste.py](../../coursekit/waste.py), with a sixth kind for the end of a last block: exercise 04 replaces strips
# by blocks, and that end is all that they waste.
