"""Exercise 06: a kernel that writes keys and values to their slots."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.tasks import kernels
from coursekit.grading.tasks.kernels import FILLED, Axes, expect_memory, run_fenced
from coursekit.grading.values import several

WRITE_KV = Task(
    name="write_kv",
    exercise="06",
    title="Write keys and values to their slots",
    points=5,
    defines=("my_write_kv",),
    preamble="import importlib.util\nimport os\nimport torch\nimport triton\nimport triton.language as tl\n"
    "from coursekit.given.launches import launch_write_kv, write_padded, write_projection",
)

TASKS = [WRITE_KV]

LANES = "where heads lie side by side it was right: a lane from HEAD_SIZE on is nobody's, wherever it points"
SLOTS = [13, 2, 7, 20, 0]  # scattered, no two in a row


def some_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def expect_pool(
    learner: Learner,
    expect: Expect,
    given: str,
    *,
    slots: Sequence[int] = SLOTS,
    query_heads: int = 0,
    num_heads: int = 2,
    head_size: int = 16,
    layers: int = 1,
    block_size: int = 4,
    num_blocks: int = 6,
    first_block: int = 0,
) -> None:
    """Rows from a projection, written to the last layer of a pool of blocks; all of the pool is compared."""
    projection = some_rows(len(slots), query_heads + 2 * num_heads, head_size)
    pool = torch.full((num_blocks, layers, 2, block_size, num_heads, head_size), FILLED)
    wanted, layer = pool.clone(), layers - 1
    for row, slot in zip(projection, slots, strict=True):
        if slot >= 0:
            place = slot // block_size - first_block, layer, slice(None), slot % block_size
            wanted[place] = row[query_heads:].view(2, num_heads, head_size)
    kept = learner.keep(pool)
    where = torch.tensor(slots, dtype=torch.int32)
    given += f": {several(len(slots), 'token')}, slots {list(slots)}, block size {block_size}"
    run_fenced(
        expect,
        given,
        lambda: learner.write_projection(
            learner.my_write_kv, projection, where, kept, layer=layer, first_block=first_block
        ),
    )
    blocks = tuple(f"block {first_block + i}" for i in range(num_blocks))
    axes: Axes = [blocks, "layer", ("keys", "values"), "offset", "head", "number"]
    expect_memory(expect, learner.fetch(kept), wanted, given, axes)


def expect_padded(
    learner: Learner, expect: Expect, size: int, row_step: int, cache_step: int, *, hint: str = ""
) -> None:
    """Heads of `size` that are `row_step` numbers apart in the rows and `cache_step` in the caches."""
    rows = [some_rows(5, 2, row_step)[..., :size], (some_rows(5, 2, row_step) + 100)[..., :size]]
    pools = [torch.full((6, 4, 2, cache_step), FILLED) for _ in range(2)]
    kept = [learner.keep(pool) for pool in pools]
    given = f"5 tokens, slots {SLOTS}, block size 4, 2 heads of {size}, stride_head {row_step}, "
    given += f"stride_cache_head {cache_step}"
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    key, value = (row.contiguous() for row in rows)
    call = partial(learner.write_padded, learner.my_write_kv, key, value, slots, *kept, row_step)
    run_fenced(expect, given, call)
    for name, row, wanted, pool in zip(["key", "value"], rows, pools, kept, strict=True):
        wanted.view(24, 2, cache_step)[SLOTS, :, :size] = row
        axes = ["block", "offset", "head", "number"]
        expect_memory(expect, learner.fetch(pool), wanted, f"{given}: {name}_cache", axes, hint=hint)


@WRITE_KV.check(
    "each token's keys and values are in its slot",
    hint="slot s is in block s // BLOCK_SIZE at offset s % BLOCK_SIZE; a program loads the slot of its token",
)
def in_its_slot(learner: Learner, expect: Expect) -> None:
    key, value = some_rows(5, 2, 16), some_rows(5, 2, 16) + 100
    caches = [torch.full((6, 4, 2, 16), FILLED) for _ in range(2)]
    kept = [learner.keep(cache) for cache in caches]
    given = f"5 tokens, slots {SLOTS}, block size 4, 2 heads of 16"
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    run_fenced(expect, given, lambda: learner.launch_write_kv(learner.my_write_kv, key, value, slots, *kept))
    for name, rows, wanted, cache in zip(["key", "value"], [key, value], caches, kept, strict=True):
        wanted.view(24, 2, 16)[SLOTS] = rows
        axes = ["block", "offset", "head", "number"]
        expect_memory(expect, learner.fetch(cache), wanted, f"{given}: {name}_cache", axes)


@WRITE_KV.check(
    "nothing is taken to lie side by side",
    hint="rows are slices of a wider tensor, and a block of this layer is not followed by the next block of "
    "this layer: every step from one token, head, block or slot to the next is a stride",
)
def strides(learner: Learner, expect: Expect) -> None:
    expect_pool(learner, expect, "keys and values are slices of a projection", query_heads=4)
    expect_pool(learner, expect, "the pool holds 3 layers, the last is written", layers=3)
    expect_pool(learner, expect, "both", query_heads=6, layers=2, block_size=1, num_blocks=24)


@WRITE_KV.check(
    "heads of rows and heads of caches have steps of their own",
    hint="stride_head goes from one head to the next in the rows, stride_cache_head in the caches; neither "
    "need be HEAD_SIZE",
)
def head_strides(learner: Learner, expect: Expect) -> None:
    for row_step, cache_step in [(24, 16), (16, 24), (20, 28)]:
        expect_padded(learner, expect, 16, row_step, cache_step)


@WRITE_KV.check(
    "head sizes and numbers of heads that fill no tile leave their neighbours alone",
    hint="a tile has a power of two of lanes: load and store only where head < NUM_HEADS and dim < HEAD_SIZE",
)
def neighbours(learner: Learner, expect: Expect) -> None:
    for num_heads, head_size in [(2, 48), (1, 80), (3, 16), (3, 96), (5, 8)]:
        given = f"{several(num_heads, 'head')} of {head_size}"
        expect_pool(learner, expect, given, num_heads=num_heads, head_size=head_size, layers=2)
    expect_padded(learner, expect, 12, 14, 20, hint=LANES)


@WRITE_KV.check(
    "a token whose slot is -1 is written nowhere",
    hint="a batch may be padded: a program whose slot is negative has nothing to store",
)
def padding(learner: Learner, expect: Expect) -> None:
    for slots in ([9, -1, 4, -1, 22], [-1], [-1, -1, 0]):
        expect_pool(learner, expect, "with padding", slots=slots, layers=2)


@WRITE_KV.check(
    "addresses of far blocks are computed in 64 bits",
    hint="slots and strides are 32-bit integers, and so is their product: widen the slot before "
    "you multiply: slot.to(tl.int64)",
)
def far_behind(learner: Learner, expect: Expect) -> None:
    block_size, shape = 16, {"layers": 30, "num_heads": 3, "head_size": 64}  # SmolLM2's
    stride = 30 * 2 * block_size * 3 * 64
    first = -(-(2**31) // stride)  # the first block that begins 2**31 numbers or more behind
    slots = [first * block_size + offset for offset in (0, 21, 31)]
    given = f"block {first} begins at number {first * stride}"
    expect_pool(
        learner, expect, given, slots=slots, block_size=block_size, num_blocks=2, first_block=first, **shape
    )


@WRITE_KV.check(kernels.COMPILES, hint=kernels.COMPILES_HINT, seconds=120)
def compiles(learner: Learner, expect: Expect) -> None:
    pointers = ["key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"]
    strides = ["stride_token", "stride_head", "stride_block", "stride_slot", "stride_cache_head"]
    types = {"slots_ptr": "*i32"} | dict.fromkeys(pointers, "*fp16") | dict.fromkeys(strides, "i32")
    constants = {"BLOCK_SIZE": 16, "NUM_HEADS": 3, "HEAD_SIZE": 80, "HEADS_PADDED": 4, "HEAD_PADDED": 128}
    kernels.expect_compiled(learner, expect, "my_write_kv", types, constants)
