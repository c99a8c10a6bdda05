"""Blocks in flight: what a step is about to compute can be shared by requests that enter in the same step.

Many requests with one new system prompt arrive together. When the second is admitted, the first one's chunk
is already planned, and in every layer a step writes the keys and values of all its tokens before any of its
queries reads. So the second may list the blocks that the first fills in this very step. They are computed
once, and nobody waits: to hold the others back until the blocks are published would waste the rest of the
step's budget, and would take rules for what is worth waiting for and for whoever waits in vain.

The names live as long as the planning of one step. The pool offers a block to later steps only once it has
been computed, so a step that fails leaves nothing to withdraw. (vLLM enters blocks into its index when it
allocates them, with the same effect within a step.)
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.engine.plan import StepPlan


class BlocksInFlight:
    """The blocks that the step of `plan` completes, by prefix hash; what is planned later counts as well.

    Nothing is looked at before a request lacks a block. Then it is each sequence of the plan once, and each
    block in flight, whose hash is needed after the step anyway.
    """

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self._plan = plan
        self._block_size = block_size
        self._num_noted = 0
        self._blocks: dict[bytes, int] = {}

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run from the start of `hashes` that this step completes."""
        blocks: list[int] = []
        if hashes:
            self._note_new_sequences()
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _note_new_sequences(self) -> None:
        first = self._num_noted
        self._num_noted = len(self._plan.sequences)
        added = zip(self._plan.sequences[first:], self._plan.query_lens[first:], strict=True)
        for sequence, query_len in added:
            stored, table = sequence.num_computed, sequence.table
            if stored % self._block_size + query_len >= self._block_size:  # completes a block
                hashes = sequence.hashes_of(stored + query_len, self._block_size)
                new = table.num_published  # the blocks before it can be found in the pool
                self._blocks.update(zip(hashes[new:], table.blocks[new:], strict=False))
