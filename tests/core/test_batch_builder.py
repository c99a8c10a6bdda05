"""The batch of a step says where each new token belongs, whatever its table holds beyond what is needed."""

from types import SimpleNamespace

import pytest
import torch

from minipaged.attention.batch import AttentionBatch
from minipaged.core.runner import BatchBuilder

BLOCK_SIZE = 4
# row, blocks, tokens computed before: a spare block, a last slot of a block, a first slot of one
SEQUENCES = [(2, [7, 3, 9, 1], 9), (0, [5], 3), (1, [8, 2], 4)]


def sequence(row: int, blocks: list[int], num_computed: int) -> SimpleNamespace:
    table = SimpleNamespace(blocks=blocks)
    tokens = list(range(100 * row, 100 * row + 50))
    return SimpleNamespace(row=row, row_blocks=0, table=table, num_computed=num_computed, tokens=tokens)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 1, 3], [3, 1, 2]])
def test_it_is_the_batch_that_plain_lists_describe(query_lens: list[int]) -> None:
    sequences = [sequence(*described) for described in SEQUENCES]
    for s, query_len in zip(sequences, query_lens, strict=True):
        s.tokens = s.tokens[: s.num_computed + query_len]
    plan = SimpleNamespace(requests=sequences, query_lens=query_lens)
    builder = BatchBuilder(4, 8, BLOCK_SIZE, torch.device("cpu"))
    for _ in range(2):  # the second time nothing of a table is new
        token_ids, batch = builder.build(plan)
        lens = [s.num_computed + n for s, n in zip(sequences, query_lens, strict=True)]
        expected = AttentionBatch.build([s.table.blocks for s in sequences], query_lens, lens, BLOCK_SIZE)
        for name in ("query_start", "context_lens", "slot_mapping", "positions"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        width = batch.block_tables.shape[1]
        assert torch.equal(batch.block_tables, expected.block_tables[:, :width])
        assert (batch.max_query_len, batch.max_context_len) == (max(query_lens), max(lens))
        assert token_ids.tolist() == [t for s in sequences for t in s.tokens[s.num_computed :]]
