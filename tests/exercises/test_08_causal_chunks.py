"""The graders of exercise 08 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

CHUNK_MASK = Proof(
    task="chunk_mask",
    second='''
def my_chunk_mask(num_queries, num_keys):
    """Lists, row by row, counted from the last row backwards."""
    rows = []
    for behind in reversed(range(num_queries)):
        seen = max(num_keys - behind, 0)
        rows.append([True] * seen + [False] * (num_keys - seen))
    return rows
''',
    wrong=[
        Wrong(
            "aligned to the first key",
            "more keys than queries",
            replace=(" + num_keys - num_queries", ""),
        ),
        Wrong("does not see itself", "a whole prompt", replace=("key <= query", "key < query")),
        Wrong("true for what is hidden", "a whole prompt", replace=("key <= query", "key > query")),
        Wrong(
            "aligned to the first key, with decode as a special case",
            "more keys than queries",
            source="""
def my_chunk_mask(num_queries, num_keys):
    if num_queries == 1:
        return torch.ones(1, num_keys).bool()
    return torch.ones(num_queries, num_keys).tril().bool()
""",
        ),
        Wrong(
            "slices to a negative end",
            "more queries than keys",
            source="""
def my_chunk_mask(num_queries, num_keys):
    mask = torch.zeros(num_queries, num_keys).bool()
    for i in range(num_queries):
        mask[i, : num_keys - num_queries + i + 1] = True
    return mask
""",
        ),
        Wrong(
            "lets every query see a key, so that no softmax is empty",
            "more queries than keys",
            replace=("key <= query", "key <= query.clamp(min=0)"),
        ),
    ],
)

CHUNKED_PREFILL = Proof(
    task="chunked_prefill",
    second='''
from itertools import accumulate

def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    """Ends by prefix sums, a function for one layer, the mask from positions."""

    def through(layer, hidden, positions):
        query, *rows = model.project(layer, hidden, positions)
        for kind in (0, 1):
            for position, row in zip(positions.tolist(), rows[kind]):
                cache[layer, kind, int(slots[position])] = row
        seen = [int(slot) for slot in slots[: int(positions[-1]) + 1]]
        mask = torch.arange(len(seen)) <= positions[:, None]
        attended = model.attend(query, cache[layer][0][seen], cache[layer][1][seen], mask)
        return model.finish(layer, hidden, attended)

    ends = list(accumulate(chunk_lens))
    for first, end in zip([0, *ends], ends):
        state = model.embed(tokens[first:end])
        for layer in range(2):
            state = through(layer, state, torch.tensor(range(first, end)))
    return model.logits(state)[-1].tolist()
''',
    wrong=[
        Wrong(
            "begins the positions of every chunk at 0",
            "in pieces the same as at once",
            replace=("torch.arange(start, stop)", "torch.arange(length)"),
        ),
        Wrong(
            "attends to the chunk's own keys only",
            "in pieces the same as at once",
            replace=(
                "model.attend(query, keys, values, my_chunk_mask(length, stop))",
                "model.attend(query, key, value, my_chunk_mask(length, length))",
            ),
        ),
        Wrong(
            "masks from the first key",
            "in pieces the same as at once",
            replace=("my_chunk_mask(length, stop)", "torch.ones(length, stop).tril()"),
        ),
        Wrong(
            "computes everything again in each chunk",
            "each token goes through the model once",
            source="""
def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    stop = 0
    for length in chunk_lens:
        stop += length
        hidden = model.embed(tokens[:stop])
        for layer in range(2):
            query, key, value = model.project(layer, hidden, torch.arange(stop))
            cache[layer, 0, slots[:stop]], cache[layer, 1, slots[:stop]] = key, value
            attended = model.attend(query, key, value, my_chunk_mask(stop, stop))
            hidden = model.finish(layer, hidden, attended)
    return model.logits(hidden[-1])
""",
        ),
        Wrong(
            "computes the prompt at once",
            "each token goes through the model once",
            replace=("for length in chunk_lens:", "for length in [len(tokens)]:"),
        ),
        Wrong(
            "keeps one layer for all",
            "keys and values are in the slots of their tokens",
            replace=("    start = 0\n", "    cache = cache[:1].expand_as(cache)\n    start = 0\n"),
        ),
        Wrong(
            "gives the logits of every token of the last chunk",
            "a prompt in one piece",
            replace=("hidden[-1]", "hidden"),
        ),
        Wrong(
            "gives the logits behind the first chunk",
            "in pieces the same as at once",
            replace=("        start = stop\n", "        return model.logits(hidden[-1])\n"),
        ),
        Wrong(
            "takes positions for slots",
            "keys and values are in the slots of their tokens",
            source="""
def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    start = 0
    for length in chunk_lens:
        stop = start + length
        hidden = model.embed(tokens[start:stop])
        for layer in range(2):
            query, key, value = model.project(layer, hidden, torch.arange(start, stop))
            cache[layer, 0, start:stop], cache[layer, 1, start:stop] = key, value
            keys, values = cache[layer, :, :stop]
            mask = my_chunk_mask(length, stop)
            hidden = model.finish(layer, hidden, model.attend(query, keys, values, mask))
        start = stop
    return model.logits(hidden[-1])
""",
        ),
    ],
)

PROOFS = [CHUNK_MASK, CHUNKED_PREFILL]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_graders_tell_right_from_wrong(proof):
    proof.check()
