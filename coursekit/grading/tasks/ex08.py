"""Exercise 08: the corner of the causal mask, and a prompt computed in pieces."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from coursekit.given.tiny_model import TinyModel
from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import difference, several

SETUP = "import torch\nfrom coursekit.given.tiny_model import TinyModel"

CHUNK_MASK = Task(
    name="chunk_mask",
    exercise="08",
    title="The corner of the mask",
    points=2,
    defines=("my_chunk_mask",),
    preamble=SETUP,
)

CHUNKED_PREFILL = Task(
    name="chunked_prefill",
    exercise="08",
    title="A prompt in pieces",
    points=5,
    defines=("my_chunked_prefill",),
    preamble=SETUP,
    needs=("chunk_mask",),
)

TASKS = [CHUNK_MASK, CHUNKED_PREFILL]


def expect_mask(learner: Learner, expect: Expect, num_queries: int, num_keys: int) -> None:
    """Query i stands at position num_keys - num_queries + i and sees the keys at positions up to there."""
    wanted = [[key - i <= num_keys - num_queries for key in range(num_keys)] for i in range(num_queries)]
    got = learner.my_chunk_mask(num_queries, num_keys)
    expect.equal(
        got, wanted, f"my_chunk_mask({num_queries}, {num_keys}): {num_queries} queries, {num_keys} keys"
    )


@CHUNK_MASK.check(
    "a whole prompt: each token sees itself and what stands before it",
    hint="row i is true for the keys 0 … i: a token also sees itself, and True means that a key is seen",
)
def whole_prompt(learner: Learner, expect: Expect) -> None:
    for length in (3, 1, 2, 7):
        expect_mask(learner, expect, length, length)


@CHUNK_MASK.check(
    "more keys than queries: the last query stands at the last key",
    hint="the queries are the last tokens: query i stands at position num_keys - num_queries + i, not at i",
)
def more_keys(learner: Learner, expect: Expect) -> None:
    for num_queries, num_keys in [(2, 5), (3, 4), (4, 8), (1, 6), (5, 17)]:
        expect_mask(learner, expect, num_queries, num_keys)


@CHUNK_MASK.check(
    "more queries than keys: the first rows see nothing",
    hint="their position is before the first key; a slice mask[i, :n] with a negative n counts from the end",
)
def more_queries(learner: Learner, expect: Expect) -> None:
    for num_queries, num_keys in [(4, 2), (2, 1), (9, 3), (3, 0)]:
        expect_mask(learner, expect, num_queries, num_keys)


def at_once(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Without a cache: the last token's logits [32]; keys and values [layers, 2, n, 2, 8] of all tokens."""
    model, stored = TinyModel(), []
    hidden, positions = model.embed(torch.tensor(tokens)), torch.arange(len(tokens))
    for layer in range(model.num_layers):
        query, key, value = model.project(layer, hidden, positions)
        mask = torch.ones(len(tokens), len(tokens)).tril()
        hidden = model.finish(layer, hidden, model.attend(query, key, value, mask))
        stored.append(torch.stack([key, value]))
    return model.logits(hidden[-1]), torch.stack(stored)


class Prompt:
    """A prompt, scattered slots for it in a cache full of NaN, and what the learner made of it."""

    def __init__(self, learner: Learner, chunk_lens: Sequence[int]) -> None:
        length = sum(chunk_lens)
        source = random.Random(length)
        self.tokens = [source.randrange(TinyModel.vocab_size) for _ in range(length)]
        self.slots = torch.tensor(source.sample(range(length + 6), length))
        shape = TinyModel.num_layers, 2, length + 6, TinyModel.num_kv_heads, TinyModel.head_size
        self.given = f"a prompt of {several(length, 'token')} in chunks of {list(chunk_lens)}"
        model, cache = learner.TinyModel(), learner.keep(torch.full(shape, torch.nan))
        self.got = learner.my_chunked_prefill(
            model, torch.tensor(self.tokens), list(chunk_lens), cache, self.slots
        )
        self.cache, self.steps = learner.fetch(cache), model.steps


READING = (
    "what the first layer has written is right, so look at what is read: slots[:stop], in the order of the "
)
READING += "text as the mask has it, and at the end the logits of the last token only, [32]"
OTHERS = "the slots of other texts are in the same cache: nothing but slots[start:stop] is written"


@CHUNKED_PREFILL.check(
    "a prompt in one piece",
    hint="in every layer: write the keys and values to the tokens' slots, read those of all tokens so far "
    "from their slots, attend; at the end the logits of the last token only",
)
def one_piece(learner: Learner, expect: Expect) -> None:
    for length in (1, 6, 12):
        prompt = Prompt(learner, [length])
        logits, stored = at_once(prompt.tokens)
        is_written = not difference(prompt.cache[0][:, prompt.slots], stored[0], 1e-4)
        given = f"{prompt.given}, slots {prompt.slots.tolist()}: logits"
        expect.close(prompt.got, logits, given, tolerance=1e-4, hint=READING if is_written else "")


@CHUNKED_PREFILL.check(
    "keys and values are in the slots of their tokens, and nowhere else",
    hint="cache[layer, 0] has the keys of a layer, cache[layer, 1] its values; a chunk has slots[start:stop]",
)
def in_the_cache(learner: Learner, expect: Expect) -> None:
    prompt = Prompt(learner, [8])
    expect.true(prompt.cache.ndim == 5, prompt.given, "the cache", prompt.cache)
    wanted = at_once(prompt.tokens)[1]
    for layer in range(TinyModel.num_layers):
        for kind, name in enumerate(["keys", "values"]):
            rows = prompt.cache[layer, kind]
            given = f"{prompt.given}, slots {prompt.slots.tolist()}: {name} of layer {layer}"
            expect.close(rows[prompt.slots], wanted[layer, kind], given, tolerance=1e-4)
            untouched = sorted(set(range(len(rows))) - set(prompt.slots.tolist()))
            changed = [slot for slot in untouched if not rows[slot].isnan().all()]
            expect.true(
                not changed, given, f"nothing in slots {untouched}", f"numbers in {changed}", hint=OTHERS
            )


@CHUNKED_PREFILL.check(
    "in pieces the same as at once",
    hint="a chunk's tokens stand at positions start … stop - 1, and its queries see all stop keys so far, "
    "the earlier ones from the cache: each layer has keys and values of its own",
)
def in_pieces(learner: Learner, expect: Expect) -> None:
    source = random.Random(8)
    cuts = [[4, 4, 2], [1] * 10, [9, 1], [1, 9], [3, 5, 4, 4]]
    cuts += [[source.randint(1, 6) for _ in range(4)] for _ in range(4)]
    for chunk_lens in cuts:
        prompt = Prompt(learner, chunk_lens)
        logits, stored = at_once(prompt.tokens)
        expect.close(prompt.got, logits, f"{prompt.given}: logits of the last token", tolerance=1e-4)
        in_slots = prompt.cache[:, :, prompt.slots]
        expect.close(in_slots, stored, f"{prompt.given}: keys and values in the slots", tolerance=1e-4)


@CHUNKED_PREFILL.check(
    "each token goes through the model once, with its chunk",
    hint="what an earlier chunk has computed is in the cache: embed tokens[start:stop], and nothing else",
)
def once(learner: Learner, expect: Expect) -> None:
    for chunk_lens in ([5, 5, 5], [1, 2, 3, 4]):
        prompt = Prompt(learner, chunk_lens)
        expect.equal(prompt.steps, chunk_lens, f"{prompt.given}: tokens that went through the model, by step")
