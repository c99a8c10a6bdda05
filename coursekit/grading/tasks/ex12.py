"""Exercise 12, the last: the step that joins scheduler, prefix cache and block tables, and its rows.

The parts of earlier exercises are given here. What a step would do to memory is followed number by number:
where a plan puts each token, and what each request would then read. At the end SmolLM2 computes the plans.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from coursekit.given.parts import MyScheduler
from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Mismatch, Task
from coursekit.grading.values import plain, show

BLOCK_SIZE = 16  # of the memory of SmolLM2
SYSTEM = "You are a helpful AI assistant. Answer in one short sentence, and say nothing that you do not know."
QUESTIONS = ["What is a cache?", "Why is the sky blue?", "Who was Ada Lovelace?"]
NEW_TOKENS = 6

SETUP = """
import os
from coursekit.given.parts import MyBlockTable, MyPrefixCache, MyScheduler, my_block_hashes
"""

ENGINE_STEP = Task(
    name="engine_step",
    exercise="12",
    title="The step that joins them",
    points=8,
    defines=("MyEngine",),
    preamble=SETUP,
)

ENGINE_BATCH = Task(
    name="engine_batch",
    exercise="12",
    title="From a plan to the rows of a kernel",
    points=4,
    defines=("my_batch",),
    preamble=SETUP,
)

TASKS = [ENGINE_STEP, ENGINE_BATCH]


# What a difference usually means.
GOES_ON = "after update() all tokens but the sampled one are stored: the next step computes that one"
AT_LEAST_ONE = "the next token comes from the row of the last one: look up the hashes of the tokens before it"
WHOLE_HITS = "hits are whole blocks: a request that starts has len(hits) * block_size tokens stored"
AS_GIVEN = "blocks are the numbers that the cache has given out, as they are"
HELD = (
    "hold what was found with share() before append() takes new blocks: until then the pool may give it away"
)
LEFT = "held are the blocks of those that run: who gave way, or is done, gives back hits and own blocks, once"
FREE = "a block of the plan is free: hold the hits with share(), and free no block twice"
DONE = "who is not in scheduler.running any more is done: update() gives back its hits and its own blocks"
Entry = tuple[str, list[int], int, list[int]]  # name, new tokens, how many are stored already, blocks


class Followed:
    """An engine of the learner's beside what its memory would hold: for every slot the text up to its token.

    The keys and values of a token depend on all tokens before it. So a slot is right for a request when it
    holds the very tokens of that request up to this one, whoever wrote it.
    """

    def __init__(
        self, learner: Learner, expect: Expect, num_blocks: int, block_size: int, most: int, given: str
    ) -> None:
        self.expect, self.num_blocks, self.block_size, self.given = expect, num_blocks, block_size, given
        self.engine = learner.MyEngine(num_blocks, block_size, most)
        self.scheduler = MyScheduler(num_blocks, block_size, most)
        self.tokens: dict[str, list[int]] = {}
        self.memory: dict[int, tuple[int, ...]] = {}
        self.stored: dict[str, int] = {}  # of those that run: tokens in memory after their last step
        self.plan: list[Entry] = []
        self.number = 0

    def add(self, name: str, prompt: Sequence[int], output: int) -> None:
        self.tokens[name] = list(prompt)
        self.scheduler.add(name, len(prompt), output)
        self.engine.add(name, list(prompt), output)

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self, compute: Callable[[list[Entry]], dict[str, int]] | None = None) -> None:
        """One step: every entry of the plan is looked at, every token written, every token read.

        compute: the model, which says the next token of each request in a plan.
        """
        self.number += 1
        where = f"{self.given}; schedule() number {self.number}"
        served = self.scheduler.step()
        self.plan = read_plan(self.engine.schedule(), where)
        names = [entry[0] for entry in self.plan]
        self.expect.equal(
            names, served, f"{where}: whose tokens it computes", hint="one entry for each name of step()"
        )
        self.stored = {name: stored for name, stored in self.stored.items() if name in served}
        for name, new, start, blocks in self.plan:
            self._look(name, new, start, blocks, f"{where}: the entry of {name!r}")
        self._write(where)
        self._read(where)
        self._count(where)
        sampled = compute(self.plan) if compute else {name: next_token(self.tokens[name]) for name in served}
        self.engine.update(dict(sampled))
        for name, token in sampled.items():
            self.stored[name] = len(self.tokens[name])
            self.tokens[name].append(token)
            if name not in self.scheduler.running:
                del self.stored[name]

    def _look(self, name: str, new: list[int], start: int, blocks: list[int], where: str) -> None:
        tokens, size, last = self.tokens[name], self.block_size, self.num_blocks - 1
        equal, true = self.expect.equal, self.expect.true
        if name in self.stored:
            wanted = (tokens[-1:], len(tokens) - 1)
            equal((new, start), wanted, f"{where}: (new, start)", hint=GOES_ON)
        true(bool(new), f"{where}: new", "at least one token", new, hint=AT_LEAST_ONE)
        is_whole = start >= 0 and (name in self.stored or start % size == 0)
        true(is_whole, f"{where}: start", f"a multiple of {size}", start, hint=WHOLE_HITS)
        given = f"{where}: new, with start {start} of {len(tokens)}"
        equal(new, tokens[start:], given, hint="new are all tokens of the request from start on")
        room = f"{len(tokens)} tokens need room, the stored and the new ones"
        equal(len(blocks), -(-len(tokens) // size), f"{where}: number of blocks", hint=room)
        is_there = all(0 <= block <= last for block in blocks)
        true(is_there, f"{where}: blocks", f"numbers from 0 to {last}", blocks, hint=AS_GIVEN)
        true(len(set(blocks)) == len(blocks), f"{where}: blocks", "different ones", blocks, hint=HELD)

    def _write(self, where: str) -> None:
        for name, new, start, blocks in self.plan:
            for position in range(start, start + len(new)):
                slot = self._slot(blocks, position)
                self.memory[slot] = tuple(self.tokens[name][: position + 1])

    def _read(self, where: str) -> None:
        """What each request finds in its slots once everything is written, as in a layer of the model."""
        for name, _, start, blocks in self.plan:
            for position in range(len(self.tokens[name])):
                slot = self._slot(blocks, position)
                wanted, got = tuple(self.tokens[name][: position + 1]), self.memory.get(slot)
                self.expect.count += 1
                if got != wanted:
                    holds = "nothing yet" if got is None else f"token {len(got) - 1} of {list(got)}"
                    raise Mismatch(
                        f"{where}: token {position} of {name!r}, in slot {slot} of block "
                        f"{slot // self.block_size}",
                        f"token {position} of {list(wanted)}",
                        holds,
                        self._why(name, position, start, slot // self.block_size),
                    )

    def _why(self, name: str, position: int, start: int, block: int) -> str:
        others = [entry[0] for entry in self.plan if entry[0] != name and block in entry[3]]
        if others:
            return f"block {block} is in the entry of {others[0]!r}, too: one of them does not hold it"
        if position < start:
            return (
                "start says that this token is stored, and it is not: blocks stand in the order of tokens, "
                "the hits first, and are published under the hash of their own tokens, once all are stored"
            )
        return "blocks must stand in the order of the tokens"

    def _count(self, where: str) -> None:
        held = {block for *_, blocks in self.plan for block in blocks}
        got, wanted = self.engine.cache.num_free, self.num_blocks - len(held)
        hint = FREE if isinstance(got, int) and got > wanted else LEFT
        self.expect.equal(got, wanted, f"{where}: cache.num_free after it", hint=hint)

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def finish(self) -> None:
        """Steps until nobody is left, and then nothing is held."""
        while self.is_busy:
            self.step()
        what = f"{self.given}: cache.num_free when all requests are done"
        self.expect.equal(self.engine.cache.num_free, self.num_blocks, what, hint=DONE)


def read_plan(plan: Any, where: str) -> list[Entry]:
    """A plan as plain values; Mismatch when it has another form."""
    entries = plain(plan)
    if not isinstance(entries, list):
        raise Mismatch(where, "a list of (name, new, start, blocks)", show(plan))
    for entry in entries:
        is_one = isinstance(entry, list) and len(entry) == 4
        if not is_one or not all(
            isinstance(value, kind) for value, kind in zip(entry, (str, list, int, list), strict=True)
        ):
            raise Mismatch(
                where, "each entry is (name, list of new tokens, start, list of blocks)", show(entry)
            )
    return [tuple(entry) for entry in entries]


def next_token(tokens: Sequence[int]) -> int:
    """What stands for the model: some number that depends on all tokens."""
    return 1 + (sum(tokens) + 7 * len(tokens)) % 5


def told(jobs: Mapping[str, tuple[Sequence[int], int]]) -> str:
    return ", ".join(
        f"{name} with {len(prompt)} + {output} tokens" for name, (prompt, output) in jobs.items()
    )


def start(
    learner: Learner,
    expect: Expect,
    jobs: Mapping[str, tuple[Sequence[int], int]],
    num_blocks: int,
    *,
    size: int = 4,
    most: int = 8,
) -> Followed:
    given = f"{num_blocks} blocks of {size}; {told(jobs)}"
    followed = Followed(learner, expect, num_blocks, size, most, given)
    for name, (prompt, output) in jobs.items():
        followed.add(name, prompt, output)
    return followed


@ENGINE_STEP.check(
    "a request alone computes its prompt, then one token a step",
    hint="schedule() answers one (name, new, start, blocks) for each name of scheduler.step()",
    guards=True,
)
def alone(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 11), 3)}, 8)
    seen = []
    for _ in range(3):
        followed.step()
        seen.append(followed.plan[0])
    given = followed.given
    wanted = [(list(range(1, 11)), 0), (followed.tokens["a"][10:11], 10), (followed.tokens["a"][11:12], 11)]
    expect.equal([(new, first) for _, new, first, _ in seen], wanted, f"{given}: (new, start) in three steps")
    blocks = [entry[3] for entry in seen]
    expect.equal(
        blocks[1:], [blocks[0]] * 2, f"{given}: its blocks in steps 2 and 3: still 12 tokens, as in step 1"
    )
    expect.equal(
        followed.engine.cache.num_free, 8, f"{given}: cache.num_free after its last update()", hint=DONE
    )
    expect.equal(followed.engine.schedule(), [], f"{given}: schedule() when nobody is left")


@ENGINE_STEP.check(
    "every request reads its own tokens, and writes over nobody's",
    hint="look at the request that is named, and follow its blocks from step to step",
)
def own_tokens(learner: Learner, expect: Expect) -> None:
    jobs = {"a": (range(1, 7), 4), "b": (range(20, 24), 6), "c": (range(40, 49), 2)}
    start(learner, expect, jobs, 12).finish()


@ENGINE_STEP.check(
    "a request starts with the blocks that are known already",
    hint="update() publishes every full block of a request, also the ones that its answer fills; a request "
    "that starts looks up the hashes of its tokens",
)
def known_blocks(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 11), 3)}, 8)
    followed.finish()
    blocks = followed.plan[0][3]
    given = "8 blocks of 4; a with 10 + 3 tokens is done; b comes with the same prompt"
    followed.given = given
    followed.add("b", range(1, 11), 3)
    followed.step()
    _, new, first, mine = followed.plan[0]
    expect.equal((new, first), ([9, 10], 8), f"{given}: (new, start) of b")
    expect.equal(mine[:2], blocks[:2], f"{given}: the first two blocks of b are those of a")
    followed.finish()
    text = followed.tokens["a"]
    followed.given = (
        "8 blocks of 4; a with 10 + 3 tokens is done; c comes with all its 13 tokens, of which 12 fill blocks"
    )
    followed.add("c", text, 2)
    followed.step()
    expect.equal(followed.plan[0][2], 12, f"{followed.given}: start of c")
    followed.finish()


@ENGINE_STEP.check(
    "a block is published only when all its tokens are stored",
    hint="the token that was sampled last is not stored before the next step: publish first, then append it",
)
def only_full(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 11), 2)}, 8)
    followed.finish()
    followed.given = "8 blocks of 4; a with 10 + 2 tokens is done, the last of them never stored; "
    followed.given += "b comes with these 12 and one more"
    followed.add("b", [*followed.tokens["a"], 9], 2)
    followed.step()
    expect.equal(followed.plan[0][2], 8, f"{followed.given}: start of b")
    followed.finish()


@ENGINE_STEP.check(
    "at least the last token is computed, also when every block is known",
    hint="the next token comes from the row of the last one: look up the hashes of those before it",
)
def last_token(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 9), 2)}, 8)
    followed.finish()
    followed.given = "8 blocks of 4; a with 8 + 2 tokens is done; b comes with the same prompt"
    followed.add("b", range(1, 9), 2)
    followed.step()
    expect.equal(followed.plan[0][1:3], ([5, 6, 7, 8], 4), f"{followed.given}: (new, start) of b")
    followed.finish()


@ENGINE_STEP.check(
    "a block that was found is held before new ones are taken",
    hint="share() the hits at once: until then they are free, and append() may be given one of them",
)
def held_first(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 10), 1)}, 3)
    followed.finish()
    followed.given = (
        "3 blocks of 4; a with 9 + 1 tokens is done; b begins with its first 4 tokens, 11 + 1 in all"
    )
    followed.add("b", [1, 2, 3, 4, *range(60, 67)], 1)
    followed.finish()


@ENGINE_STEP.check(
    "a beginning that two requests share is stored once",
    hint="blocks of a request that still runs are found, too: they are published in update(), not at its end",
)
def stored_once(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 11), 8)}, 9)
    followed.step()
    followed.given = "9 blocks of 4; a with 10 + 8 tokens has run one step; b comes with the same prompt"
    followed.add("b", range(1, 11), 5)
    followed.step()
    (*_, first), (*_, second) = followed.plan
    expect.equal(second[:2], first[:2], f"{followed.given}: the first two blocks of b are those of a")
    expect.equal(len({*first, *second}), 4, f"{followed.given}: different blocks in use")
    followed.finish()


@ENGINE_STEP.check(
    "who gives way gives back everything",
    hint="a name that has blocks and is not among those of step() gave way: give its blocks back first, then "
    "go over the names of the step",
)
def gives_way(learner: Learner, expect: Expect) -> None:
    jobs = {name: (range(first, first + 3), 9) for name, first in zip("abcd", (1, 20, 40, 60), strict=True)}
    followed = start(learner, expect, jobs, 4)
    followed.step()
    followed.step()
    expect.equal(
        [entry[0] for entry in followed.plan], ["a", "b"], f"{followed.given}: names in the second step"
    )
    followed.finish()


@ENGINE_STEP.check(
    "who comes back finds the blocks that nobody needed meanwhile",
    hint="tokens and hashes are looked up anew whenever a request starts, with the part of the answer it has",
)
def comes_back(learner: Learner, expect: Expect) -> None:
    followed = start(learner, expect, {"a": (range(1, 5), 4), "b": (range(20, 27), 6)}, 4)
    starts = []
    while followed.is_busy:
        followed.step()
        starts += [first for name, new, first, _ in followed.plan if name == "b" and len(new) > 1]
    given = f"{followed.given}: start of b whenever it computes more than one token"
    expect.equal(starts, [0, 4], f"{given}: b gives way once, and its first block is still there")


@ENGINE_STEP.check(
    "nothing is lost or mixed up in random request mixes",
    hint="follow the request and the block that are named from one step to the next",
)
def random_mixes(learner: Learner, expect: Expect) -> None:
    for seed in range(8):
        source = random.Random(seed)
        num_blocks, size, most = source.randint(4, 9), source.randint(1, 4), source.randint(2, 5)
        followed = start(learner, expect, {}, num_blocks, size=size, most=most)
        followed.given = f"seed {seed}: {num_blocks} blocks of {size}, {most} at once at most"
        texts = [[source.randint(1, 9) for _ in range(num_blocks * size)] for _ in range(2)]
        for number in range(24):
            if source.random() < 0.4:
                prompt = source.randint(1, num_blocks * size - 1)
                output = source.randint(1, min(6, num_blocks * size - prompt))
                text = source.choice(texts)[:prompt]
                text[-1] = source.randint(1, 3)
                followed.add(f"r{number}", text, output)
            if followed.is_busy:
                followed.step()
        followed.finish()


@cache
def model() -> Any:
    """SmolLM2 in float32, in which two right ways to compute agree token for token."""
    import torch

    from minipaged.checkpoints.loading import load_model

    return load_model("smollm2-135m", dtype=torch.float32, device="cpu")


def prompts() -> dict[str, list[int]]:
    encode = model().tokenizer.encode
    return {f"q{number}": encode(f"{SYSTEM} {text}") for number, text in enumerate(QUESTIONS)}


@cache
def reference() -> dict[str, list[int]]:
    """What the course's engine answers."""
    from minipaged import LLM, SamplingParams

    llm = LLM(model(), device="cpu", num_blocks=24, block_size=BLOCK_SIZE, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts().values()]
    outputs = llm.generate(given, params, use_tqdm=False)
    return {name: list(out.outputs[0].token_ids) for name, out in zip(prompts(), outputs, strict=True)}


def rows_of(plan: Sequence[Entry], block_size: int) -> Any:
    """What my_batch is asked for."""
    width = max(len(blocks) for *_, blocks in plan)
    places = [
        (token, at, blocks) for _, new, first, blocks in plan for at, token in enumerate(new, start=first)
    ]
    return (
        [token for token, _, _ in places],
        [at for _, at, _ in places],
        [blocks[at // block_size] * block_size + at % block_size for _, at, blocks in places],
        [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in places],
        [at + 1 for _, at, _ in places],
    )


@ENGINE_STEP.check(
    "SmolLM2 says what it says in the course's engine",
    hint="right for numbers but not here: does something depend on short prompts, small token ids or names?",
    seconds=60,
)
def smollm2(learner: Learner, expect: Expect) -> None:
    from coursekit.capstone import Runner

    given = f"three questions after one system prompt, 8 blocks of {BLOCK_SIZE}, and the model's own tokens"
    followed = Followed(learner, expect, 8, BLOCK_SIZE, 8, given)
    runner = Runner(model(), 8, BLOCK_SIZE)
    for name, prompt in prompts().items():
        followed.add(name, prompt, NEW_TOKENS)
    while followed.is_busy:
        followed.step(lambda plan: runner.next_tokens(plan, rows_of(plan, BLOCK_SIZE)))
    got = {name: followed.tokens[name][len(prompt) :] for name, prompt in prompts().items()}
    expect.equal(got, reference(), f"{given}: the answers")


@ENGINE_BATCH.check(
    "a step that decodes: one row for each request",
    hint="a row has the token, its position, its slot blocks[p // block_size] * block_size + p % block_size, "
    "the request's blocks, and how many tokens it sees: itself and all before it",
)
def decodes(learner: Learner, expect: Expect) -> None:
    compare(learner, expect, [("a", [42], 10, [7, 1, 2])], 4)
    compare(learner, expect, [("a", [42], 4, [2, 0]), ("b", [43], 7, [1, 3])], 4)
    compare(learner, expect, [("a", [9], 0, [3])], 1)


@ENGINE_BATCH.check(
    "a prompt: a row for each token, which sees itself and those before it",
    hint="all rows of a request have its table, but each its own position, slot and context length: the row "
    "at position p sees p + 1 tokens, and so no row sees the future",
)
def prompts_too(learner: Learner, expect: Expect) -> None:
    compare(learner, expect, [("a", [11, 12, 13, 14, 15], 0, [3, 1])], 4)
    compare(learner, expect, [("a", [11, 12, 13], 4, [5, 2])], 4)
    compare(learner, expect, [("a", list(range(30, 39)), 8, [5, 2, 0, 4, 1])], 4)


@ENGINE_BATCH.check(
    "tables of different lengths are filled up with 0",
    hint="a kernel steps from row to row by one stride, so all tables are as long as the longest; what fills "
    "them up is never read",
)
def filled_up(learner: Learner, expect: Expect) -> None:
    plan = [("a", [42], 10, [6, 1, 2]), ("b", [7, 8], 0, [5]), ("c", [9], 4, [3, 4])]
    compare(learner, expect, plan, 4)
    compare(learner, expect, [plan[1], plan[0]], 4)


@ENGINE_BATCH.check(
    "the plan is not changed",
    hint="blocks + [0] * n makes a new list; blocks += or .append changes the request's own table",
)
def plan_is_kept(learner: Learner, expect: Expect) -> None:
    plan = [("a", [42], 10, [6, 1, 2]), ("b", [7, 8], 0, [5])]
    mine = learner.keep(plan)
    learner.my_batch(mine, 4)
    expect.equal(learner.fetch(mine), plan, f"the plan after my_batch({plan}, 4)")


@ENGINE_BATCH.check(
    "any plan",
    hint="the lists stand in the order of the plan, and of the tokens in it",
)
def any_plan(learner: Learner, expect: Expect) -> None:
    source = random.Random(12)
    for _ in range(12):
        size = source.randint(1, 5)
        plan = []
        for number in range(source.randint(1, 5)):
            first, count = source.randint(0, 12), source.randint(1, 6)
            blocks = source.sample(range(40), -(-(first + count) // size))
            plan.append((f"r{number}", [source.randint(0, 99) for _ in range(count)], first, blocks))
        compare(learner, expect, plan, size)


NAMES = ("token_ids", "positions", "slots", "block_tables", "context_lens")


def compare(learner: Learner, expect: Expect, plan: list[Entry], size: int) -> None:
    """The five lists of the learner's, each beside what was expected."""
    given = f"my_batch({plan}, {size})"
    got, wanted = learner.my_batch(plan, size), rows_of(plan, size)
    is_five = isinstance(got, list | tuple) and len(got) == 5
    expect.true(is_five, given, f"five lists: {', '.join(NAMES)}", got)
    for name, mine, right in zip(NAMES, got, wanted, strict=True):
        expect.equal(mine, right, f"{given}: {name}")
