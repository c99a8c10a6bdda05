# %% [markdown]
# # 06 · A first Triton kernel
#
# Lesson 05 read keys through a [block table](../docs/glossary.md#block-table) by gathering: all keys are copied, and the
# copy is read. A GPU should look each block up *while* it reads. A function that runs on a GPU is called a
# [kernel](../docs/glossary.md#kernel), and this lesson writes some in Triton, a language inside Python.
#
# **You will be able to** read a Triton kernel and run it without a GPU; write one with a two-dimensional tile, a mask and
# scattered addresses; and check it against implementations that were written differently.
#
# About 45 minutes. Runs in under a minute on two CPU cores; a GPU is not used even where there is one. It needs Triton, which
# exists for Linux and Windows. On a Mac, read the stored outputs.

# %%
# Triton decides when it is imported whether it compiles or interprets, so this comes first.
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This lesson needs Triton (Linux, Windows): read the stored outputs here.")

import numpy as np
import torch
import triton
import triton.language as tl

from minipaged import AttentionBatch, KVSpec, KVStorage
from coursekit.lesson import compare, show_source, table

# %% [markdown]
# ## The question
#
# A GPU runs many thousands of threads at once. In decode there is a query for each sequence and head, there are keys for each token,
# and a table says where they are. **Who reads which key? And how can you trust the answer of a kernel on a machine without a
# GPU?**
#
# Triton's model has three words.
#
# - A **[program](../docs/glossary.md#program)** is one of many copies of a kernel. They all run the same lines; each knows
#   only its number.
# - A **[tile](../docs/glossary.md#tile)** is the small array that a program works on: so many *lanes*, a power of two,
#   fixed when the kernel is compiled.
# - A **[mask](../docs/glossary.md#mask)** says which lanes are real. The data rarely has a size that tiles fill exactly.
#
# Threads do not appear in it: the compiler divides each tile among the threads of its program.
#

# %% [markdown]
# ## Your prediction
#
# 1. A thousand numbers are copied in tiles of 256. How many lanes have nothing to do?
# 2. Without a GPU, kernels run in Triton's *interpreter*. Add 2.5 and 2 there, in bfloat16, a 16-bit number format that can hold
#    both numbers and their sum exactly. What comes out?

# %%
my_idle_lanes = None  # your guess
my_sum = None  # your guess

# %% [markdown]
# ## Measure
#
# ### First: copy a row
#
# A tensor given to a kernel arrives as a *pointer* to its first number. A pointer plus an array of integers is an array of
# pointers, one for each lane. `tl.load` reads through all of them, `tl.store` writes through them.

# %%
@triton.jit
def copy_kernel(out_ptr, row_ptr, size, TILE: tl.constexpr):
    program = tl.program_id(0)  # which of the copies am I?
    lanes = program * TILE + tl.arange(0, TILE)  # the elements that are mine
    real = lanes < size  # the last tile reaches beyond the end
    row = tl.load(row_ptr + lanes, mask=real, other=0.0)  # a lane that is not real gets `other`
    tl.store(out_ptr + lanes, row, mask=real)

# %% [markdown]
# When a kernel is started, its [grid](../docs/glossary.md#grid) stands in square brackets: how many programs to start. There is no
# loop over programs anywhere.

# %%
SIZE, TILE = 1000, 256
generator = torch.Generator().manual_seed(6)
row, copied = torch.randn(SIZE, generator=generator), torch.full((SIZE,), torch.nan)
grid = (triton.cdiv(SIZE, TILE),)  # divided and rounded up
copy_kernel[grid](copied, row, SIZE, TILE=TILE)
print("programs:", grid[0], "  equal:", torch.equal(copied, row))
assert torch.equal(copied, row)

# %% [markdown]
# It ran on this CPU, in Triton's interpreter, which executes the programs one after the other, each of their lines with NumPy. Who
# did what? Let every program sign its lanes.

# %%
@triton.jit
def sign_kernel(out_ptr, size, TILE: tl.constexpr):
    lanes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + lanes, tl.zeros([TILE], tl.int32) + tl.program_id(0), mask=lanes < size)


signed = torch.full((SIZE,), -1, dtype=torch.int32)
sign_kernel[grid](signed, SIZE, TILE=TILE)
programs, lanes = signed.unique(return_counts=True)
table(["program", "lanes at work"], zip(map(str, programs.tolist()), lanes.tolist(), strict=True))
idle = len(programs) * TILE - int(lanes.sum())
wrong_idle_lanes = {
    0: "a thousand is not a multiple of 256: the fourth tile is not full",
    232: "that is how many lanes of the last tile have work; the other 24 have none",
    768: "that is three full tiles, which all have work",
}
compare(my_idle_lanes, idle, "idle lanes", wrong_idle_lanes)

# %% [markdown]
# ### What the mask is for
#
# Now without a mask. The thousand numbers are the beginning of a larger piece of memory; what follows belongs to somebody else.

# %%
@triton.jit
def careless_kernel(out_ptr, TILE: tl.constexpr):
    lanes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + lanes, tl.zeros([TILE], tl.float32) + 1.0)


memory = torch.zeros(len(programs) * TILE)
mine, neighbour = memory[:SIZE], memory[SIZE:]
careless_kernel[grid](mine, TILE=TILE)
print("numbers of the neighbour that were overwritten:", int(neighbour.eq(1).sum()))
assert mine.eq(1).all() and neighbour.eq(1).all() and len(neighbour) == idle

# %% [markdown]
# All idle lanes wrote, into numbers that are not ours, and nothing complained. A pointer does not know where its tensor ends.
#
# ### Second: a two-dimensional tile
#
# The keys of one token are a matrix: three heads of 64 numbers. A tile can be two-dimensional too. Put an array of row numbers upright
# (`[:, None]`) and an array of column numbers flat (`[None, :]`); their sum is a matrix of addresses. In NumPy, for rows of five:

# %%
print(np.arange(4)[:, None] * 5 + np.arange(4)[None, :])

# %% [markdown]
# Each row begins 5 places after the one above: such a distance is called a [stride](../docs/glossary.md#stride). And because tiles
# are powers of two, three heads need a tile with four rows, and a mask that is two-dimensional as well.

# %%
@triton.jit
def copy_heads_kernel(out_ptr, in_ptr, stride, HEADS: tl.constexpr, DIMS: tl.constexpr):
    heads, dims = tl.arange(0, 4), tl.arange(0, 64)  # a tile of 4 x 64
    real = (heads < HEADS)[:, None] & (dims < DIMS)[None, :]
    places = heads[:, None] * stride + dims[None, :]
    tl.store(out_ptr + places, tl.load(in_ptr + places, mask=real, other=0.0), mask=real)


heads, copied = torch.randn(3, 64, generator=generator), torch.full((4, 64), torch.nan)
copy_heads_kernel[(1,)](copied, heads, 64, HEADS=3, DIMS=64)
print("three rows copied:", torch.equal(copied[:3], heads), "  fourth row:", copied[3, :3].tolist())
assert torch.equal(copied[:3], heads) and copied[3].isnan().all()

# %% [markdown]
# ### Third: scatter to slots
#
# One program for each new token. It loads *one number*, the token's slot, and writes its matrix there. That is all that
# [slot mapping](../docs/glossary.md#slot-mapping) asks of a kernel.

# %%
@triton.jit
def scatter_kernel(
    cache_ptr, key_ptr, slots_ptr, stride, HEADS: tl.constexpr, DIMS: tl.constexpr
):
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    heads, dims = tl.arange(0, 4), tl.arange(0, 64)
    real = (heads < HEADS)[:, None] & (dims < DIMS)[None, :]
    inside = heads[:, None] * DIMS + dims[None, :]  # within one token
    key = tl.load(key_ptr + token * stride + inside, mask=real, other=0.0)
    tl.store(cache_ptr + slot * stride + inside, key, mask=real)


new_keys, cache = torch.randn(2, 3, 64, generator=generator), torch.full((10, 3, 64), torch.nan)
scatter_kernel[(2,)](cache, new_keys, torch.tensor([7, 2]), 3 * 64, HEADS=3, DIMS=64)
print("slots written:", (~cache.isnan()).all(dim=(1, 2)).nonzero().flatten().tolist())
assert torch.equal(cache[[7, 2]], new_keys) and int((~cache.isnan()).sum()) == new_keys.numel()

# %% [markdown]
# ### The engine's kernel
#
# The engine's kernel is the third one, twice (for keys and values), with three additions: strides for everything, because keys and
# values come as slices of larger tensors; sizes padded to powers of two; and `write_rows`, which scales the numbers when the cache has
# one of the small formats of lesson 13 (`LARGEST` is the largest number of such a format). Read it from `token =` on.

# %%
from minipaged.attention.kernels.write_kv import write_kv_kernel, write_kv_launch

show_source(write_kv_kernel.fn)

# %% [markdown]
# Now three sequences, with SmolLM2's heads, in blocks of four that are scattered over a pool of 24. The pool is filled with NaN
# first, so that we see all that is written, and nothing else. A *launch* is a kernel, its grid and its arguments in one value. It can
# be run, or only compiled.

# %%
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
LENGTHS, BLOCK_SIZE, NUM_BLOCKS = [5, 16, 37], 4, 24
places = np.random.default_rng(6).permutation(NUM_BLOCKS).tolist()
block_lists = [places[:2], places[2:6], places[6:16]]
batch = AttentionBatch.build(block_lists, LENGTHS, LENGTHS, BLOCK_SIZE)
spec = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)


def spoiled_layer():
    storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE)
    for tensor in storage.tensors:
        tensor.fill_(torch.nan)
    return storage.layer(0)

# %%
from minipaged.attention.torch_backend import TorchBackend

keys, values = torch.randn(2, sum(LENGTHS), KV_HEADS, HEAD_SIZE, generator=generator)
layer, by_torch = spoiled_layer(), spoiled_layer()
launch = write_kv_launch(layer, keys, values, batch.slot_mapping)
launch.run()
TorchBackend().write_kv(by_torch, keys, values, batch.slot_mapping)
slots = batch.slot_mapping[: LENGTHS[0]].tolist()
print("grid:", launch.grid, "  slots of the first sequence:", slots)
for ours, theirs in ((layer.key, by_torch.key), (layer.value, by_torch.value)):
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))
assert int((~layer.key.isnan()).all(dim=(2, 3)).sum()) == sum(LENGTHS) == launch.grid[0]

# %% [markdown]
# Equal to what torch writes, bit for bit, and one slot for each token.
#
# ### Reading through the table
#
# The other kernel is [decode](../docs/glossary.md#decode): each sequence has one query token, and each of its query heads has
# a program of its own. First for a single sequence, short enough for one tile. You know every line: the slot formula of lesson 04,
# the attention of lesson 01, and a mask.

# %%
@triton.jit
def small_decode_kernel(
    out_ptr, query_ptr, key_ptr, value_ptr, table_ptr, length, scale,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIMS: tl.constexpr, TILE: tl.constexpr,
):
    head = tl.program_id(0)
    dims, positions = tl.arange(0, DIMS), tl.arange(0, TILE)
    live = positions < length
    query = tl.load(query_ptr + head * DIMS + dims)  # [DIMS]
    blocks = tl.load(table_ptr + positions // BLOCK, mask=live, other=0).to(tl.int64)
    slots = blocks * BLOCK + positions % BLOCK  # all lanes at once
    places = (slots[:, None] * KV_HEADS + head // GROUP) * DIMS + dims[None, :]  # [TILE, DIMS]
    keys = tl.load(key_ptr + places, mask=live[:, None], other=0.0)
    values = tl.load(value_ptr + places, mask=live[:, None], other=0.0)
    scores = tl.sum(keys * query[None, :], axis=1) * scale  # [TILE]
    scores = tl.where(live, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    result = tl.sum(weights[:, None] * values, axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + head * DIMS + dims, result)

# %% tags=["nbval-ignore-output"]
from minipaged.attention.reference import ReferenceBackend

decode = AttentionBatch.build(block_lists, [1] * len(LENGTHS), LENGTHS, BLOCK_SIZE)
query = torch.randn(len(LENGTHS), HEADS, HEAD_SIZE, generator=generator)
scale = HEAD_SIZE**-0.5
wanted = ReferenceBackend().paged_attention(query, layer, decode, scale=scale)
for seq, length in enumerate(LENGTHS):
    out, tile = torch.full((HEADS, HEAD_SIZE), torch.nan), triton.next_power_of_2(length)
    small_decode_kernel[(HEADS,)](
        out, query[seq], layer.key, layer.value, decode.block_tables[seq], length, scale,
        BLOCK=BLOCK_SIZE, KV_HEADS=KV_HEADS, GROUP=HEADS // KV_HEADS, DIMS=HEAD_SIZE, TILE=tile,
    )
    error = float((out - wanted[seq]).abs().max())
    print(f"{length:2} keys in a tile of {tile:2}: off by {error:.0e}")
    assert torch.allclose(out, wanted[seq], atol=1e-5)

# %% [markdown]
# The other side of the comparison is the reference of [lesson 05](05_paged_attention.ipynb), which loops over tokens in float64.
#
# A long sequence does not fit one tile. So the engine's program walks over its keys, tile by tile. For each tile it looks up the
# blocks and reads the slots where they are:

# %%
from minipaged.attention.kernels.addresses import look_up_blocks, slot_offsets
from minipaged.attention.kernels.decode import decode_kernel, decode_launch

show_source(look_up_blocks.fn, slot_offsets.fn)

# %%
output = torch.full_like(query, torch.nan)
launch = decode_launch(output, query, layer, decode, scale, tile=16)
print("grid:", launch.grid, "query heads and sequences")
assert launch.grid == (HEADS, len(LENGTHS))

# %% [markdown]
# A program for each query head of each sequence. Checked against two other implementations: torch, which gathers, and the reference.

# %% tags=["nbval-ignore-output"]
launch.run()
references = {"torch": TorchBackend(), "reference, float64": ReferenceBackend()}
errors = {
    name: float((output - other.paged_attention(query, layer, decode, scale=scale)).abs().max())
    for name, other in references.items()
}
assert max(errors.values()) < 1e-5
table(["largest difference to", "of the output"], [(k, f"{v:.1e}") for k, v in errors.items()])

# %% [markdown]
# ### Compiled for a card that is not here
#
# The interpreter tells whether a kernel is right. It tells nothing about its speed. But Triton's compiler needs no GPU: it can be told
# for which one to compile, and its listing says how the kernel reads memory. The study [Reading a compiler's
# listing](extra/06_reading_a_listing.ipynb) compiles `decode` for three cards, and finds a change to the layout of the cache that
# needs eight times as many load instructions for the same bytes. How fast a kernel is has to be measured on a card; lesson 07 shows
# what has been recorded.

# %% [markdown]
# ## The picture
#
# The programs of the decode launch above. Each bar is a program, and here one of them is blue. Each piece of a bar is a tile, pale
# where lanes have nothing to do.

# %%
from coursekit.figures import show
from coursekit.figures.tiles import program_grid, tile_through_table
from coursekit.widgets import Stepper

chosen = (2, 4)
figure = program_grid(LENGTHS, num_heads=HEADS, queries_per_kv=3, tile=16, chosen=chosen)
tiles = [triton.cdiv(n, 16) for n in LENGTHS]
show(
    figure,
    f"{len(LENGTHS) * HEADS} programs as horizontal bars, nine for each sequence. Sequences of "
    f"{LENGTHS} keys take {tiles} tiles; the last tile of each is partly pale.",
)
print(len(LENGTHS) * HEADS, "programs")

# %% [markdown]
# Two things catch the eye. The programs are unequal: those of a long sequence are still at work when the others have ended. And three
# neighbours read the same [KV head](../docs/glossary.md#gqa), each for itself. Lesson 07 does something about both.
#
# Now one program, step by step, on smaller numbers: blocks of 4, tiles of 8, 18 keys. Blue is the tile being read; dark grey are the
# other keys of this sequence, pale grey the slots of others.

# %%
TABLE, KEYS_SEEN, LANES = [7, 2, 4, 0, 5], 18, 8


def draw(step):
    first = step * LANES
    figure = tile_through_table(
        TABLE, context_len=KEYS_SEEN, block_size=4, tile=LANES, first_key=first, num_blocks=9
    )
    live = [position for position in range(first, first + LANES) if position < KEYS_SEEN]
    slots = [TABLE[position // 4] * 4 + position % 4 for position in live]
    return figure, f"positions {live[0]} to {live[-1]} are read from slots {slots}"


Stepper(
    triton.cdiv(KEYS_SEEN, LANES),
    draw,
    start=1,
    shows="A tile of eight lanes, and a pool of nine blocks with the slots that the lanes read.",
)

# %% [markdown]
# ## Why
#
# **Why does each lane look up its own block?** So that the tile does not have to fit the block. The tile is chosen for the
# machine, the block for the memory, and neither knows of the other:

# %%
by_tile = []
for tile in (4, 8, 16, 32):
    answer = torch.empty_like(query)
    decode_launch(answer, query, layer, decode, scale, tile=tile).run()
    by_tile.append(answer)
    print(f"tile of {tile:2}: the same answer", torch.allclose(answer, output, atol=1e-5))
assert all(torch.allclose(answer, output, atol=1e-5) for answer in by_tile)

# %% [markdown]
# **Why does the engine's kernel keep a maximum, and change it?** Softmax subtracts the largest score, so that no exponential
# overflows. A program that sees its keys tile by tile does not know the largest score yet. So it takes the largest *so far*, and
# rescales what it has added up when a larger one comes: the [online softmax](../docs/glossary.md#online-softmax), a subject of
# lesson 07. (And it computes $2^x$ instead of $e^x$, which is one instruction on a GPU; the factor between them is in `log2_scale`.)
#
# ## The code as it stands
#
# The kernel, as it was interpreted and as it was compiled; then what launches it.

# %%
show_source(decode_kernel.fn, decode_launch)

# %% [markdown]
# Read it with four questions. Which lines depend on the program's number? Which lanes are masked, and what do they get? Where
# does an entry of the table become an address? What is kept from one tile to the next?
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a lane that is not real reads nothing and writes nothing | the neighbour's memory is changed, or a crash |
# | what masked lanes get is defined wherever it is used | right in the interpreter, random on a GPU |
# | tile size and block size do not change the answer | wrong for one length in many |
# | block numbers are widened before they are multiplied | wrong in large pools only (lesson 04's bug) |
# | the interpreter and the GPU agree | tests that prove nothing |
#
# The first row: the pool is still full of NaN where nothing was written, and no answer had one. Fill those places with something
# else, and the answer is the same to the last bit.

# %%
refilled = spoiled_layer()
for ours, theirs in ((refilled.key, layer.key), (refilled.value, layer.value)):
    ours.copy_(theirs.nan_to_num(1e4))
again = torch.empty_like(query)
decode_launch(again, query, refilled, decode, scale, tile=16).run()
print("the same to the last bit:", torch.equal(again, output))
assert torch.equal(again, output) and not output.isnan().any()

# %% [markdown]
# The last row does *not* hold. Add 2.5 and 2, in two number formats of 16 bits:

# %%
@triton.jit
def add_kernel(out_ptr, a_ptr, b_ptr):
    tl.store(out_ptr, tl.load(a_ptr) + tl.load(b_ptr))


def added(dtype):
    a, b, out = (torch.tensor([x], dtype=dtype) for x in (2.5, 2.0, 0.0))
    add_kernel[(1,)](out, a, b)
    return out


print("float16:", float(added(torch.float16)), "  bfloat16:", float(added(torch.bfloat16)))
wrong_sum = {4.5: "a GPU would say so; the interpreter does not"}
compare(my_sum, round(float(added(torch.bfloat16)), 6) + 0.0, "to six digits", wrong_sum)
assert added(torch.float16) == 4.5
bits = torch.tensor([2.5, 2.0], dtype=torch.bfloat16).view(torch.int16)
assert torch.equal((bits[0] + bits[1]).view(torch.bfloat16), added(torch.bfloat16)[0])

# %% [markdown]
# No error, no warning. NumPy has no bfloat16, so the interpreter keeps the *bit patterns*, as integers, and adds those, as
# the last line has shown. A GPU would say 4.5. So a test in bfloat16 can fail here for a right kernel, or pass for a wrong
# one. The engine's kernels convert what they load to float32 at once, so that the interpreter is right in bfloat16 as well, within
# the precision of that format.

# %% [markdown]
# ## Find the bug
#
# A colleague writes her own small kernel, for one head and keys that lie in order, and takes a tile that holds the whole sequence. It
# passes its tests: sequences of 8, 16, 32 and 64 keys, with random numbers, against the reference. In service, the answers to some
# requests are slightly off, and to others they are right. There is no NaN, and no crash.

# %%
@triton.jit
def whole_tile_kernel(
    out_ptr, query_ptr, key_ptr, value_ptr, length, DIMS: tl.constexpr, TILE: tl.constexpr
):
    dims, positions = tl.arange(0, DIMS), tl.arange(0, TILE)
    live = positions < length
    places = positions[:, None] * DIMS + dims[None, :]
    query = tl.load(query_ptr + dims)
    keys = tl.load(key_ptr + places, mask=live[:, None], other=0.0)
    values = tl.load(value_ptr + places, mask=live[:, None], other=0.0)
    scores = tl.sum(keys * query[None, :], axis=1)  # [TILE]
    weights = tl.exp(scores - tl.max(scores, axis=0))
    result = tl.sum(weights[:, None] * values, axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + dims, result)

# %%
def attend(query, keys, values):
    """What her kernel says: one query [dims], keys and values [length, dims]."""
    out, length = torch.empty_like(query), len(keys)
    tile = triton.next_power_of_2(length)
    whole_tile_kernel[(1,)](out, query, keys, values, length, DIMS=len(query), TILE=tile)
    return out


passed = []
for length in (8, 16, 32, 64):
    q = torch.randn(16, generator=generator)
    k, v = torch.randn(2, length, 16, generator=generator)
    right = (k @ q).softmax(dim=0) @ v
    passed.append(torch.allclose(attend(q, k, v), right, atol=1e-5))
print("her tests pass:", passed)
assert all(passed)

# %% [markdown]
# Now a sequence of three keys that are all zero, so that every key has the same score, and values that are all 1. The average of
# three ones is 1. **What does her kernel say, and why?**

# %%
my_average = None  # your guess

# %%
average = float(attend(torch.ones(16), torch.zeros(3, 16), torch.ones(3, 16))[0])
wrong_average = {
    1: "the idle lane has a score too, and it is not minus infinity",
    0: "the three real lanes do count",
}
compare(my_average, average, "where 1 is right", wrong_average)
assert average == 3 / 4

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The tile has four lanes. The idle one gets a key of zero (`other=0.0`), so its *score* is 0, and 0 is an ordinary score: it has
# a weight like any other. Its value is zero, so it adds nothing to the sum but counts in the denominator: three ones over four. Where
# the real scores are large, idle lanes hardly weigh, and the answer is nearly right. Where a sequence fills its tile, there are no
# idle lanes, and all lengths in the test were powers of two.
#
# A mask on a load says what is *read*. What a lane then does with it must be masked as well: a score that is not real has to be minus
# infinity. That is the line `tl.where(live, …, float("-inf"))` in both kernels above.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A head has 80 numbers. What does a tile for it look like, and what happens in a write kernel without a mask?</summary>
#
# 128 lanes, the next power of two, of which 48 are idle. Without a mask those write into the next head: the answer is
# fluent and wrong, and may differ from run to run, as it is not defined which of the two writes comes last.
# </details>
#
# <details><summary>2. Why is a masked load that does not say <code>other=</code> a trap?</summary>
#
# The interpreter gives masked lanes 0; a GPU may give anything. The test passes here, and the kernel fails on the card.
# </details>
#
# <details><summary>3. The last tile of a program has 5 live lanes of 32. What do the other 27 cost?</summary>
#
# No memory traffic: their loads are switched off. But the arithmetic is done for all lanes.
# </details>
#
# <details><summary>4. A sequence has no query in this step. What does its program do?</summary>
#
# It compares two neighbouring entries of `query_start`, finds them equal and returns, before it reads a key or writes a
# result.
# </details>

# %% [markdown]
# ## Summary
#
# - A kernel is written for one program: its number, its tile, its mask. The grid says how many there are.
# - `write_kv` has a program for each token, `decode` one for each sequence and query head.
# - Each lane looks up its own block, so tile and block are independent.
# - The interpreter shows whether a kernel is right, except in bfloat16. Only a card shows how fast it
#   is.
# - Lanes that are not real have to be masked twice: when they read, and when their scores count.
# - Addresses are computed in 64 bits, from the first multiplication on.
#
# **Write it yourself:** [exercise 06](../exercises/06_write_kv/06_write_kv.ipynb), a kernel that writes keys and values.
#
# **Next:** [07 · A fast decode kernel](07_fast_decode.ipynb).
#
# ### Sources
#
# - P. Tillet, H. T. Kung, D. Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations*,
#   MAPL 2019, [doi:10.1145/3315508.3329973](https://doi.org/10.1145/3315508.3329973).
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180), section 5.1: kernels.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018,
#   [arXiv:1805.02867](https://arxiv.org/abs/1805.02867).
