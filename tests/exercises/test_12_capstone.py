"""The graders of the last exercise find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

ENGINE_STEP = Proof(
    task="engine_step",
    second='''
from types import SimpleNamespace as Row


class MyEngine:
    """One row for each request that runs; its own hashes grow with its text."""

    def __init__(self, num_blocks, block_size, max_running):
        self.size = block_size
        self.scheduler = MyScheduler(num_blocks, block_size, max_running)
        self.cache = MyPrefixCache(num_blocks)
        self.text, self.rows = {}, {}

    def add(self, name, prompt, output):
        self.scheduler.add(name, len(prompt), output)
        self.text[name] = [*prompt]

    def start(self, text):
        usable = (len(text) - 1) // self.size
        hits = self.cache.lookup(my_block_hashes(text, self.size)[:usable])
        self.cache.share(hits)
        return Row(hits=hits, table=MyBlockTable(self.cache, self.size), done=len(hits) * self.size)

    def stop(self, row):
        row.table.free()
        self.cache.free(row.hits[::-1])

    def schedule(self):
        names = self.scheduler.step()
        for name in set(self.rows).difference(names):
            self.stop(self.rows.pop(name))
        plan = []
        for name in names:
            text = self.text[name]
            row = self.rows.get(name) or self.rows.setdefault(name, self.start(text))
            assert row.table.append(len(text) - row.done), "the scheduler has counted"
            plan.append((name, text[row.done :], row.done, row.hits + row.table.blocks))
            row.done = len(text)
        return plan

    def update(self, sampled):
        for name in sampled:
            row, text = self.rows[name], self.text[name]
            keys = my_block_hashes(text, self.size)
            for i in range(len(row.hits), len(keys)):
                self.cache.publish(row.table.blocks[i - len(row.hits)], keys[i])
            text.append(sampled[name])
        for name in [name for name in self.rows if name not in self.scheduler.running]:
            self.stop(self.rows.pop(name))
''',
    wrong=[
        Wrong(
            "looks up every full block",
            "at least the last token is computed",
            replace=(
                "my_block_hashes(tokens[:-1], self.block_size)",
                "my_block_hashes(tokens, self.block_size)",
            ),
        ),
        Wrong(
            "never looks anything up",
            "a request starts with the blocks that are known",
            replace=("self.cache.lookup(my_block_hashes(tokens[:-1], self.block_size))", "[]"),
        ),
        Wrong(
            "publishes when a request is done",
            "a beginning that two requests share",
            replace=(
                "                self.cache.publish(block, key)\n",
                "                if name not in self.scheduler.running:\n"
                "                    self.cache.publish(block, key)\n",
            ),
        ),
        Wrong(
            "takes blocks before it holds the hits",
            "a block that was found is held before",
            replace=(
                """                self.cache.share(self.hits[name])
                self.tables[name] = MyBlockTable(self.cache, self.block_size)
""",
                """                self.tables[name] = MyBlockTable(self.cache, self.block_size)
                self.tables[name].append(len(tokens) - len(self.hits[name]) * self.block_size)
                self.tables[name].append = lambda n, append=self.tables[name].append: n > 1 or append(n)
                self.cache.share(self.hits[name])
""",
            ),
        ),
        Wrong(
            "never holds the hits",
            "a request starts with the blocks that are known",
            replace=("                self.cache.share(self.hits[name])\n", ""),
        ),
        Wrong(
            "keeps the blocks of who gave way",
            "who gives way gives back everything",
            replace=(
                "            self.leave(name)\n        plan = []",
                "            self.tables.pop(name)\n        plan = []",
            ),
        ),
        Wrong(
            "keeps the hits of who leaves",
            "a request starts with the blocks that are known",
            replace=("self.cache.free(self.hits.pop(name))", "self.hits.pop(name)"),
        ),
        Wrong(
            "does not notice who is done",
            "a request alone computes its prompt",
            replace=("if name not in self.scheduler.running:", "if name not in self.tables:"),
        ),
        Wrong(
            "adds the token before it publishes",
            "a block is published only when all its tokens are stored",
            replace=(
                "my_block_hashes(tokens, self.block_size)):",
                "my_block_hashes(tokens + [token], self.block_size)):",
            ),
        ),
        Wrong(
            "computes the whole text in every step",
            "a request alone computes its prompt",
            replace=("tokens[start:], start, self.blocks(name)", "tokens, 0, self.blocks(name)"),
        ),
        Wrong(
            "the hits stand after the table's own blocks",
            "a request starts with the blocks that are known",
            replace=(
                "return [*self.hits[name], *self.tables[name].blocks]",
                "return [*self.tables[name].blocks, *self.hits[name]]",
            ),
        ),
        Wrong(
            "counts the sampled token as stored",
            "a request alone computes its prompt",
            replace=("self.stored[name] = len(tokens)\n", "self.stored[name] = len(tokens) + 1\n"),
        ),
        Wrong(
            "hashes blocks without their past",
            "nothing is lost or mixed up|every request reads its own|a request starts",
            replace=(
                "zip(self.blocks(name), my_block_hashes(tokens, self.block_size))",
                "zip(self.blocks(name)[1:], my_block_hashes(tokens[self.block_size :], self.block_size))",
            ),
        ),
    ],
)

ENGINE_BATCH = Proof(
    task="engine_batch",
    second='''
import numpy as np


def my_batch(plan, block_size):
    """Arrays, request by request."""
    longest = max(len(entry[3]) for entry in plan)
    parts = []
    for _, new, start, blocks in plan:
        at = np.arange(start, start + len(new))
        table = np.zeros(longest, dtype=int)
        table[: len(blocks)] = blocks
        slots = table[at // block_size] * block_size + at % block_size
        parts.append((new, at, slots, [table] * len(new), at + 1))
    return tuple(np.concatenate(part) for part in zip(*parts))
''',
    wrong=[
        Wrong(
            "positions count from 0 in every step",
            "a step that decodes",
            replace=("enumerate(new, start)", "enumerate(new)"),
        ),
        Wrong(
            "a row does not see itself",
            "a step that decodes",
            replace=("context_lens.append(position + 1)", "context_lens.append(position)"),
        ),
        Wrong(
            "every row of a prompt sees all of it",
            "a prompt: a row for each token",
            replace=("context_lens.append(position + 1)", "context_lens.append(start + len(new))"),
        ),
        Wrong(
            "the slot in a pool that starts with this table",
            "a step that decodes",
            replace=(
                "slots.append(blocks[position // block_size] * block_size + position % block_size)",
                "slots.append(position)",
            ),
        ),
        Wrong(
            "one table for each request",
            "a prompt: a row for each token",
            replace=(
                "            block_tables.append(list(blocks) +",
                "            if position == start:\n                block_tables.append(list(blocks) +",
            ),
        ),
        Wrong(
            "tables of their own lengths",
            "tables of different lengths",
            replace=("list(blocks) + [0] * (longest - len(blocks))", "list(blocks)"),
        ),
        Wrong(
            "filled up in front",
            "tables of different lengths",
            replace=(
                "list(blocks) + [0] * (longest - len(blocks))",
                "[0] * (longest - len(blocks)) + list(blocks)",
            ),
        ),
        Wrong(
            "fills up the request's own list",
            "the plan is not changed",
            replace=(
                "        for position, token in enumerate(new, start):\n",
                "        blocks.extend([0] * (longest - len(blocks)))\n"
                "        for position, token in enumerate(new, start):\n",
            ),
        ),
        Wrong(
            "all tables as long as the first",
            "tables of different lengths|any plan",
            replace=(
                "max(len(blocks) for _, _, _, blocks in plan)",
                "len(plan[0][3])",
            ),
        ),
        Wrong(
            "decodes first, prompts after them",
            "any plan|tables of different lengths",
            replace=("in plan:\n", "in sorted(plan, key=lambda entry: len(entry[1])):\n"),
        ),
    ],
)

PROOFS = [ENGINE_STEP, ENGINE_BATCH]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    """Slow: SmolLM2 computes what the right answers plan, in float32."""
    proof.check()
