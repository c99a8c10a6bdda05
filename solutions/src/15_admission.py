# %% [markdown]
# # 15 · Exercise: will it wait too long?
#
# The lesson is [15 · Serving](../../notebooks/15_serving.ipynb). There a server took everybody in and let them wait. Here you write
# what it would have to know to say no in time: how long a newcomer would wait for its first token.
#
# Each task has one cell for your answer and a check below it. The check runs that cell alone, in a process of its own: an import
# or a helper that you need must stand in the same cell.

# %%
from coursekit.checks import attempt, check

# %% [markdown]
# ## Task 1 · What a step costs
#
# *About 8 lines · difficulty 2 of 5 · 15 minutes · 2 points*
#
# A step reads all weights, however many tokens it computes, and it computes each token. So its time is close to a straight line,
# `milliseconds = fixed + per_token * tokens`, and both numbers can be read off the steps that a server has taken.
#
# **Contract.** `my_step_cost(measured)` gets a list of `(tokens, milliseconds)`, one pair for each step, and returns `(fixed, per_token)` of
# the line that fits best: the sum of the squares of what the line is off is as small as it can be (least squares). Two steps with different numbers of
# tokens are the least that determine a line; with fewer it raises `ValueError`.
#
# **Example.** `my_step_cost([(10, 25.0), (30, 35.0), (20, 30.0)])` is `(20.0, 0.5)`: every step takes 20 ms, and each token half a millisecond more.
#
# <details><summary>Hint 1</summary>
#
# The best line goes through the mean point: through the mean of the tokens and the mean of the milliseconds. Only its slope is missing.
#
# <details><summary>Hint 2</summary>
#
# For each step take how far its tokens are from their mean, and how far its milliseconds are from theirs. The slope is the sum of the products of the two, divided by the
# sum of the squares of the first.
#
# <details><summary>Hint 3</summary>
#
# The divisor is zero when all steps have the same number of tokens: that is the `ValueError`, to be raised before you divide. And since the line goes through the mean
# point, `fixed` is the mean of the times less `per_token` times the mean of the tokens.
#
# </details></details></details>


# %% nbgrader={"grade_id": "step_cost", "solution": true}
def my_step_cost(measured):
    """(fixed, per_token) in milliseconds, from pairs of tokens and milliseconds."""
    ### BEGIN SOLUTION
    if len({tokens for tokens, _ in measured}) < 2:
        raise ValueError("two steps with different numbers of tokens are needed")
    mean_tokens = sum(tokens for tokens, _ in measured) / len(measured)
    mean_time = sum(time for _, time in measured) / len(measured)
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in measured)
    together = sum((tokens - mean_tokens) * (time - mean_time) for tokens, time in measured)
    per_token = together / spread
    return mean_time - per_token * mean_tokens, per_token
    ### END SOLUTION


# %%
with attempt():
    print(my_step_cost([(10, 25.0), (30, 35.0), (20, 30.0)]))

# %% nbgrader={"grade_id": "step_cost-check", "grade": true}
check.step_cost(my_step_cost)

# %% [markdown]
# ## Task 2 · Until the first token
#
# *About 16 lines · difficulty 3 of 5 · 35 minutes · 4 points*
#
# A newcomer stands at the end of the queue. How long until its whole prompt is computed, which is when its first token is there?
#
# **Contract.** `my_ttft(prompts, decoding, budget, fixed, per_token)` returns milliseconds. `prompts` are the tokens still to compute of each request
# in the queue, in order of arrival; the last one is the newcomer. `decoding` requests decode, and go on all the while. A step computes at most `budget` tokens, and
# goes by three rules:
# 1. **Decodes first.** Each decoding request computes one token.
# 2. **Then prompts, in order,** with what is left of the budget, the last of them in part if need be. The rest of it follows in the next step.
# 3. A request whose prompt is complete **decodes from the next step on**.
#
# A step takes `fixed + per_token * tokens`, of all tokens that it computed. When the decodes leave nothing of the budget, the newcomer
# never gets a token: the answer is `math.inf`. The list `prompts` is not changed.
#
# **Example.** `my_ttft([6, 4], 2, 8, 10, 1)`: the first step computes 2 decodes and the 6 tokens of the first prompt, in 10 + 8 = 18 ms. The second has 3 decodes and
# the newcomer's 4 tokens, 10 + 7 = 17 ms. The answer is 35.
#
# <details><summary>Hint 1</summary>
#
# One loop, a step in each round, until nobody is left in the queue. Work on a copy of `prompts`.
#
# <details><summary>Hint 2</summary>
#
# In a step keep `room`, what is left of the budget. A second loop gives it to the first of the queue, `min(left[0], room)`, as long as there is room and somebody in
# the queue.
#
# <details><summary>Hint 3</summary>
#
# Whoever has no token left in that inner loop leaves the queue and is counted in `complete`; after the step's time is added, `decoding += complete`. Before the inner
# loop: if `room` is not above zero, return `math.inf`.
#
# </details></details></details>

# %% nbgrader={"grade_id": "first_token", "solution": true}
import math


def my_ttft(prompts, decoding, budget, fixed, per_token):
    """Milliseconds until the last of the prompts is computed; math.inf if it never is."""
    ### BEGIN SOLUTION
    left, elapsed = list(prompts), 0
    while left:
        room, complete = budget - decoding, 0
        if room <= 0:
            return math.inf
        tokens = decoding
        while left and room:
            part = min(left[0], room)
            left[0] -= part
            room -= part
            tokens += part
            if left[0] == 0:
                left.pop(0)
                complete += 1
        elapsed += fixed + per_token * tokens
        decoding += complete
    return elapsed
    ### END SOLUTION


# %%
with attempt():
    print(my_ttft([6, 4], 2, 8, 10, 1))

# %% nbgrader={"grade_id": "first_token-check", "grade": true}
check.first_token(my_ttft)

# %% [markdown]
# ## Where this leads
#
# The budget and the rules are those of `schedule()` in [scheduler.py](../../minipaged/core/scheduler.py). `submit` in
# [engine_thread.py](../../minipaged/serve/engine_thread.py) says no by a simpler measure: how many requests are under way. With your two functions it could promise
# a time, and refuse whoever it could not keep it for.
#
# Something to think about: your estimate lets everybody decode for ever, but answers end. Is it too long or too short, then? Which error would you rather make
# in a server that promises a time?
