# %% [markdown]
# # 11 · Exercise: a scheduler step with preemption
#
# The lesson is [11 · The scheduler](../../notebooks/11_scheduler.ipynb). There you saw who runs, who waits and who gives way. Here
# you write the step that decides it, for requests of which only the numbers matter: how many tokens each has, and
# how many blocks.
#
# The task has one cell for your answer and a check below it. The check runs that cell alone, in a process of its own: an import
# or a helper that you need must stand in the same cell.

# %%
from coursekit.checks import attempt, check

# %% [markdown]
# ## Task 1 · A scheduler step with preemption
#
# *About 25 lines · difficulty 4 of 5 · 50 minutes · 6 points*
#
# Requests are known by name. A request comes with `prompt` tokens, asks for `output` more, and is done when it has them all. It holds
# blocks only while it runs.
#
# **Contract.** `add(name, prompt, output)` puts a request at the end of `waiting`. One that would not fit with all its
# `prompt + output` tokens even into the empty pool raises `ValueError`, and nothing has changed.
#
# `step()` gives one token to everyone who runs in this step, and answers their names, oldest first. It goes by four rules, in this order:
# 1. **The running go first, oldest first.** Each takes the blocks that it needs for one token more than it has.
# 2. **The youngest gives way.** While a block is missing, the youngest of the running gives back all its blocks and becomes the *first* of
#    `waiting`. It keeps its tokens. That may be the very request that needs the block; then the others go on without it.
# 3. **Then the waiting, in order.** The first of `waiting` starts running, as the youngest, if fewer than `max_running` run and the blocks for its
#    tokens and one more are free; then the next. The first that cannot start ends this: nobody overtakes.
# 4. **Everyone who runs gets a token.** One that has all of them now leaves, and its blocks are free.
#
# Given: `running` and `waiting`, the names in order; `num_free`, the blocks that nobody holds; for each name `tokens` (what it has now), `last` (what it will have at
# the end) and `held` (its blocks); and three helpers.
#
# **Example.** 4 blocks of 4 tokens; `a`, `b`, `c` and `d` come with a prompt of 3 tokens each. The first step starts all four: each needs one block, for 4
# tokens. In the second step each needs a second block for its fifth token, and none is free. `a` is first: `d` gives way, and `a` takes its block. Then `b`: `c`
# gives way. The step answers `["a", "b"]`, and `waiting` is `["c", "d"]`.
#
# <details><summary>Hint 1</summary>
#
# Rules 1 and 2 are one loop over a copy of `running`, with a `while` inside it: as long as this name still runs and misses more blocks than are free,
# the last of `running` gives way.
#
# <details><summary>Hint 2</summary>
#
# After that inner `while` the name may itself have given way: take blocks for it only if it is still running. And names at the end of your copy
# may have given way earlier.
#
# <details><summary>Hint 3</summary>
#
# Rule 3 is `while self.waiting and len(self.running) < self.max_running`, with a `break` where the first one misses more blocks than are free.
# For rule 4 go over a copy of `running` again, for you remove from it: `release` who is done.
#
# </details></details></details>

# %% nbgrader={"grade_id": "scheduler_step", "solution": true}
class MyScheduler:
    """Decides for each step who runs. Names only: what a token is does not matter here."""

    def __init__(self, num_blocks, block_size, max_running):
        self.num_blocks, self.block_size, self.max_running = num_blocks, block_size, max_running
        self.num_free = num_blocks
        self.running, self.waiting = [], []
        self.tokens, self.last, self.held = {}, {}, {}

    def missing(self, name):
        """Blocks that a request needs for one more token, beyond those that it holds."""
        return -(-(self.tokens[name] + 1) // self.block_size) - self.held[name]

    def take(self, name):
        """The request takes what it misses."""
        self.num_free -= self.missing(name)
        self.held[name] += self.missing(name)

    def release(self, name):
        """The request gives back every block."""
        self.num_free += self.held[name]
        self.held[name] = 0

    def add(self, name, prompt, output):
        """A request joins the end of the queue; ValueError when it could never run."""
        ### BEGIN SOLUTION
        needed = -(-(prompt + output) // self.block_size)
        if needed > self.num_blocks:
            raise ValueError(f"{name} needs {needed} blocks, the pool has {self.num_blocks}")
        self.tokens[name], self.last[name], self.held[name] = prompt, prompt + output, 0
        self.waiting.append(name)
        ### END SOLUTION

    def step(self):
        """One step by the four rules: the names of those who got a token."""
        ### BEGIN SOLUTION
        for name in list(self.running):
            while name in self.running and self.missing(name) > self.num_free:
                youngest = self.running.pop()
                self.release(youngest)
                self.waiting.insert(0, youngest)
            if name in self.running:
                self.take(name)
        while self.waiting and len(self.running) < self.max_running:
            if self.missing(self.waiting[0]) > self.num_free:
                break
            self.running.append(self.waiting.pop(0))
            self.take(self.running[-1])
        served = list(self.running)
        for name in served:
            self.tokens[name] += 1
            if self.tokens[name] == self.last[name]:
                self.release(name)
                self.running.remove(name)
        return served
        ### END SOLUTION

# %%
with attempt():
    scheduler = MyScheduler(num_blocks=4, block_size=4, max_running=8)
    for name in "abcd":
        scheduler.add(name, prompt=3, output=9)
    for step in range(1, 4):
        print(f"step {step}: {scheduler.step()} got a token, waiting {scheduler.waiting}")

# %% nbgrader={"grade_id": "scheduler_step-check", "grade": true}
check.scheduler_step(MyScheduler)

# %% [markdown]
# ## Where this leads
#
# `schedule()` in [scheduler.py](../../minipaged/core/scheduler.py) is this algorithm: the running first, the youngest gives way, then the waiting in
# order. In three points it does more: a request computes what it misses within a budget of tokens, so a prompt comes in chunks; blocks are shared, with the prefix
# cache and among the samples of a call; and who enters must leave a few blocks free, the watermark, for those that run already. What gives way either forgets its
# blocks, as here, or moves them to the host. And yours looks one token ahead: it takes the block of the token that the step brings, the engine that of the token
# whose keys and values the step stores, which is the one before.
#
# Something to think about: write down `running + waiting` after every step. The names always stand in the order in which they came, so a step only moves the border
# between the two. Can the one that just gave way start again in the same step? Look for the reason why it cannot, and then write the step in half as many lines.
