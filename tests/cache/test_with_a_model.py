"""Sharing, copying and swapping blocks under a real forward pass: logits are those of a cold run."""

import pytest
import torch

from minipaged.attention import get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import BlockPool, BlockTable, KVStorage, SwapSpace, append_all, hash_blocks, usable_hits
from minipaged.memory import KVSpec
from minipaged.model.tiny import random_llama

BLOCK_SIZE = 4
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93]


class Server:
    """A tiny random Llama in float32 on a pool whose memory is NaN until it is written."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.model = random_llama(seed=1)
        self.pool = BlockPool(num_blocks)
        self.storage = KVStorage(KVSpec.from_model(self.model.config, torch.float32), num_blocks, BLOCK_SIZE)
        for tensor in self.storage.tensors:
            tensor.fill_(torch.nan)
        self.backend = get_backend("torch")

    def forward(self, work: list[tuple[BlockTable, list[int]]]) -> list[torch.Tensor]:
        """Compute the last tokens of several tables in one step: for each, logits [num_tokens, vocab]."""
        lengths = [len(tokens) for _, tokens in work]
        tables = [table for table, _ in work]
        batch = AttentionBatch.build(
            [table.blocks for table in tables], lengths, [table.num_tokens for table in tables], BLOCK_SIZE
        )
        token_ids = torch.tensor([token for _, tokens in work for token in tokens])
        hidden = self.model(token_ids, batch, self.storage, self.backend)
        return list(self.model.compute_logits(hidden).split(lengths))

    def admit(self, tokens: list[int]) -> tuple[BlockTable, list[int]]:
        """A table for a prompt, and what is left of it to compute."""
        names = hash_blocks(tokens, BLOCK_SIZE)
        hits = self.pool.lookup(names[: usable_hits(len(tokens), BLOCK_SIZE)])
        table = BlockTable(self.pool, BLOCK_SIZE)
        assert table.begin(hits, len(tokens))
        return table, tokens[len(hits) * BLOCK_SIZE :]

    def extend(self, tables: list[BlockTable], tokens: list[int]) -> list[torch.Tensor]:
        """One decode step: append a token to each table, copy what must be copied, compute."""
        copies = append_all(tables, [1] * len(tables))
        assert copies is not None
        self.storage.copy_blocks(copies)
        return self.forward([(table, [token]) for table, token in zip(tables, tokens, strict=True)])


def cold(tokens: list[int]) -> torch.Tensor:
    server = Server()
    (logits,) = server.forward([server.admit(tokens)])
    assert logits.isfinite().all()
    return logits


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("length", [8, 9, 10])
def test_a_hit_gives_the_logits_of_a_cold_run(length):
    """Positions go on after the cached keys, and those are attended to."""
    server = Server()
    tokens = PROMPT[:length]
    table, rest = server.admit(tokens)
    server.forward([(table, rest)])
    table.publish(hash_blocks(tokens, BLOCK_SIZE), length)
    for longer in (tokens, [*tokens, 7], [*tokens, 7, 7, 7, 7, 7]):
        other, rest = server.admit(longer)
        assert 0 < len(rest) <= len(longer) - 4
        (logits,) = server.forward([(other, rest)])
        assert_close(logits, cold(longer)[-len(rest) :])
        other.free()


def test_two_equal_prompts_in_one_batch_give_the_cold_logits():
    """The second attends to the keys of the first, not only to its own."""
    server = Server()
    work = [server.admit(PROMPT), server.admit(PROMPT)]
    assert [len(rest) for _, rest in work] == [10, 10]  # neither has computed anything yet
    for logits in server.forward(work):
        assert_close(logits, cold(PROMPT))


def test_forks_that_write_in_one_step_do_not_see_each_others_tokens():
    """The half-filled last block is copied before anybody writes to it."""
    server = Server()
    parent, rest = server.admit(PROMPT)
    server.forward([(parent, rest)])
    tables = [parent, parent.fork(), parent.fork()]
    histories = [list(PROMPT) for _ in tables]
    for step in range(7):
        tokens = [10 * step + i for i in range(3)]
        for history, token in zip(histories, tokens, strict=True):
            history.append(token)
        for logits, history in zip(server.extend(tables, tokens), histories, strict=True):
            assert_close(logits, cold(history)[-1:])
    assert len({table.blocks[0] for table in tables}) == 1
    server.pool.check_invariants(tables)


def test_a_swapped_family_goes_on_where_it_was():
    """Parent and child read the same from the tokens that they share, before the swap and after it."""
    server = Server(num_blocks=6)
    space = SwapSpace.create(server.pool, server.storage, 6)
    parent, rest = server.admit(PROMPT)
    server.forward([(parent, rest)])
    tables = [parent, parent.fork()]
    server.extend(tables, [1, 2])
    assert space.swap_out(tables)
    for tensor in server.storage.tensors:
        tensor.fill_(torch.nan)
    assert space.swap_in(tables)
    for logits, last in zip(server.extend(tables, [5, 6]), ([1, 5], [2, 6]), strict=True):
        assert_close(logits, cold([*PROMPT, *last])[-1:])
