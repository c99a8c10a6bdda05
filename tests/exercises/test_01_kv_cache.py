"""The graders of exercise 01 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

MULTIPLICATIONS = Proof(
    task="multiplications",
    second="""
def multiplications(prompt_tokens, new_tokens, head_size):
    "Closed sums: tetrahedral numbers for all triangles, one triangle and a strip for what is kept."
    if new_tokens == 0:
        return [0, 0]
    pyramid = lambda n: n * (n + 1) * (n + 2) // 6
    last = prompt_tokens + new_tokens - 1
    again = pyramid(last) - pyramid(prompt_tokens - 1)
    kept = last * (last + 1) // 2  # rows 1 ... last, each computed once
    return [head_size * again, head_size * kept]
""",
    wrong=[
        Wrong(
            "counts a square: tokens that come later as well",
            "one step compares each token",
            replace=("n * (n + 1) // 2", "n * n"),
        ),
        Wrong(
            "leaves out each token's own key",
            "one step compares each token",
            replace=("n * (n + 1) // 2", "n * (n - 1) // 2"),
        ),
        Wrong("forgets the head size", "one step compares each token", replace=("kept * head_size", "kept")),
        Wrong(
            "takes a prompt for one row",
            "one step compares each token",
            replace=("triangle if n == prompt_tokens else n", "n"),
        ),
        Wrong(
            "reads the last new token too",
            "one step compares each token",
            replace=("prompt_tokens + new_tokens)", "prompt_tokens + new_tokens + 1)"),
        ),
        Wrong(
            "compares the newest token with older ones only",
            "a later step reads the text again",
            replace=("triangle if n == prompt_tokens else n", "triangle if n == prompt_tokens else n - 1"),
        ),
        Wrong(
            "reads the prompt again, never the new tokens",
            "a later step reads the text again",
            replace=("again += triangle", "again += prompt_tokens * (prompt_tokens + 1) // 2"),
        ),
        Wrong(
            "reads the prompt although nothing is written",
            "without a step nothing",
            replace=("prompt_tokens + new_tokens)", "prompt_tokens + max(1, new_tokens))"),
        ),
    ],
)

CACHED_ATTENTION = Proof(
    task="cached_attention",
    second='''
import math

class MyCachedAttention:
    """A list that grows; each query head by itself, with plain dot products and numbers."""

    def __init__(self, num_kv_heads, head_size):
        self.kept = []

    @property
    def keys(self):
        return [key for key, _ in self.kept]

    @property
    def values(self):
        return [value for _, value in self.kept]

    def step(self, query, key, value):
        now = len(self.kept)
        self.kept.append((rotate(key, now), value.clone()))
        rows = []
        for head, q in enumerate(rotate(query, now).unbind()):
            kv = head * len(key) // len(query)
            scores = [float(q @ k[kv]) / math.sqrt(len(q)) for k in self.keys]
            largest = max(scores)
            weights = [math.exp(score - largest) for score in scores]
            mixed = sum(w * v[kv] for w, v in zip(weights, self.values))
            rows.append(mixed / sum(weights))
        return torch.stack(rows)
''',
    wrong=[
        Wrong(
            "attends before it keeps: each token misses itself",
            "a step averages the values of all tokens so far",
            source="""
class MyCachedAttention:
    def __init__(self, num_kv_heads, head_size):
        self.keys = torch.empty(0, num_kv_heads, head_size)
        self.values = torch.empty(0, num_kv_heads, head_size)

    def step(self, query, key, value):
        position = len(self.keys)
        query, key = rotate(query, position), rotate(key, position)
        group = len(query) // len(key)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("hd,thd->ht", query, keys) / query.shape[-1] ** 0.5
        self.keys = torch.cat((self.keys, key[None]))
        self.values = torch.cat((self.values, value[None]))
        return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
""",
        ),
        Wrong(
            "forgets what came before",
            "a step averages the values of all tokens so far",
            replace=("torch.cat((self.values, value[None]))", "value[None].expand(len(self.keys), -1, -1)"),
        ),
        Wrong(
            "rotates the value",
            "a step averages the values of all tokens so far",
            replace=(
                "torch.cat((self.values, value[None]))",
                "torch.cat((self.values, rotate(value, position)[None]))",
            ),
        ),
        Wrong(
            "one cache for all texts",
            "two texts have two caches",
            source="""
class MyCachedAttention:
    kept = [[], []]

    def __init__(self, num_kv_heads, head_size):
        pass

    keys = property(lambda self: torch.stack(self.kept[0]))
    values = property(lambda self: torch.stack(self.kept[1]))

    def step(self, query, key, value):
        position = len(self.kept[0])
        query, key = rotate(query, position), rotate(key, position)
        self.kept[0].append(key)
        self.kept[1].append(value)
        group = len(query) // len(key)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("hd,thd->ht", query, keys) / query.shape[-1] ** 0.5
        return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
""",
        ),
        Wrong(
            "does not scale",
            "weights are the softmax of scores divided",
            replace=(" / query.shape[-1] ** 0.5", ""),
        ),
        Wrong(
            "takes query head h to KV head h modulo their number",
            "query head h reads KV head",
            replace=(
                "values = self.values.repeat_interleave(group, dim=1)",
                "values = self.values.repeat(1, group, 1)",
            ),
        ),
        Wrong(
            "counts positions from 0 in each step",
            "the position of a token is how many came before",
            replace=("position = len(self.keys)", "position = 0"),
        ),
        Wrong(
            "rotates keys and not queries",
            "the position of a token is how many came before",
            replace=(
                "query, key = rotate(query, position), rotate(key, position)",
                "key = rotate(key, position)",
            ),
        ),
        Wrong(
            "rotates all kept keys again in each step",
            "the position of a token is how many came before",
            replace=("torch.cat((self.keys, key[None]))", "torch.cat((rotate(self.keys, 1), key[None]))"),
        ),
        Wrong(
            "keeps a key for each query head",
            "what is kept is one rotated key",
            source="""
class MyCachedAttention:
    def __init__(self, num_kv_heads, head_size):
        self.keys, self.values = [], []

    def step(self, query, key, value):
        group, position = len(query) // len(key), len(self.keys)
        query, key = rotate(query, position), rotate(key, position)
        self.keys.append(key.repeat_interleave(group, dim=0))
        self.values.append(value.repeat_interleave(group, dim=0))
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        scores = torch.einsum("hd,thd->ht", query, keys) / query.shape[-1] ** 0.5
        return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
""",
        ),
        Wrong(
            "keeps keys as they come and rotates them all in each step",
            "what is kept is one rotated key",
            replace=(
                "        query, key = rotate(query, position), rotate(key, position)\n"
                "        self.keys = torch.cat((self.keys, key[None]))\n"
                "        self.values = torch.cat((self.values, value[None]))\n"
                "        group = len(query) // len(key)\n"
                "        keys = self.keys.repeat_interleave(group, dim=1)\n",
                "        query = rotate(query, position)\n"
                "        self.keys = torch.cat((self.keys, key[None]))\n"
                "        self.values = torch.cat((self.values, value[None]))\n"
                "        group = len(query) // len(key)\n"
                "        rotated = torch.stack([rotate(k, p) for p, k in enumerate(self.keys)])\n"
                "        keys = rotated.repeat_interleave(group, dim=1)\n",
            ),
        ),
        Wrong(
            "forgets all but the last 16 tokens",
            "every step answers what reading the whole text",
            replace=(
                "scores.softmax(dim=-1)",
                "scores.where(torch.arange(len(keys)) > len(keys) - 17, -torch.inf).softmax(dim=-1)",
            ),
        ),
    ],
)

PROOFS = [MULTIPLICATIONS, CACHED_ATTENTION]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
