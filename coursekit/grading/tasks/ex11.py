"""Exercise 11: a scheduler step with preemption."""

import random
from functools import partial
from typing import Any

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task

SCHEDULER_STEP = Task(
    name="scheduler_step",
    exercise="11",
    title="A scheduler step with preemption",
    points=6,
    defines=("MyScheduler",),
)

TASKS = [SCHEDULER_STEP]

DONE = "who has all its tokens leaves running, and release gives its blocks back"


def start(
    learner: Learner, num_blocks: int, jobs: dict[str, tuple[int, int]], *, block_size: int = 4, most: int = 8
) -> Any:
    """A scheduler to which `jobs`, name -> (prompt tokens, output tokens), were added."""
    scheduler = learner.MyScheduler(num_blocks, block_size, most)
    for name, (prompt, output) in jobs.items():
        scheduler.add(name, prompt, output)
    return scheduler


def state(scheduler: Any) -> tuple[list[str], list[str], int]:
    return list(scheduler.running), list(scheduler.waiting), scheduler.num_free


@SCHEDULER_STEP.check(
    "a request that can never run is refused when it is added",
    hint="a request that waits for ever also holds up everybody after it: compare what it needs at its "
    "longest with the whole pool, before it joins the queue",
)
def never_fits(learner: Learner, expect: Expect) -> None:
    scheduler = start(learner, 4, {})
    for prompt, output in [(20, 1), (12, 5), (16, 1)]:
        given = f"add of a request with {prompt} + {output} tokens, 4 blocks of 4"
        expect.raises("ValueError", partial(scheduler.add, "big", prompt, output), given)
        expect.equal(state(scheduler), ([], [], 4), f"running, waiting, num_free after {given}")
    given = "add of a request with 12 + 4 tokens, 4 blocks of 4"
    why = "16 tokens just fit: the last one is given, and no further one needs room"
    expect.runs(partial(scheduler.add, "fits", 12, 4), given, hint=why)
    expect.equal(
        scheduler.waiting, ["fits"], "waiting after add of a request with 12 + 4 tokens, 4 blocks of 4"
    )
    served = [scheduler.step() for _ in range(5)]
    why = "alone in the pool a request gets a token in each step until it has all; the answer names also who "
    why += "leaves with this one"
    expect.equal(served, [["fits"]] * 4 + [[]], f"{given}: who gets a token in 5 steps", hint=why)
    given += ": running, waiting, num_free after 5 steps"
    expect.equal(state(scheduler), ([], [], 4), given, hint=DONE)


@SCHEDULER_STEP.check(
    "a request holds blocks for the tokens that it has, and gives them back when it is done",
    hint="a step needs room for one token more than the request has: at an exact multiple, a new block",
)
def holds_what_it_needs(learner: Learner, expect: Expect) -> None:
    scheduler = start(learner, 4, {"a": (3, 7)})
    free = []
    for _ in range(8):
        scheduler.step()
        free.append(scheduler.num_free)
    wanted = [3, 2, 2, 2, 2, 1, 4, 4]
    expect.equal(free, wanted, "num_free after each of 8 steps: prompt 3, output 7, 4 blocks of 4")


@SCHEDULER_STEP.check(
    "requests start in the order in which they came, and nobody overtakes",
    hint="when the first in the queue does not fit, the step admits nobody: otherwise short requests pass a "
    "long one for ever",
)
def in_order(learner: Learner, expect: Expect) -> None:
    scheduler = start(learner, 6, {"a": (7, 9), "b": (16, 3), "c": (1, 2)})
    expect.equal(scheduler.step(), ["a"], "first step: 6 blocks of 4; prompts a 7, b 16, c 1")
    expect.equal(
        state(scheduler)[:2],
        (["a"], ["b", "c"]),
        "running and waiting after the first step: 6 blocks of 4; prompts a 7, b 16, c 1",
    )
    scheduler = start(learner, 8, dict.fromkeys("abcde", (2, 3)), most=3)
    served = [scheduler.step() for _ in range(7)]
    wanted = [list("abc")] * 3 + [list("de")] * 3 + [[]]
    why = (
        "a step starts all that can: rule 3 goes on while somebody waits, there is room, and fewer than 3 run"
    )
    if isinstance(served[0], list) and len(served[0]) > 3:
        why = "3 run at most: one more starts only while fewer than max_running run"
    expect.equal(
        served,
        wanted,
        "who gets a token in 7 steps: five requests of 2 + 3 tokens, 3 at once at most",
        hint=why,
    )


@SCHEDULER_STEP.check(
    "when a block is missing, the youngest gives way and waits in front",
    hint="who came last loses least: take running[-1], give back all its blocks, put it first in the queue",
)
def youngest_gives_way(learner: Learner, expect: Expect) -> None:
    scheduler = start(learner, 4, {"a": (3, 9), "b": (3, 9), "c": (3, 9), "d": (3, 9)})
    expect.equal(scheduler.step(), list("abcd"), "first step: 4 blocks of 4, four prompts of 3 tokens")
    served = scheduler.step()
    given = "second step: all four need a second block, none is free"
    expect.equal(served, ["a", "b"], given)
    expect.equal(
        state(scheduler), (["a", "b"], ["c", "d"], 0), f"running, waiting, num_free after the {given}"
    )
    alone = start(learner, 3, {"a": (3, 6), "b": (7, 5)})
    expect.equal(
        [alone.step(), alone.step()], [["a", "b"], ["a"]], "3 blocks of 4; a 3 + 6, b 7 + 5: two steps"
    )
    expect.equal(
        state(alone),
        (["a"], ["b"], 1),
        "running, waiting, num_free after two steps: 3 blocks of 4; a 3 + 6, b 7 + 5",
    )


@SCHEDULER_STEP.check(
    "who gave way loses no token and gets none twice",
    hint="the tokens that it has stay its own: it comes back with prompt and output, needs blocks for all of "
    "them, and goes on where it stopped",
)
def no_token_lost(learner: Learner, expect: Expect) -> None:
    jobs = {"a": (3, 9), "b": (3, 9), "c": (2, 7), "d": (5, 4)}
    scheduler = start(learner, 4, jobs)
    counts = dict.fromkeys(jobs, 0)
    for _ in range(80):
        for name in scheduler.step():
            counts[name] += 1
    wanted = {name: output for name, (_, output) in jobs.items()}
    expect.equal(counts, wanted, f"tokens that each got in 80 steps, 4 blocks of 4, prompt and output {jobs}")
    expect.equal(state(scheduler), ([], [], 4), "running, waiting, num_free after these 80 steps", hint=DONE)


@SCHEDULER_STEP.check(
    "the youngest gives way also when it is the one that needs the block",
    hint="the youngest gives way even when it needs the block itself: the others go on without it",
)
def youngest_needs_it(learner: Learner, expect: Expect) -> None:
    given = "3 blocks of 4; a 5 + 3, b 3 + 5: second step, in which only b, the youngest, needs a block"
    scheduler = start(learner, 3, {"a": (5, 3), "b": (3, 5)})
    scheduler.step()
    expect.equal(scheduler.step(), ["a"], given)
    expect.equal(state(scheduler)[:2], (["a"], ["b"]), f"running and waiting after the {given}")


@SCHEDULER_STEP.check(
    "every step of random request mixes is as the rules say",
    hint="go through the four rules in order with the numbers shown: first the running ones, oldest first",
)
def random_mixes(learner: Learner, expect: Expect) -> None:
    for seed in range(12):
        source = random.Random(seed)
        num_blocks, block_size, most = source.randint(3, 9), source.randint(1, 4), source.randint(1, 5)
        scheduler = learner.MyScheduler(num_blocks, block_size, most)
        queue: list[list[Any]] = []  # [name, tokens, last, runs], in the order of arrival
        for step in range(30):
            if source.random() < 0.5:
                prompt = source.randint(1, max(1, num_blocks * block_size // 2))
                output = source.randint(1, num_blocks * block_size - prompt)
                scheduler.add(f"r{step}", prompt, output)
                queue.append([f"r{step}", prompt, prompt + output, False])
            before, tokens = state(scheduler), {job[0]: job[1] for job in queue}
            served = advance(queue, num_blocks, block_size, most)
            given = f"{num_blocks} blocks of {block_size}, {most} at once at most, seed {seed}, step {step}"
            given += f"; before it running {before[0]}, waiting {before[1]}, tokens {tokens}"
            expect.equal(scheduler.step(), served, f"who gets a token: {given}")
            held = sum(-(-job[1] // block_size) for job in queue if job[3])
            names = [[job[0] for job in queue if job[3] is runs] for runs in (True, False)]
            expect.equal(
                state(scheduler), (*names, num_blocks - held), f"running, waiting, num_free: {given}"
            )


def advance(queue: list[list[Any]], num_blocks: int, block_size: int, most: int) -> list[str]:
    """One step by the rules. In the order of arrival those that run always stand before those that wait."""

    def fits(count: int) -> bool:
        return sum(-(-(job[1] + 1) // block_size) for job in queue[:count]) <= num_blocks

    count = sum(job[3] for job in queue)
    while not fits(count):
        count -= 1
    while count < min(most, len(queue)) and fits(count + 1):
        count += 1
    for i, job in enumerate(queue):
        job[3] = i < count
        job[1] += job[3]
    served = [job[0] for job in queue[:count]]
    queue[:] = [job for job in queue if job[1] < job[2]]
    return served
