# %% [markdown]
# # 08 · Study: one kernel for every step
#
# A study beside [lesson 08](../08_prefill_and_chunks.ipynb). The engine has one Triton kernel for everything that has
# more than one query in it: whole prompts, chunks, what is left after a prefix hit, decodes beside them. How does a
# program of it know for whom it works, and what does a chunk cost? Triton exists for Linux and Windows; elsewhere, read
# the stored outputs.

# %%
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This study needs Triton (Linux, Windows): read the stored outputs here.")

import math

import numpy as np
import torch

from minipaged import AttentionBatch, KVSpec
from minipaged.attention.kernels.addresses import sequence_of_tile
from minipaged.attention.kernels.arguments import Tile
from minipaged.attention.kernels.prefill import prefill_kernel, prefill_launch
from minipaged.attention.reference import ReferenceBackend
from minipaged.attention.targets import TARGETS
from coursekit.given.layers import written_layer
from coursekit.interpreted import reversed_programs
from coursekit.lesson import say, show_source, table

# %% [markdown]
# ## Five sequences, one launch
#
# A program takes a [tile](../../docs/glossary.md#tile) of rows: as many consecutive tokens of one sequence as fit, times
# the query heads that share a KV head. The heads are small, since this runs in the interpreter; the pool is full of NaN
# where no sequence is; the float64 reference says what is right. (`num_warps` and `num_stages` matter on a card only.)

# %%
STEP = {  # new tokens, tokens in all
    "a whole prompt": (11, 11),
    "a first chunk": (8, 8),
    "a later chunk": (7, 21),
    "after a prefix hit": (3, 19),
    "a decode": (1, 14),
}
BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 4, 6, 2, 16
new, seen = map(list, zip(*STEP.values(), strict=True))
order = np.random.default_rng(8).permutation(24).tolist()
tables = [[order.pop() for _ in range(math.ceil(n / BLOCK_SIZE))] for n in seen]
step = AttentionBatch.build(tables, new, seen, BLOCK_SIZE)
table(["a step", "new tokens", "keys"], [(name, *pair) for name, pair in STEP.items()])

# %%
spec = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
generator = torch.Generator().manual_seed(8)
layer = written_layer(spec, 24, BLOCK_SIZE, tables, seen, generator)
query = torch.randn(sum(new), HEADS, SIZE, generator=generator)
expected = ReferenceBackend().paged_attention(query, layer, step, scale=SIZE**-0.5)
tile = Tile(rows=16, keys=16, num_warps=4, num_stages=1)


def by_kernel(query, batch):
    output = torch.full_like(query, torch.nan)
    options = {"target": TARGETS["sm_90"], "tile": tile}
    launch = prefill_launch(output, query, layer, batch, SIZE**-0.5, **options)
    launch.run()
    return output, launch


output, launch = by_kernel(query, step)
print("largest error over the five sequences:", f"{float((output - expected).abs().max()):.0e}")
assert torch.allclose(output, expected, atol=1e-5)

# %% [markdown]
# Right for all five. Does each get the same when it is computed alone, and when the programs run in reverse?

# %%
parts = zip(tables, new, seen, query.split(new), output.split(new), strict=True)
for blocks, n, context, rows, ours in parts:
    alone = AttentionBatch.build([blocks], [n], [context], BLOCK_SIZE)
    assert torch.equal(by_kernel(rows.contiguous(), alone)[0], ours)
with reversed_programs():
    assert torch.equal(by_kernel(query, step)[0], output)
print("all five, alone, together and in reverse: equal, bit for bit")

# %% [markdown]
# ## Which program works for whom?
#
# The grid is one long line of tiles, and sequences need different numbers of them. The trick, taken from vLLM, is to
# give each sequence *one tile more* than its tokens might fill. With tiles of 8 tokens:
#
# ```
# tokens       |  A: 20 tokens           | B: 1 |  C: 9 tokens    |     query_start  0, 20, 21
# tiles        |  A 8  |  A 8  |  A 4  |  B 1  |  C 8  |  C 1  |        first tiles  0,  3,  4
#                 0       1       2       3       4       5              = query_start // 8 + number of the sequence
# ```
#
# So no list is needed: a program finds its sequence by binary search in `query_start`. In plain Python, for the step
# above, every tile and what it has to do:

# %%
GROUP = HEADS // KV_HEADS  # query heads that share a KV head
TOKENS = tile.rows // GROUP  # tokens of a tile
starts = step.query_start.tolist()
first_tiles = [start // TOKENS + i for i, start in enumerate(starts[:-1])]
work = []
for program in range(launch.grid[1]):
    i = max(i for i, first in enumerate(first_tiles) if first <= program)
    first = (program - first_tiles[i]) * TOKENS
    work.append((f"{program}: {list(STEP)[i]}", max(0, min(TOKENS, new[i] - first))))
table([f"tile of {TOKENS} tokens", "tokens in it"], work)
idle = sum(tokens == 0 for _, tokens in work)
say(f"""
    {len(work)} tiles, of which {idle} have nothing to do and end at once. {TOKENS} tokens of
    {GROUP} heads use {TOKENS * GROUP} of the {tile.rows} rows of a tile.
""")
assert sum(tokens for _, tokens in work) == sum(new) and idle < len(new)

# %% [markdown]
# There can never be more idle tiles than sequences. A rectangle of programs, as wide as the longest sequence, would be
# the padding that the lesson has just got rid of.
#
# In the kernel, look for three places: where a program finds its sequence, where the corner of the mask is (`seen`), and
# what a program without tokens does.

# %%
show_source(prefill_kernel.fn, sequence_of_tile.fn)

# %% [markdown]
# ## Every cut
#
# The later chunk's sequence again: its prompt in one piece, then cut into two chunks in every way, and into three in
# some.

# %%
LENGTH, where = seen[2], tables[2]
queries = torch.randn(LENGTH, HEADS, SIZE, generator=generator)
wanted, _ = by_kernel(queries, AttentionBatch.build([where], [LENGTH], [LENGTH], BLOCK_SIZE))
cuts = [(cut, LENGTH) for cut in range(1, LENGTH)]
cuts += [(4, 9, LENGTH), (1, 2, LENGTH), (5, 16, LENGTH)]
for stops in cuts:
    pieces, start = [], 0
    for stop in stops:
        chunk = AttentionBatch.build([where], [stop - start], [stop], BLOCK_SIZE)
        pieces.append(by_kernel(queries[start:stop], chunk)[0])
        start = stop
    assert torch.allclose(torch.cat(pieces), wanted, atol=1e-6)
print(len(cuts), "ways to cut", LENGTH, "tokens: all the same, up to rounding")

# %% [markdown]
# ## What does a chunk cost?
#
# It reads all the keys before it again. For a prompt of 4096 tokens and Llama 3 8B in 16 bits:

# %%
llama = KVSpec(num_layers=1, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
CONTEXT, WEIGHTS = 4096, 8.03e9 * 2
rows = []
for chunk in (4096, 1024, 512, 64):
    read = sum(range(chunk, CONTEXT + 1, chunk))  # keys that the chunks read, one after the other
    kv_bytes, weight_bytes = 32 * read * llama.bytes_per_token, CONTEXT // chunk * WEIGHTS
    rows.append((str(chunk), CONTEXT // chunk, read / CONTEXT, kv_bytes / 1e9, weight_bytes / 1e9))
    assert kv_bytes < 0.04 * weight_bytes
table(["chunk", "steps", "each key is read, times", "GB of K and V", "GB of weights"], rows)
assert rows[2][2] == (8 + 1) / 2

# %% [markdown]
# In $n$ chunks each key is read $(n + 1) / 2$ times on average. That looks bad, but is little beside the last column:
# what a chunk really costs is reading all the weights again. In a busy server even that is nearly free, because the
# decodes of those steps would have read the weights anyway. So chunks share their steps with decodes, and chunks are
# not tiny.
#
# Tiles without a list are those of vLLM's `triton_unified_attention.py` (pull request 16828).
