"""Exercise 07, task 2: the parts of a split put together."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task

COMBINE = Task(
    name="combine",
    exercise="07",
    title="Put the parts together",
    points=3,
    defines=("my_combine",),
    preamble="import importlib.util\nimport math\nimport os\nimport torch\n"
    "import triton\nimport triton.language as tl\n"
    "from coursekit.given.launches import launch_decode",
)

TASKS = [COMBINE]


def summary(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a program knows of its keys: `scores` [n, heads], `values` [n, heads, size], n may be 0."""
    if not len(scores):
        return torch.full_like(values[0:0].sum(0)[:, 0], -math.inf), scores.sum(0), values.sum(0)
    maximum = scores.max(dim=0).values
    weights = torch.exp(scores - maximum)
    return maximum, weights.sum(0), (weights[:, :, None] * values).sum(0)


def expect_combined(
    learner: Learner,
    expect: Expect,
    given: str,
    lengths: Sequence[int],
    scores: Tensor | None = None,
    heads: int = 2,
    tolerance: float = 1e-5,
) -> None:
    """Keys cut into parts of these lengths; `scores` [n, heads] in place of random ones."""
    generator = torch.Generator().manual_seed(sum(lengths))
    count = sum(lengths)
    values = torch.randn(count, heads, 4, generator=generator, dtype=torch.float64)
    if scores is None:
        scores = 3 * torch.randn(count, heads, generator=generator, dtype=torch.float64)
    wanted = torch.zeros(heads, 4)
    if count:
        wanted = (torch.softmax(scores, dim=0)[:, :, None] * values).sum(0)
    cut = zip(scores.split(list(lengths)), values.split(list(lengths)), strict=True)
    parts = [torch.stack(column).float() for column in zip(*(summary(*part) for part in cut), strict=True)]
    got = learner.my_combine(*parts)
    given += f": {heads} heads, parts of {list(lengths)} keys"
    expect.close(got, wanted, given, tolerance=tolerance)


@COMBINE.check(
    "the parts together are the whole",
    hint="a part's sums were made relative to its own maximum: multiply both, total and acc, by "
    "exp(its maximum - the largest of all), then add, and divide at the end",
)
def whole(learner: Learner, expect: Expect) -> None:
    for lengths in ([5, 3], [1, 6, 2], [4], [1] * 7, [30, 1, 1]):
        expect_combined(learner, expect, "random scores", lengths, heads=3)


@COMBINE.check(
    "large and small scores",
    hint="exp(89) is infinite in float32, exp(-104) is 0: subtract each head's largest maximum",
)
def extreme_maxima(learner: Learner, expect: Expect) -> None:
    steps = torch.arange(6, dtype=torch.float64)[:, None]
    for name, base in {
        "around 1000": [1000, 1000],
        "1000 and -1000": [1000, -1000],
        "low": [-6e4, -7e4],
    }.items():
        scores = steps % 4 + torch.tensor(base, dtype=torch.float64)
        # maximum + log(total), as the engine's kernels keep it, has steps of 0.004 at -60000 in float32.
        tolerance = 2e-2 if name == "low" else 1e-3
        expect_combined(learner, expect, f"scores {name}", [2, 1, 3], scores, tolerance=tolerance)


@COMBINE.check(
    "empty parts add nothing",
    hint="an empty part has the maximum -inf and total 0, so its factor exp(-inf - largest) is 0",
)
def empty_parts(learner: Learner, expect: Expect) -> None:
    for lengths in ([0, 5], [5, 0], [0, 0, 1, 0], [2, 0, 3, 0]):
        expect_combined(learner, expect, "random scores", lengths)
    low = torch.full((3, 2), -6e4, dtype=torch.float64)
    expect_combined(learner, expect, "scores of -60000", [0, 3, 0], low, tolerance=2e-2)


@COMBINE.check(
    "a head without any key gets zeros",
    hint="when all maxima are -inf, -inf - -inf is NaN: take 0 for the largest there, and divide by 1",
)
def nothing_at_all(learner: Learner, expect: Expect) -> None:
    expect_combined(learner, expect, "no key at all", [0, 0, 0])
    expect_combined(learner, expect, "no key at all", [0])
    maximum = torch.tensor([[-math.inf, 2.0], [-math.inf, 2.0]])
    total, acc = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.zeros(2, 2, 1)
    acc[:, 1, 0] = torch.tensor([8.0, 4.0])
    got = learner.my_combine(maximum, total, acc)
    expect.close(got, [[0.0], [3.0]], "head 0 has no key, head 1 has sums 1 and 3, acc 8 and 4")
