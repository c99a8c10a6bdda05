"""The graders of exercise 11 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

SCHEDULER_STEP = Proof(
    task="scheduler_step",
    second='''
from dataclasses import dataclass

@dataclass
class Job:
    name: str
    tokens: int
    last: int

class MyScheduler:
    """One line of jobs in the order of arrival, of which the first few run: a step only moves that border."""

    def __init__(self, num_blocks, block_size, max_running):
        self.num_blocks, self.block_size, self.max_running = num_blocks, block_size, max_running
        self.line, self.border = [], 0

    running = property(lambda self: [job.name for job in self.line[: self.border]])
    waiting = property(lambda self: [job.name for job in self.line[self.border :]])

    @property
    def num_free(self):
        return self.num_blocks - self.blocks(self.border, 0)

    def blocks(self, count, more):
        return sum(-(-(job.tokens + more) // self.block_size) for job in self.line[:count])

    def add(self, name, prompt, output):
        if prompt + output > self.num_blocks * self.block_size:
            raise ValueError(name)
        self.line.append(Job(name, prompt, prompt + output))

    def step(self):
        while self.blocks(self.border, 1) > self.num_blocks:
            self.border -= 1
        most = min(self.max_running, len(self.line))
        while self.border < most and self.blocks(self.border + 1, 1) <= self.num_blocks:
            self.border += 1
        served = self.running
        for job in self.line[: self.border]:
            job.tokens += 1
        done = [job for job in self.line[: self.border] if job.tokens == job.last]
        self.line = [job for job in self.line if job not in done]
        self.border -= len(done)
        return served
''',
    wrong=[
        Wrong(
            "queues what can never run",
            "a request that can never run is refused",
            replace=("if needed > self.num_blocks:", "if False:"),
        ),
        Wrong(
            "looks at the prompt only",
            "a request that can never run is refused",
            replace=("needed = -(-(prompt + output) //", "needed = -(-prompt //"),
        ),
        Wrong(
            "refuses what exactly fits",
            "a request that can never run is refused",
            replace=("if needed > self.num_blocks:", "if needed >= self.num_blocks:"),
        ),
        Wrong(
            "lets short ones overtake",
            "requests start in the order",
            replace=(
                "                break\n            self.running.append(self.waiting.pop(0))\n",
                "                fitting = [n for n in self.waiting if self.missing(n) <= self.num_free]\n"
                "                if not fitting:\n"
                "                    break\n"
                "                self.waiting.remove(fitting[0])\n"
                "                self.waiting.insert(0, fitting[0])\n"
                "            self.running.append(self.waiting.pop(0))\n",
            ),
        ),
        Wrong(
            "the oldest gives way",
            "when a block is missing, the youngest gives way",
            replace=("youngest = self.running.pop()", "youngest = self.running.pop(0)"),
        ),
        Wrong(
            "sends it to the end of the queue",
            "when a block is missing, the youngest gives way",
            replace=("self.waiting.insert(0, youngest)", "self.waiting.append(youngest)"),
        ),
        Wrong(
            "gives way and keeps its blocks",
            "when a block is missing, the youngest gives way",
            replace=("                self.release(youngest)\n", ""),
        ),
        Wrong(
            "forgets the last token of who gave way",
            "who gave way loses no token and gets none twice",
            replace=(
                "                self.release(youngest)\n",
                "                self.release(youngest)\n                self.tokens[youngest] -= 1\n",
            ),
        ),
        Wrong(
            "keeps the blocks of who is done",
            "a request that can never run is refused",
            replace=(
                "                self.release(name)\n                self.running.remove",
                "                self.running.remove",
            ),
        ),
    ],
)

PROOFS = [SCHEDULER_STEP]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
