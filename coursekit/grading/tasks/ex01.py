"""Exercise 01: what a cache saves, and attention that keeps keys and values."""

import random

import torch
from torch import Tensor

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import difference, plain, several

MULTIPLICATIONS = Task(
    name="multiplications",
    exercise="01",
    title="Multiplications saved",
    points=2,
    defines=("multiplications",),
    preamble="import torch\nfrom coursekit.given.rotary import rotate",
)

CACHED_ATTENTION = Task(
    name="cached_attention",
    exercise="01",
    title="A step with a cache",
    points=4,
    defines=("MyCachedAttention",),
    preamble="import torch\nfrom coursekit.given.rotary import rotate",
)

TASKS = [MULTIPLICATIONS, CACHED_ATTENTION]


def same_count(learner: Learner, expect: Expect, prompt: int, new: int, head_size: int) -> None:
    """Expected: one multiplication after the other, as each step would do them."""
    again = kept = 0
    for step in range(new):
        for query in range(prompt + step):
            row = sum(head_size for key in range(prompt + step) if key <= query)
            again += row
            kept += row if step == 0 or query == prompt + step - 1 else 0
    given = f"a prompt of {several(prompt, 'token')}, {new} new, head size {head_size}: (again, kept)"
    got = learner.multiplications(prompt, new, head_size)
    swapped = plain(got) == [kept, again] != [again, kept]
    expect.equal(
        got, (again, kept), given, hint="the pair is (again, kept), in this order" if swapped else ""
    )
    for name, number, wanted in zip(("again", "kept"), got, (again, kept), strict=True):
        expect.whole(number, wanted, f"{given}: {name}")


@MULTIPLICATIONS.check(
    "one step compares each token with itself and with those before it",
    hint="n tokens make a triangle of 1 + 2 + … + n comparisons, not a square; each comparison takes "
    "head_size multiplications; and one new token takes one step",
)
def first_step(learner: Learner, expect: Expect) -> None:
    for prompt, head_size in [(1, 1), (2, 1), (5, 1), (4, 8)]:
        same_count(learner, expect, prompt, 1, head_size)


@MULTIPLICATIONS.check(
    "a later step reads the text again, or compares its newest token with all",
    hint="the text is one token longer in each step; the newest token is compared with every key that is "
    "kept and with its own",
)
def later_steps(learner: Learner, expect: Expect) -> None:
    for prompt, new, head_size in [(1, 2, 1), (3, 2, 1), (3, 3, 2), (1, 9, 4)]:
        same_count(learner, expect, prompt, new, head_size)


@MULTIPLICATIONS.check(
    "without a step nothing is multiplied",
    hint="the prompt is read in the first step; with 0 new tokens there is none",
)
def no_step(learner: Learner, expect: Expect) -> None:
    same_count(learner, expect, 1, 0, 1)
    same_count(learner, expect, 7, 0, 64)


@MULTIPLICATIONS.check(
    "any prompt and any number of tokens",
    hint="try it with a drawing: rows are queries, columns are keys, one drawing for each step",
)
def any_text(learner: Learner, expect: Expect) -> None:
    source = random.Random(1)
    for _ in range(8):
        sizes = source.randrange(1, 60), source.randrange(1, 25), source.choice([16, 48, 64, 128])
        same_count(learner, expect, *sizes)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding as a product of complex numbers: x [tokens, heads, head_size] in float64."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = (
        torch.complex(*x.double().split(half, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def read_again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the whole text at once with a causal mask, in float64: as `query`."""
    tokens, query_heads, head_size = query.shape
    positions = torch.arange(tokens)
    q, k = turned(query, positions), turned(key, positions)
    output = torch.empty(query.shape, dtype=torch.float64)
    for head in range(query_heads):
        shared = head // (query_heads // key.shape[1])
        scores = q[:, head] @ k[:, shared].T / head_size**0.5
        scores = scores.where(torch.ones(tokens, tokens).tril().bool(), -torch.inf)
        output[:, head] = scores.softmax(-1) @ value[:, shared].double()
    return output


def text_of(
    tokens: int, heads: tuple[int, int], head_size: int, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries [tokens, heads[0], head_size], keys and values [tokens, heads[1], head_size]."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, heads[0], head_size, generator=generator)
    key, value = torch.randn(2, tokens, heads[1], head_size, generator=generator)
    return query, key, value


def same_steps(learner: Learner, expect: Expect, text: tuple[Tensor, Tensor, Tensor], what: str) -> None:
    """Every step of a new object answers what reading the text again would."""
    query, key, value = text
    wanted = read_again(*text)
    attention = learner.MyCachedAttention(key.shape[1], key.shape[2])
    heads = (
        several(query.shape[1], "query head") + f", {several(key.shape[1], 'KV head')} of size {key.shape[2]}"
    )
    for token in range(len(query)):
        got = attention.step(query[token], key[token], value[token])
        expect.close(got, wanted[token], f"{heads}, {what}: step of token {token}", tolerance=1e-5)


@CACHED_ATTENTION.check(
    "a step averages the values of all tokens so far, the new one too",
    hint="keep first, then attend: a token sees its own key and value, and everything kept before; "
    "values are kept as they come, not rotated",
)
def all_so_far(learner: Learner, expect: Expect) -> None:
    query, key, value = text_of(9, (1, 1), 4)
    same_steps(learner, expect, (torch.zeros_like(query), key, value), "queries of 0")


@CACHED_ATTENTION.check(
    "two texts have two caches",
    hint="what is kept belongs to the object: a list or tensor of the class, or a default argument, "
    "is shared by all texts",
)
def two_texts(learner: Learner, expect: Expect) -> None:
    objects = [learner.MyCachedAttention(1, 4) for _ in range(2)]
    texts = [text_of(4, (1, 1), 4, seed) for seed in (2, 3)]
    for token in range(4):
        for name, attention, (query, key, value) in zip("AB", objects, texts, strict=True):
            got = attention.step(0 * query[token], key[token], value[token])
            wanted = value[: token + 1].double().mean(0)
            given = f"texts A and B in turn, queries of 0: step of token {token} of {name}"
            expect.close(got, wanted, given)


@CACHED_ATTENTION.check(
    "weights are the softmax of scores divided by the root of the head size",
    hint="divide by the square root of head_size, and take the softmax over the tokens",
)
def softmax(learner: Learner, expect: Expect) -> None:
    for head_size in (64, 48):
        query, key, value = text_of(6, (1, 1), head_size)
        slowest = torch.zeros(head_size)
        slowest[head_size // 2 - 1] = 3.0  # turned so slowly that positions do not matter here
        same_steps(learner, expect, (query * slowest, key * slowest, value), "hardly any rotation")


@CACHED_ATTENTION.check(
    "query head h reads KV head h // (query heads per KV head)",
    hint="neighbouring query heads share a KV head: with 9 and 3, heads 0, 1, 2 read KV head 0",
)
def grouped_heads(learner: Learner, expect: Expect) -> None:
    for heads in [(2, 2), (9, 3), (4, 2), (5, 1)]:
        query, key, value = text_of(3, heads, 4)
        same_steps(learner, expect, (torch.zeros_like(query), key, value), "queries of 0")


@CACHED_ATTENTION.check(
    "the position of a token is how many came before it",
    hint="positions count the tokens of the text, not those of the step, of which there is always one; "
    "query and key are both rotated, and each key only once",
)
def place_in_the_text(learner: Learner, expect: Expect) -> None:
    same_steps(learner, expect, text_of(12, (1, 1), 8), "random")


@CACHED_ATTENTION.check(
    "what is kept is one rotated key and one value for each token and KV head",
    hint="give each query head its key when you attend, not when you keep: three query heads to a KV head "
    "would mean three times the memory",
)
def kept(learner: Learner, expect: Expect) -> None:
    for heads, head_size in [((1, 1), 4), ((6, 2), 8)]:
        query, key, value = text_of(5, heads, head_size)
        attention = learner.MyCachedAttention(heads[1], head_size)
        for token in range(5):
            attention.step(query[token], key[token], value[token])
        given = (
            several(heads[0], "query head")
            + f", {several(heads[1], 'KV head')} of size {head_size}, after 5 steps"
        )
        keys, wanted = attention.keys, turned(key, torch.arange(5))
        why = ""
        if not difference(keys, turned(key, torch.arange(1, 6)), 1e-5):
            why = "these are the keys one position further on: the first token stands at position 0"
        elif not difference(keys, key, 1e-5):
            why = "these are the keys as they came: each is rotated once, before it is kept"
        expect.close(keys, wanted, f"{given}: keys", hint=why)
        expect.close(attention.values, value, f"{given}: values")


@CACHED_ATTENTION.check(
    "every step answers what reading the whole text again would",
    hint="compare the first step that differs: what does it see that it should not, or not see?",
)
def whole_texts(learner: Learner, expect: Expect) -> None:
    for seed, (tokens, heads, head_size) in enumerate([(33, (9, 3), 16), (17, (4, 4), 6), (20, (8, 1), 48)]):
        same_steps(learner, expect, text_of(tokens, heads, head_size, seed), "random")
