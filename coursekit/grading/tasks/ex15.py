"""Exercise 15: what a step costs, and how long a newcomer waits for its first token."""

import math
import random
from collections.abc import Sequence
from functools import partial

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task

STEP_COST = Task(
    name="step_cost",
    exercise="15",
    title="What a step costs",
    points=2,
    defines=("my_step_cost",),
)

FIRST_TOKEN = Task(
    name="first_token",
    exercise="15",
    title="Until the first token",
    points=4,
    defines=("my_ttft",),
    preamble="import math",
)

TASKS = [STEP_COST, FIRST_TOKEN]


@STEP_COST.check(
    "two steps determine the line",
    hint="the slope is the difference of the times over the difference of the tokens; fixed is the time at "
    "no token, and comes first",
)
def two_steps(learner: Learner, expect: Expect) -> None:
    for measured, wanted in [
        ([(10, 25.0), (30, 35.0)], (20.0, 0.5)),
        ([(64, 80.0), (1, 17.0)], (16.0, 1.0)),
        ([(5, 8.0), (9, 8.0)], (8.0, 0.0)),
    ]:
        expect.close(learner.my_step_cost(measured), wanted, f"my_step_cost({measured})", tolerance=1e-6)


@STEP_COST.check(
    "of many steps it is the line of least squares",
    hint="sum over all steps of (tokens - mean) · (time - mean), divided by the sum of (tokens - mean)²: "
    "neither two of the steps nor a mean of slopes is enough",
)
def many_steps(learner: Learner, expect: Expect) -> None:
    for seed in range(4):
        source = random.Random(seed)
        measured = [(n, 12 + 0.25 * n + source.uniform(-3, 3)) for n in source.sample(range(1, 400), 6)]
        measured.append((measured[0][0], measured[0][1] + 4))  # the same tokens again, another time
        shown = ", ".join(f"({tokens}, {time:.1f})" for tokens, time in measured)
        got = learner.my_step_cost(measured)
        expect.close(got, normal_equations(measured), f"my_step_cost([{shown}])", tolerance=1e-6)


def normal_equations(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The line of least squares, by Cramer's rule."""
    count = len(measured)
    x, y = sum(n for n, _ in measured), sum(t for _, t in measured)
    xx, xy = sum(n * n for n, _ in measured), sum(n * t for n, t in measured)
    determinant = count * xx - x * x
    return (y * xx - x * xy) / determinant, (count * xy - x * y) / determinant


@STEP_COST.check(
    "steps that determine no line are refused",
    hint="with one number of tokens only, any slope fits: raise ValueError before you divide",
)
def no_line(learner: Learner, expect: Expect) -> None:
    for measured in ([], [(8, 20.0)], [(8, 20.0), (8, 22.0), (8, 21.0)]):
        expect.raises("ValueError", partial(learner.my_step_cost, measured), f"my_step_cost({measured})")
    expect.close(
        learner.my_step_cost([(8, 20.0), (8, 22.0), (9, 24.0)]),
        (-3.0, 3.0),
        "my_step_cost([(8, 20.0), (8, 22.0), (9, 24.0)])",
        tolerance=1e-6,
    )


Queue = tuple[list[int], int, int]
"""Prompts, decoding requests, and the budget."""


def expect_ttft(
    learner: Learner, expect: Expect, *queues: Queue, fixed: float = 10, per_token: float = 2
) -> None:
    for queue in queues:
        prompts, *rest = (*queue, fixed, per_token)
        given = f"my_ttft({prompts}, {', '.join(f'{value:g}' for value in rest)})"
        got = learner.my_ttft(list(prompts), *rest)
        expect.close(got, token_by_token(*queue, fixed, per_token), given, tolerance=1e-6)


def token_by_token(
    prompts: Sequence[int], decoding: int, budget: int, fixed: float, per_token: float
) -> float:
    """The same, each token of the queue given its step: it is the first step that has room for it."""
    steps: list[int] = []  # tokens of each step
    decodes = [decoding]  # of each step, as far as known
    step = 0
    for tokens in prompts:
        for _ in range(tokens):
            while len(steps) <= step or steps[step] >= budget:
                if len(steps) > step:
                    step += 1
                while len(decodes) <= step:
                    decodes.append(decodes[-1])
                if decodes[step] >= budget:
                    return math.inf
                if len(steps) <= step:
                    steps.append(decodes[step])
            steps[step] += 1
        while len(decodes) <= step + 1:
            decodes.append(decodes[-1])
        decodes[step + 1] += 1
    return sum(fixed + per_token * tokens for tokens in steps)


@FIRST_TOKEN.check(
    "one prompt that fits into one step",
    hint="the decodes' tokens cost time as well: fixed + per_token * (decoding + the prompt's tokens)",
)
def one_step(learner: Learner, expect: Expect) -> None:
    expect_ttft(learner, expect, ([5], 0, 8), ([5], 3, 8), ([1], 7, 8), ([100], 20, 256))


@FIRST_TOKEN.check(
    "a long prompt takes several steps, each beside the decodes",
    hint="budget - decoding tokens of the prompt in each step, and `fixed` for each step; the last one may "
    "be short",
)
def several_steps(learner: Learner, expect: Expect) -> None:
    expect_ttft(learner, expect, ([20], 0, 8), ([20], 3, 8), ([16], 0, 8), ([5], 7, 8))


@FIRST_TOKEN.check(
    "who is ahead goes first, and a step is filled",
    hint="prompts in order of arrival; when one is complete and there is room, the next gets its part in the "
    "same step",
)
def in_order(learner: Learner, expect: Expect) -> None:
    expect_ttft(learner, expect, ([3, 4], 0, 8), ([9, 3], 0, 8), ([12, 2], 0, 8), ([1, 1, 1], 2, 16))


@FIRST_TOKEN.check(
    "who has its whole prompt decodes from the next step on",
    hint="add the completed ones to decoding after the step: they take a token of the budget in the next, "
    "and none in this",
)
def decodes_afterwards(learner: Learner, expect: Expect) -> None:
    queues: list[Queue] = [
        ([6, 4], 2, 8),
        ([6, 10], 2, 8),
        ([2, 2, 2, 12], 0, 8),
        ([8, 8, 8], 0, 8),
    ]
    expect_ttft(learner, expect, *queues, per_token=1)


@FIRST_TOKEN.check(
    "where decodes leave no room it is never",
    hint="when decoding reaches the budget nothing is left for prompts in any later step: math.inf, and no "
    "endless loop",
)
def never(learner: Learner, expect: Expect) -> None:
    for prompts, decoding, budget in ([1], 8, 8), ([4], 9, 8), ([1, 1, 3], 6, 8), ([2, 1], 2, 4):
        wanted = token_by_token(prompts, decoding, budget, 10, 2)
        got = learner.my_ttft(list(prompts), decoding, budget, 10, 2)
        expect.true(got == wanted, f"my_ttft({prompts}, {decoding}, {budget}, 10, 2)", f"{wanted:g}", got)


@FIRST_TOKEN.check(
    "random queues, token by token, and the caller's list stays as it was",
    hint="follow the numbers shown by hand, step by step; and work on a copy, list(prompts)",
)
def random_queues(learner: Learner, expect: Expect) -> None:
    for seed in range(30):
        source = random.Random(seed)
        prompts = [source.randint(1, 30) for _ in range(source.randint(1, 6))]
        decoding, budget = source.randint(0, 6), source.randint(10, 24)
        queue = prompts, decoding, budget
        expect_ttft(learner, expect, queue, fixed=source.randint(0, 20), per_token=0.5)
    kept = learner.keep([5, 7, 3])
    learner.my_ttft(kept, 1, 8, 10, 2)
    expect.equal(learner.fetch(kept), [5, 7, 3], "prompts after my_ttft([5, 7, 3], 1, 8, 10, 2)")
