# %% [markdown]
# # 06 · A first Triton kernel
#
# Lesson 05 read keys through a [block table](../docs/glossary.md#block-table) by gathering: all keys are copied, and the
# copy is read. A GPU should look each block up *while* it reads. What runs on a GPU is called a
# [kernel](../docs/glossary.md#kernel), and this lesson writes some in Triton, a language inside Python.
#
# **You will be able to** read a Triton kernel and run it without a GPU; check it against two implementations that were written
# differently; compile it for a card that you do not have; and see in the compiler's listing whether it reads memory well.
#
# About 50 minutes. Runs in under a minute on two CPU cores; a GPU is not used even where there is one. It needs Triton,
# which exists for Linux and Windows: elsewhere, read along, the outputs are stored.

# %%
# Triton decides when it is imported whether it compiles or interprets, so this comes first.
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This lesson runs on Linux and Windows, where Triton exists: read along here.")

import inspect
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl

from minipaged import AttentionBatch, KVSpec, KVStorage
from coursekit.lesson import compare, say, show_source, table

# %% [markdown]
# ## The question
#
# A GPU runs many thousands of threads at once. Decode has a query for each sequence and head, keys for each token, and a
# table that says where they are. **Who reads which key? And how can you trust the answer of a kernel, and say anything about
# its speed, on a machine without a GPU?**
#
# Triton's model has three words.
#
# - A **[program](../docs/glossary.md#program)** is one of many copies of a kernel. They all run the same lines; each knows
#   only its number.
# - A **[tile](../docs/glossary.md#tile)** is the small array that a program works on: so many *lanes*, a power of two,
#   fixed when the kernel is compiled.
# - A **[mask](../docs/glossary.md#mask)** says which lanes are real. The data rarely has a size that tiles fill exactly.
#
# There are no threads in it: the compiler divides a tile among the threads of its program.
#
# ## Your prediction
#
# 1. A thousand numbers are added in tiles of 256. How many lanes have nothing to do?
# 2. Three sequences are decoded by a model with nine query heads, and each program takes one query head of one sequence. How
#    many programs?
# 3. A program has 128 threads. Its tile is 32 keys of 128 numbers of two bytes, and one instruction can bring a thread 16
#    bytes. How many load instructions does a thread need for the keys of a tile?

# %%
my_idle_lanes = None  # your guess
my_programs = None  # your guess
my_loads = None  # your guess

# %% [markdown]
# ## Measure
#
# ### The smallest kernel
#
# Adding two vectors. A tensor given to a kernel arrives as a *pointer* to its first number. A pointer plus an array of
# integers is an array of pointers, one for each lane, and `tl.load` reads them all.


# %%
@triton.jit
def add_kernel(out_ptr, a_ptr, b_ptr, size, TILE: tl.constexpr):
    program = tl.program_id(0)  # which of the copies am I?
    lanes = program * TILE + tl.arange(0, TILE)  # the elements that are mine
    real = lanes < size  # the last tile reaches beyond the end
    a = tl.load(a_ptr + lanes, mask=real, other=0.0)  # a lane that is not real gets `other`
    b = tl.load(b_ptr + lanes, mask=real, other=0.0)
    tl.store(out_ptr + lanes, a + b, mask=real)


# %% [markdown]
# When a kernel is started, its *grid* stands in square brackets: how many programs to start. No loop over programs is written
# anywhere.

# %%
SIZE, TILE = 1000, 256
generator = torch.Generator().manual_seed(6)
a, b = torch.randn(2, SIZE, generator=generator)
total = torch.empty(SIZE)
grid = (triton.cdiv(SIZE, TILE),)  # divided and rounded up
add_kernel[grid](total, a, b, SIZE, TILE=TILE)
assert torch.equal(total, a + b)

# %% [markdown]
# It ran on this CPU, in Triton's *interpreter*: it executes the programs one after the other, each line of them with NumPy. Who
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
}
compare(my_idle_lanes, idle, "idle lanes", wrong_idle_lanes)

# %% [markdown]
# ### What the mask is for
#
# Now without a mask. The thousand numbers are the front of a larger piece of memory; what lies beyond them belongs to somebody
# else.


# %%
@triton.jit
def careless_kernel(out_ptr, TILE: tl.constexpr):
    lanes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + lanes, tl.zeros([TILE], tl.float32) + 1.0)


memory = torch.zeros(len(programs) * TILE)
mine, neighbour = memory[:SIZE], memory[SIZE:]
careless_kernel[grid](mine, TILE=TILE)
assert mine.eq(1).all() and neighbour.eq(1).all() and len(neighbour) == idle

# %% [markdown]
# All idle lanes wrote, into numbers that are not ours, and nobody complained. A pointer does not know where its tensor ends.
#
# ### Writing keys to their slots
#
# The first kernel of the engine. One program for each new token looks up the token's slot in the
# [slot mapping](../docs/glossary.md#slot-mapping) and writes all its KV heads there, as one tile. Three heads are not a power
# of two, so heads have a mask too. Most of what it is given are *strides*: how far apart in memory two tokens, heads or
# blocks lie.

# %%
from minipaged.attention.kernels.write_kv import write_kv_kernel, write_kv_launch

show_source(write_kv_kernel.fn)

# %% [markdown]
# `.to(tl.int64)` in its first line will matter further down. `write_rows` stores one tile; into a cache of a small number
# format it first scales the numbers, so that the largest becomes `LARGEST`. Now three sequences, with SmolLM2's heads, in blocks
# of four that are scattered over a pool of 24. The pool is filled with NaN first, so that we see all that is written, and
# nothing else. A *launch* is a kernel, its grid and its arguments in one value, which can be run, or only compiled.

# %%
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
LENGTHS, BLOCK_SIZE, NUM_BLOCKS = [5, 16, 37], 4, 24
places = np.random.default_rng(6).permutation(NUM_BLOCKS).tolist()
block_lists = [places[:2], places[2:6], places[6:16]]
batch = AttentionBatch.build(block_lists, LENGTHS, LENGTHS, BLOCK_SIZE)
spec = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)


def spoiled_layer(spec=spec):
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
print(
    "grid:",
    launch.grid,
    "  slots of the first sequence:",
    batch.slot_mapping[: LENGTHS[0]].tolist(),
)
for ours, theirs in ((layer.key, by_torch.key), (layer.value, by_torch.value)):
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))
assert int((~layer.key.isnan()).all(dim=(2, 3)).sum()) == sum(LENGTHS) == launch.grid[0]

# %% [markdown]
# Equal to what torch writes, bit for bit, and one slot for each token.
#
# ### Reading through the table
#
# The second kernel is [decode](../docs/glossary.md#decode): each sequence has one query token, and each of its query heads has
# a program of its own. The program walks over the keys of its sequence, tile by tile. For each tile it looks up the blocks,
# and reads the slots where they are. These two lines of arithmetic are all that paging asks of a kernel:

# %%
from minipaged.attention.kernels.addresses import look_up_blocks, slot_offsets
from minipaged.attention.kernels.decode import decode_kernel, decode_launch

show_source(look_up_blocks.fn, slot_offsets.fn)

# %%
decode = AttentionBatch.build(block_lists, [1] * len(LENGTHS), LENGTHS, BLOCK_SIZE)
query = torch.randn(len(LENGTHS), HEADS, HEAD_SIZE, generator=generator)
scale = HEAD_SIZE**-0.5
output = torch.full_like(query, torch.nan)
launch = decode_launch(output, query, layer, decode, scale, tile=16)
print("grid:", launch.grid)
wrong_programs = {
    3: "one a sequence would be three; here each query head of it has its own",
    9: "that is one sequence; there are three of them",
    12: "heads and sequences are multiplied, not added",
}
compare(my_programs, math.prod(launch.grid), "programs", wrong_programs)

replace(launch, grid=(2, 1)).run()  # first only two of them: each does its own piece and no other
written = (~output.isnan()).all(dim=-1)  # [sequences, query heads]
assert written.nonzero().tolist() == [[0, 0], [0, 1]]

# %% [markdown]
# Now all programs, checked against two other implementations: torch, which gathers, and the reference of
# [lesson 05](05_paged_attention.ipynb), which loops over tokens in float64.

# %% tags=["nbval-ignore-output"]
from minipaged.attention.reference import ReferenceBackend

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
# The interpreter tells whether a kernel is right. It tells nothing about its speed. But Triton's compiler needs no GPU: it
# can be told for which one to compile. Not in this process, which interprets; so another one compiles `decode`, for an
# H100 (`sm_90`), with the heads of an 8-billion-parameter Llama, and prints the result.

# %%
COMPILE = """
import sys
from dataclasses import replace
from coursekit.aot.compile import compile_launch
from coursekit.aot.cases import kernel_cases
from minipaged.attention.targets import TARGETS

target, stride = TARGETS["sm_90"], int(sys.argv[1])
launch = next(case.launch for case in kernel_cases(target) if case.name == "decode")
launch = replace(launch, args=launch.args | {"stride_head": stride})
sys.stdout.write(compile_launch(launch, target).asm["ptx"])
"""


def compiling_process(*arguments):
    """What another Python prints, one that compiles."""
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


# %% [markdown]
# It is [PTX](../docs/glossary.md#ptx), NVIDIA's assembly language. It has hundreds of lines, but we have few
# questions: what is read in the innermost loop, how wide, and by which line of the kernel?

# %%
from coursekit.aot.listing import Listing, matrix_instructions


def loads_of(listing):
    """In the innermost loop: source line -> bytes of each load of global memory."""
    found = {}
    for instruction in listing.within(listing.hot_loop):
        if instruction.load_bytes:
            found.setdefault(instruction.source, []).append(instruction.load_bytes)
    return found


def line_of(function, text):
    """(file, line number) of the line of a kernel that contains `text`."""
    lines, first = inspect.getsourcelines(function.fn)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return os.path.basename(inspect.getsourcefile(function.fn)), first + offset


# %%
listing = Listing.parse(compiling_process("-c", COMPILE, "128"))
loads = loads_of(listing)
LINES = {
    "block table": line_of(look_up_blocks, "tl.load("),
    "keys": line_of(decode_kernel, "tl.load(key_cache_ptr"),
    "values": line_of(decode_kernel, "tl.load(value_cache_ptr"),
}
reads = {name: loads.pop(line) for name, line in LINES.items()}
table(
    ["in one turn of the loop", "loads", "bytes each"],
    [(k, len(v), v[0]) for k, v in reads.items()],
)
wrong_loads = {
    64: "that is how many bytes each thread has to bring; one instruction brings 16 "
        "of them",
    32: "that would be one number of two bytes at a time; an instruction brings eight"
        " of them",
    512: "that is all threads together; each of the 128 has its share",
}
compare(my_loads, len(reads["keys"]), "loads", wrong_loads)

assert set(reads["keys"]) == set(reads["values"]) == {16} and set(reads["block table"]) == {4}
assert loads == {}  # nothing else is read in the loop
THREADS, KEYS, NUMBERS, BYTES = 128, 32, 128, 2
assert THREADS * sum(reads["keys"]) == KEYS * NUMBERS * BYTES

# %% [markdown]
# Every key and value comes in pieces of 16 bytes, the most that a load can bring a thread here, and no program reads one
# twice. That is what we
# wanted to know. Here are the lines themselves, the first of each kind, and what holds for all of them:

# %% tags=["nbval-ignore-output"]
loop, shown = listing.within(listing.hot_loop), []
for instruction in loop:
    kind = instruction.opcode.split(".")[0], instruction.source
    if kind[0] in ("setp", "ld", "ex2", "cvt", "mad", "fma") and kind not in shown:
        shown.append(kind)
        where = "{}:{}".format(*instruction.source)
        print(f"{listing.rows[instruction.row].strip().expandtabs(1):<68}  {where}")

masked = [listing.rows[i.row].strip().startswith("@%p") for i in loop if i.load_bytes]
assert len(masked) == sum(map(len, reads.values())) and all(masked)
names = {instruction.opcode for instruction in loop}
assert {"mad.lo.s64", "cvt.f32.bf16", "fma.rn.f32"} <= names
assert any(name.startswith("ex2") for name in names)
assert not matrix_instructions(loop)

# %% [markdown]
# You can read more of it than you might think. `setp.lt` compares: it makes the mask `%p`. A line that starts with `@%p`
# is carried out only by threads where `%p` is true: **a mask costs no branch**. `ld.global.v4.b32` loads four times 32 bits.
# `mad.lo.s64` multiplies block and stride, in 64 bits. `cvt.f32.bf16` widens a number, `fma` multiplies and adds, `ex2` is the
# exponential of the softmax. There is no matrix instruction: a program with one query row has no matrices to multiply.
#
# Other cards, from the command that does this for every kernel of the engine, `minipaged kernels`. (A register is *spilled* when
# a thread has more numbers at hand than registers: the rest go to memory and back.)

# %%
CARDS = {"sm_75": "T4", "sm_90": "H100", "gfx942": "MI300X"}
asked = [word for name in CARDS for word in ("--target", name)]
printed = compiling_process("-m", "minipaged", "kernels", "--json", "--kernel", "decode", *asked)
reports = {report["target"]: report for report in json.loads(printed)}
table(
    ["card", "bytes of a load of keys", "bytes of spilled registers"],
    [
        (f"{CARDS[name]} ({name})", report["load_bytes"]["key_cache_ptr"], report["spill_bytes"])
        for name, report in reports.items()
    ],
)
for report in reports.values():
    assert set(report["load_bytes"].values()) == {16} and report["spill_bytes"] == 0

# %% [markdown]
# How fast it is has to be measured on a card; lesson 07 shows what has been recorded.
#
# ## The picture
#
# The programs of the decode launch above. Each strip is a program, here one of them in blue; each piece of it is a tile, pale
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
    f"{math.prod(launch.grid)} programs; sequences of {LENGTHS} keys take {tiles} tiles each",
)

# %% [markdown]
# Two things catch the eye. The programs are unequal: a long sequence keeps its programs busy while the others have ended.
# And three neighbours read the same [KV head](../docs/glossary.md#gqa), each for itself. Lesson 07 does something about both.
#
# Now one program, step by step, on smaller numbers: blocks of 4, tiles of 8, 18 keys.

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


Stepper(triton.cdiv(KEYS_SEEN, LANES), draw, start=1)

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
assert all(torch.allclose(answer, output, atol=1e-5) for answer in by_tile)

# %% [markdown]
# **Why 16 bytes at a time?** Because the compiler *knows* that it may. It was told that the cache begins at a multiple of 16
# bytes and that the strides are multiples of 16 numbers. Compile it once more, with heads that lie 136 numbers apart:

# %%
apart = loads_of(Listing.parse(compiling_process("-c", COMPILE, "136")))[LINES["keys"]]
print(len(apart), "loads of", apart[0], "bytes each")
assert set(apart) == {2} and sum(apart) == sum(reads["keys"])
assert 136 * BYTES % 16 == 0 and 136 % 16 != 0

# %% [markdown]
# The same bytes, in eight times as many instructions. They would even lie at multiples of 16 bytes; but all that the
# compiler is told of a stride is whether it is a multiple of 16. In the engine's cache all strides are multiples of the head
# size, so a head size that is a multiple of 16 is enough. The answers are the same either way: only the listing tells.
#
# **Why `exp2` in the code, where softmax has $e^x$?** The hardware has a power of two, `ex2`. $e^x = 2^{x \log_2 e}$, and the
# factor is put into the scale, once, outside the loop.
#
# **Why does it keep a maximum, and change it?** The softmax needs the largest score to stay in range, and a program that sees
# its keys tile by tile does not know it yet. So it takes the largest *so far* and rescales when a larger one comes: the
# [online softmax](../docs/glossary.md#online-softmax), a subject of lesson 07.
#
# ## The code as it stands
#
# The kernel, as it was interpreted and as it was compiled; then what launches it.

# %%
show_source(decode_kernel.fn, decode_launch)

# %% [markdown]
# Read it with four questions. Which lines depend on the program's number? Which lanes are masked, and what do they get? Where
# does a table entry become an address? What is kept from one tile to the next?
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a lane that is not real reads nothing and writes nothing | the neighbour's memory, or a crash |
# | every masked load says what masked lanes get | right in the interpreter, random on a GPU |
# | tile size and block size do not change the answer | wrong for one length in many |
# | ids are widened before they are multiplied | wrong in large pools only |
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
assert torch.equal(again, output) and not output.isnan().any()

# %% [markdown]
# The last row does *not* hold. Add 2.5 and 2 with our own kernel, in two number formats of 16 bits:


# %%
def added(dtype):
    a, b, out = (torch.tensor([x], dtype=dtype) for x in (2.5, 2.0, 0.0))
    add_kernel[(1,)](out, a, b, 1, TILE=1)
    return out


print("float16:", float(added(torch.float16)), "  bfloat16:", float(added(torch.bfloat16)))
assert added(torch.float16) == 4.5
bits = torch.tensor([2.5, 2.0], dtype=torch.bfloat16).view(torch.int16)
assert torch.equal((bits[0] + bits[1]).view(torch.bfloat16), added(torch.bfloat16)[0])

# %% [markdown]
# No error, no warning. NumPy has no bfloat16, so the interpreter keeps the *bit patterns*, as integers, and adds those, as
# the last line has shown. A GPU would say 4.5. So a test in bfloat16 can fail here for a right kernel, or pass for a wrong
# one. The two kernels above widen what they load to float32 at once. Then the interpreter is right in bfloat16 as well, as far
# as the format goes:

# %%
narrow = spoiled_layer(replace(spec, dtype=torch.bfloat16))
for ours, theirs in ((narrow.key, layer.key), (narrow.value, layer.value)):
    ours.copy_(theirs)
narrow_query, answer = query.bfloat16(), torch.empty_like(query, dtype=torch.bfloat16)
decode_launch(answer, narrow_query, narrow, decode, scale).run()
wanted = ReferenceBackend().paged_attention(narrow_query, narrow, decode, scale=scale)
assert float((answer.float() - wanted.float()).abs().max()) < 2e-2

# %% [markdown]
# ## Find the bug
#
# Another engine keeps all layers of a block side by side, so that one copy moves a block. For months its kernel was
# right. Then it was moved to a larger card, with a larger pool. In the morning all was well. In the evening, with the pool
# nearly full, some requests answered nonsense, and once the process died of an illegal memory access. Here is how the kernel
# finds its slots, alone; and its test, which has always passed: any blocks of a pool of a thousand, with thirty layers of
# SmolLM2.


# %%
@triton.jit
def places_kernel(
    out_ptr, block_table_ptr, length, stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = positions < length
    blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=real, other=0)
    offsets = blocks * stride + positions % BLOCK_SIZE * 192  # 192: three KV heads of 64 numbers
    tl.store(out_ptr + positions, offsets, mask=real)


# %%
def places_of(kernel, blocks, block_size, stride):
    """Where each token of a sequence begins in the cache, counted in numbers."""
    length = len(blocks) * block_size
    out = torch.empty(length, dtype=torch.int64)
    block_table = torch.tensor(blocks, dtype=torch.int32)
    grid = (triton.cdiv(length, 1024),)
    kernel[grid](out, block_table, length, stride, BLOCK_SIZE=block_size, TILE=1024)
    return out


STRIDE = 30 * 16 * 3 * 64  # layers, tokens, KV heads, numbers: what lies between two blocks
blocks = np.random.default_rng(7).permutation(1000)[:100].tolist()
expected = [block * STRIDE + offset * 192 for block in blocks for offset in range(16)]
assert places_of(places_kernel, blocks, 16, STRIDE).tolist() == expected

# %% [markdown]
# **What is wrong, and how many blocks does it work for? Decide first.**

# %%
my_right_blocks = None  # your guess

# %%
many = list(range(40_000))
found = places_of(places_kernel, many, 1, STRIDE)  # one token each
right = torch.tensor(many) * STRIDE
first_bad = int((found != right).nonzero()[0])
print(
    f"block {first_bad} begins at {int(right[first_bad])}, the kernel says {int(found[first_bad])}"
)
compare(my_right_blocks, first_bad, "blocks are right")

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Entries of a block table are 32-bit integers, and so is a stride. Their product is one too, and wraps around at $2^{31}$, to
# a *negative* place. The pool of the test was too small to get there. With two bytes for each number that takes only some
# gigabytes of keys, which many cards have room for. In the morning the pool handed out low blocks; in the evening the high
# ones were in use.
#
# It is the overflow of lesson 04, now inside a kernel (there, with blocks 276 480 numbers apart, it began at block 7768). The
# cure is one word: widen the id *before* multiplying. Widening the product comes too late.
# </details>
#
# The proof, and the engine's own arithmetic, which you read above, at the same blocks:


# %%
@triton.jit
def widened_places_kernel(
    out_ptr, block_table_ptr, length, stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    blocks = look_up_blocks(block_table_ptr, positions, length, BLOCK_SIZE)
    offsets = slot_offsets(blocks, positions, stride, 192, BLOCK_SIZE)
    tl.store(out_ptr + positions, offsets, mask=positions < length)


assert torch.equal(places_of(widened_places_kernel, many, 1, STRIDE), right)
assert first_bad == math.ceil(2**31 / STRIDE) and found[first_bad] == right[first_bad] - 2**32
assert math.ceil(2**31 / 276_480) == 7768
say(f"The keys of {first_bad} blocks take {first_bad * STRIDE * 2 / 2**30:.1f} GiB in 16 bits.")

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A head has 80 numbers. What does a tile for it look like, and what happens in a write kernel without a mask?</summary>
#
# 128 lanes, the next power of two, of which 48 are idle. Without a mask those write into the next head: the answer is
# fluent and wrong, and may differ from run to run, as nothing says which of the two writes comes last.
# </details>
#
# <details><summary>2. Why is a masked load that does not say <code>other=</code> a trap?</summary>
#
# The interpreter gives masked lanes 0; a GPU may give anything. The test passes, the card does not.
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
#
# <details><summary>5. A listing shows loads of 2 bytes for the keys. Is the kernel wrong? Should you care?</summary>
#
# The results are right. But a thread needs eight instructions where one would do, and a kernel that spends its time reading
# memory will not keep the memory busy.
# </details>

# %% [markdown]
# ## Summary
#
# - A kernel is written for one program: its number, its tile, its mask. The grid says how many there are.
# - `write_kv` has a program for each token, `decode` one for each sequence and query head.
# - Each lane looks up its own block, so tile and block are independent.
# - The interpreter shows whether a kernel is right, except in bfloat16; the compiler's listing shows how it reads, without a
#   card. How fast it is, only a card shows.
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
# - NVIDIA, [*PTX ISA*](https://docs.nvidia.com/cuda/parallel-thread-execution/): the instructions of the listing.
