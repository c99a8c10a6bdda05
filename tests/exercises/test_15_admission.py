"""The graders of exercise 15 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

STEP_COST = Proof(
    task="step_cost",
    second='''
import numpy as np

def my_step_cost(measured):
    """By numpy's own least squares."""
    rows = np.array([[1.0, tokens] for tokens, _ in measured]).reshape(-1, 2)
    if np.linalg.matrix_rank(rows) < 2:
        raise ValueError("no line")
    fixed, slope = np.linalg.lstsq(rows, np.array([t for _, t in measured]), rcond=None)[0]
    return float(fixed), float(slope)
''',
    wrong=[
        Wrong(
            "the slope first",
            "two steps determine the line",
            replace=(
                "return mean_time - per_token * mean_tokens, per_token",
                "return per_token, mean_time - per_token * mean_tokens",
            ),
        ),
        Wrong(
            "a line through the origin",
            "two steps determine the line",
            source="""
def my_step_cost(measured):
    if len({n for n, _ in measured}) < 2:
        raise ValueError("no line")
    return 0.0, sum(n * t for n, t in measured) / sum(n * n for n, _ in measured)
""",
        ),
        Wrong(
            "first and last step only",
            "of many steps",
            source="""
def my_step_cost(measured):
    if len({n for n, _ in measured}) < 2:
        raise ValueError("no line")
    (a, s), (b, t) = min(measured), max(measured)
    slope = (t - s) / (b - a)
    return s - slope * a, slope
""",
        ),
        Wrong(
            "divides by the spread of the times",
            "two steps determine the line|of many steps",
            replace=(
                "sum((tokens - mean_tokens) ** 2 for tokens, _ in measured)",
                "sum((time - mean_time) ** 2 for _, time in measured) or 1",
            ),
        ),
        Wrong(
            "counts steps, not numbers of tokens",
            "steps that determine no line",
            replace=("len({tokens for tokens, _ in measured}) < 2", "len(measured) < 2"),
        ),
        Wrong(
            "drops steps with the same number of tokens",
            "of many steps",
            replace=(
                "    mean_tokens = sum",
                "    measured = list(dict(measured).items())\n    mean_tokens = sum",
            ),
        ),
    ],
)

FIRST_TOKEN = Proof(
    task="first_token",
    second='''
def my_ttft(prompts, decoding, budget, fixed, per_token):
    """Recursion: one step, then the rest of the queue."""
    room = budget - decoding
    if room <= 0:
        return math.inf
    total, complete = 0, 0
    for tokens in prompts:
        if total + tokens > room:
            break
        total, complete = total + tokens, complete + 1
    rest = list(prompts[complete:])
    time = fixed + per_token * (decoding + min(room, sum(prompts)))
    if not rest:
        return time
    rest[0] -= room - total
    return time + my_ttft(rest, decoding + complete, budget, fixed, per_token)
''',
    wrong=[
        Wrong(
            "decodes cost nothing",
            "one prompt that fits",
            replace=("        tokens = decoding\n", "        tokens = 0\n"),
        ),
        Wrong(
            "decodes take nothing of the budget",
            "a long prompt takes several steps|one prompt that fits",
            replace=("room, complete = budget - decoding, 0", "room, complete = budget, 0"),
        ),
        Wrong(
            "one prompt a step",
            "who is ahead goes first",
            replace=("        while left and room:\n", "        for _ in range(1):\n"),
        ),
        Wrong(
            "the newcomer alone",
            "who is ahead goes first",
            replace=("list(prompts), 0", "list(prompts[-1:]), 0"),
        ),
        Wrong(
            "the shortest first",
            "who is ahead goes first|who has its whole prompt|random queues",
            replace=("list(prompts), 0", "sorted(prompts), 0"),
        ),
        Wrong(
            "complete ones leave for good",
            "who has its whole prompt",
            replace=("        decoding += complete\n", ""),
        ),
        Wrong(
            "complete ones decode in the same step",
            "one prompt that fits",
            replace=(
                "                complete += 1\n",
                "                complete += 1\n                tokens += 1\n",
            ),
        ),
        Wrong(
            "never is None",
            "where decodes leave no room",
            replace=("            return math.inf\n", "            return None\n"),
        ),
        Wrong(
            "only a full budget is never",
            "not done after",
            replace=("if room <= 0:", "if room == 0:"),
        ),
        Wrong(
            "uses up the caller's list",
            "random queues",
            replace=("list(prompts), 0", "prompts, 0"),
        ),
        Wrong(
            "the fixed part once",
            "a long prompt takes several steps",
            replace=(
                "        elapsed += fixed + per_token * tokens",
                "        elapsed += (0 if elapsed else fixed) + per_token * tokens",
            ),
        ),
    ],
)

PROOFS = [STEP_COST, FIRST_TOKEN]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_graders_tell_right_from_wrong(proof):
    proof.check()
