"""The grader of exercise 05 finds what it is there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

ONLINE = '''
import math

def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
    """Block by block with a running maximum and sum; KV heads in an axis of their own; float64."""
    num_seqs, num_heads, head_size = query.shape
    block_size, kv_heads = key_cache.size(1), key_cache.size(2)
    q = query.double().reshape(num_seqs, kv_heads, -1, head_size) / math.sqrt(head_size)
    answers = []
    for seq in range(num_seqs):
        largest = torch.full(q.shape[1:3], -math.inf, dtype=torch.float64)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q[seq])
        left, entry = int(context_lens[seq]), 0
        while left > 0:
            block, count = int(block_tables[seq, entry]), min(left, block_size)
            keys = key_cache[block, :count].double().permute(1, 2, 0)
            values = value_cache[block, :count].double().transpose(0, 1)
            scores = q[seq] @ keys
            new = torch.maximum(largest, scores.amax(-1))
            weights, old = torch.exp(scores - new[..., None]), torch.exp(largest - new)
            total = total * old + weights.sum(-1)
            summed = summed * old[..., None] + weights @ values
            largest, left, entry = new, left - count, entry + 1
        answers.append((summed / total.clamp(min=1e-300)[..., None]).reshape(num_heads, head_size))
    return torch.stack(answers).float()
'''

BATCHED = '''
def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
    """All sequences in one product, padded to the longest."""
    block_size, kv_heads = key_cache.shape[1:3]
    positions = torch.arange(max(1, int(context_lens.max())))
    visible = positions < context_lens[:, None]
    blocks = block_tables[:, positions // block_size].long().where(visible, torch.tensor(0))
    slots = blocks * block_size + positions % block_size
    keys, values = key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]
    values = values.masked_fill(~visible[:, :, None, None], 0)
    group = query.shape[1] // kv_heads
    keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)
    scores = torch.einsum("nhd,nkhd->nhk", query, keys) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)
    return torch.einsum("nhk,nkhd->nhd", weights, values)
'''


def batched(old: str, new: str) -> str:
    assert BATCHED.count(old) == 1, old
    return BATCHED.replace(old, new)


PAGED_ATTENTION = Proof(
    task="paged_attention",
    second=ONLINE,
    wrong=[
        Wrong(
            "reads nothing of a last block that is full",
            "averages the values of all tokens",
            replace=(
                "p = torch.arange(length)",
                "p = torch.arange(length - block_size * (length % block_size == 0))",
            ),
        ),
        Wrong(
            "reads whole blocks without a mask",
            "averages the values of all tokens",
            replace=("torch.arange(length)", "torch.arange(-(-length // block_size) * block_size)"),
        ),
        Wrong(
            "leaves out the newest token",
            "averages the values of all tokens",
            replace=("torch.arange(length)", "torch.arange(length - 1)"),
        ),
        Wrong(
            "does not scale",
            "weights are the softmax of scores divided",
            replace=(" / head_size**0.5", ""),
        ),
        Wrong(
            "scales by the head size padded to a power of two",
            "weights are the softmax of scores divided",
            replace=("head_size**0.5", "(1 << (head_size - 1).bit_length()) ** 0.5"),
        ),
        Wrong(
            "takes the position in the table for the block",
            "finds block p // block_size",
            replace=("block_tables[i, p // block_size] * block_size", "p // block_size * block_size"),
        ),
        Wrong(
            "takes query head h to KV head h modulo their number",
            "query head h reads KV head",
            source=batched(
                "keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)",
                "keys, values = keys.repeat(1, 1, group, 1), values.repeat(1, 1, group, 1)",
            ),
        ),
        Wrong(
            "uses the table of the first sequence for all",
            "each sequence of a batch",
            replace=("block_tables[i, ", "block_tables[0, "),
        ),
        Wrong(
            "takes the longest context for all",
            "each sequence of a batch",
            source=batched(
                "visible = positions < context_lens[:, None]",
                "visible = positions < context_lens.max()[None, None].expand(len(query), 1)",
            ),
        ),
        Wrong(
            "masks scores and not values",
            "what lies in unused slots does not matter",
            source=batched(
                "slots = blocks * block_size",
                "slots = block_tables[:, positions // block_size].long() * block_size",
            ).replace("    values = values.masked_fill(~visible[:, :, None, None], 0)\n", ""),
        ),
        Wrong(
            "adds minus infinity to scores",
            "what lies in unused slots does not matter",
            source=batched(
                "slots = blocks * block_size",
                "slots = block_tables[:, positions // block_size].long() * block_size",
            )
            .replace(
                "scores.masked_fill(~visible[:, None], -torch.inf)",
                "scores + torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[:, None]",
            )
            .replace(".nan_to_num(0)", ""),
        ),
        Wrong(
            "cleans the cache in place",
            "what lies in unused slots does not matter",
            source=batched(
                "    block_size, kv_heads",
                "    key_cache.nan_to_num_(0, 0, 0)\n    value_cache.nan_to_num_(0, 0, 0)\n"
                "    block_size, kv_heads",
            ),
        ),
        Wrong(
            "looks up the padding of a table",
            "padding of a table is never followed",
            source=batched(
                "slots = blocks * block_size",
                "slots = block_tables[:, positions // block_size].long() * block_size",
            ).replace(
                "scores = torch.einsum",
                "keys = keys.masked_fill(~visible[:, :, None, None], 0)\n    scores = torch.einsum",
            ),
        ),
        Wrong(
            "NaN for a sequence without tokens",
            "a sequence without tokens gives 0",
            source=batched(".nan_to_num(0)", ""),
        ),
        Wrong(
            "exp without taking off the largest",
            "large scores do not overflow",
            replace=("scores.softmax(dim=-1)", "scores.exp() / scores.exp().sum(dim=-1, keepdim=True)"),
        ),
    ],
)

PROOFS = [PAGED_ATTENTION]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()


def test_a_batch_in_one_product_is_right_too():
    assert PAGED_ATTENTION.grade(BATCHED).passed
