# %% [markdown]
# # 07 · A fast decode kernel
#
# Lesson 06 wrote a decode [kernel](../docs/glossary.md#kernel) that is right. Is it fast? To answer that we need to
# know how fast it *can* be, and two numbers of a card tell. Then the kernel is changed twice, and each change follows
# from counting.
#
# **You will be able to** compute the shortest time of a [decode](../docs/glossary.md#decode) step on a card you have
# never seen, take a softmax in one pass and in pieces, and explain why a healthy card stands idle.
#
# About 50 minutes. Runs in half a minute on two CPU cores, without a GPU: kernels run in Triton's interpreter, and one
# is compiled for a card that is not there. Triton exists for Linux and Windows; elsewhere, read along: the outputs are
# stored.

# %%
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This lesson needs Triton (Linux, Windows): read the stored outputs here.")
import json
import subprocess
import sys

import ipywidgets
import numpy as np
import torch

from minipaged import AttentionBatch, KVSpec, KVStorage
from minipaged.attention.reference import ReferenceBackend
from minipaged.attention.targets import TARGETS
from coursekit.figures import show
from coursekit.figures.programs import programs_over_time
from coursekit.figures.roofline import roofline
from coursekit.interpreted import counted_reads, reversed_programs
from coursekit.lesson import compare, number, say, show_source, table
from coursekit.multiprocessors import busy_share, decode_programs, run_programs
from coursekit.widgets import Explorable

# %% [markdown]
# ## The question
#
# A kernel takes 300 microseconds. Is that good? That depends on what the card had to do. So the question is: **what
# must a decode step do at the very least, and how long does the card need for it?** Any time beyond that can be saved.
#
# The step of this lesson: one layer of attention of Llama 3 8B (32 query heads on 8 KV heads of size 128, 16 bits), on
# an H200. Its data sheet has the two numbers: it reads memory at 4.8 TB/s, and its [tensor
# cores](../docs/glossary.md#tensor-core), the units that multiply small matrices, do 989 TFLOP/s (10¹² multiplications
# or additions a second) in 16 bits.

# %% [markdown]
# ## Your prediction
#
# 1. Tensor cores take at least 16 rows at a time. In SmolLM2 three query heads share a KV head, so three rows are
#    padded to 16. How many percent longer does decode attention take on an H200 because of the thirteen empty rows?
# 2. The kernel of lesson 06 reads each key of Llama 3 four times, once for each query head that shares it. A better
#    one reads it once. How many times faster is that for *one* conversation of 32 768 tokens on an H200?
# 3. The same conversation is cut into 64 parts that can be computed side by side. How many times sooner is it done?

# %%
my_percent_longer = None  # your guess
my_gain_of_reading_once = None  # your guess
my_gain_of_64_parts = None  # your guess

# %% [markdown]
# ## Measure
#
# ### Bytes and operations
#
# A decode step reads every key and every value of every conversation once. For each conversation it also reads a query
# and writes an output. Each query head multiplies and adds once for every number of a key, and once for every number of
# a value.

# %%
HEADS, KV_HEADS, SIZE, BYTES = 32, 8, 128, torch.bfloat16.itemsize
spec = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16)


def least_bytes(contexts, queries=1):
    """Keys and values once, queries in, outputs out."""
    return sum(contexts) * spec.bytes_per_token + 2 * len(contexts) * queries * HEADS * SIZE * BYTES


def operations(contexts):
    """Query times key, and weight times value: a multiplication and an addition each."""
    return 2 * 2 * sum(contexts) * HEADS * SIZE


contexts = [4096] * 32
step_bytes, step_operations = least_bytes(contexts), operations(contexts)
intensity = step_operations / step_bytes
say(f"""
    {number(round(step_bytes / 1e6))} MB and {number(round(step_operations / 1e9, 1))} billion
    operations: **{intensity:.1f} operations for each byte**.
""")
assert 3.99 < intensity < 4 == HEADS // KV_HEADS

# %% [markdown]
# That quotient is called [arithmetic intensity](../docs/glossary.md#arithmetic-intensity). Contexts and batch have
# cancelled out. In 16 bits it is the number of query heads per KV head, and nothing else: each number of a key is two
# bytes, and each query head does two operations with it.
#
# ### The two numbers of a card
#
# A card has such a quotient too: operations per second over bytes per second. It says how many operations the card
# could do while it reads one byte. A kernel below it waits for memory, a kernel above it waits for arithmetic. Reading
# and arithmetic go on at the same time, so a step takes the *longer* of the two times. (The numbers are those of the
# vendors' data sheets.)

# %%
CARDS = {  # bytes per second; operations per second, dense products in 16 bits
    "H200": (4800e9, 989e12),
    "H100-SXM": (3350e9, 989e12),
    "A100-80GB": (2039e9, 312e12),
    "T4": (320e9, 65e12),
    "MI300X": (5300e9, 1307e12),
}
rows = []
for card, (bandwidth, flops) in CARDS.items():
    by_memory, by_arithmetic = step_bytes / bandwidth, step_operations / flops
    assert by_memory > 30 * by_arithmetic
    rows.append(
        (card, round(flops / bandwidth), round(1e6 * by_memory), round(1e6 * by_arithmetic, 1))
    )
table(["", "operations per byte", "reading, µs", "arithmetic, µs"], rows)

bandwidth, flops = CARDS["H200"]
floor = step_bytes / bandwidth
say(f"""
    On the H200 this layer cannot take less than **{1e6 * floor:.0f} µs**: {step_bytes / 1e6:.0f} MB
    at {bandwidth / 1e12} TB/s.
""")
assert 111e-6 < floor < 113e-6

# %% [markdown]
# It is the reading, on every card, by a factor of more than thirty. Decode is **bound by memory**: its time is its
# bytes over the bandwidth.
#
# And the whole model? A decode step also reads all weights, once for the whole batch.

# %%
weights = 8.03e9 * BYTES  # Llama 3 8B has 8.03 billion parameters
kv = {batch: 32 * spec.bytes_per_token * 4096 * batch for batch in (1, 8, 32, 128)}  # 32 layers
rows = [(f"{batch} × 4096", weights / 1e9, k / 1e9, k / (k + weights)) for batch, k in kv.items()]
table(["conversations", "weights, GB", "keys and values, GB", "share of keys and values"], rows)
assert kv[1] < 0.05 * weights and kv[32] > weights and kv[128] > 4 * weights

# %% [markdown]
# With one conversation the keys and values hardly count. From about thirty on they are most of what a step reads, and
# thirty at once is exactly what paging makes possible. So the kernel that reads them decides.
#
# ### What the readable kernel reads
#
# Now the kernel of lesson 06. In the interpreter every load is a call, and `counted_reads` adds up what is loaded from
# the cache. Small shapes with SmolLM2's ratio, three query heads on each KV head. The pool is filled with NaN, so that
# reading a wrong slot shows, then two sequences are written into it; the float64 reference says what is right.

# %%
from minipaged.attention.kernels.decode import decode_launch
from minipaged.attention.kernels.decode_grouped import decode_grouped_launch

LENGTHS, BLOCK_SIZE, GROUP, SCALE, TARGET = [40, 17], 16, 3, 64**-0.5, TARGETS["sm_90"]
small_spec = KVSpec(num_layers=1, num_kv_heads=3, head_size=64, dtype=torch.float32)
generator = torch.Generator().manual_seed(7)
storage = KVStorage(small_spec, 8, BLOCK_SIZE)
for tensor in storage.tensors:
    tensor.fill_(torch.nan)
layer, block_lists = storage.layer(0), [[6, 1, 4], [0, 3]]
tokens = AttentionBatch.build(block_lists, LENGTHS, LENGTHS, BLOCK_SIZE)
new_rows = [torch.randn(sum(LENGTHS), 3, 64, generator=generator) for _ in range(2)]
layer.write(tokens.slot_mapping, *new_rows)
batch = AttentionBatch.build(block_lists, [1, 1], LENGTHS, BLOCK_SIZE)
query = torch.randn(2, 3 * GROUP, 64, generator=generator)
expected = ReferenceBackend().paged_attention(query, layer, batch, scale=SCALE)
print(
    "two sequences of",
    LENGTHS,
    "tokens,",
    sum(LENGTHS) * small_spec.bytes_per_token,
    "bytes of K and V",
)

# %%
ways = {
    "decode": (decode_launch, {}),
    "decode_grouped": (decode_grouped_launch, {"target": TARGET}),
}
live_bytes = sum(LENGTHS) * small_spec.bytes_per_token
read = {}
for name, (launch, options) in ways.items():
    output = torch.full_like(query, torch.nan)
    with counted_reads(layer.key, layer.value) as reads:
        launch(output, query, layer, batch, SCALE, **options).run()
    assert torch.allclose(output, expected, atol=1e-5)
    read[name] = reads.num_bytes
table(
    ["kernel", "bytes read", "÷ bytes that are there"],
    [(k, n, n / live_bytes) for k, n in read.items()],
)
assert read == {"decode": GROUP * live_bytes, "decode_grouped": live_bytes}

# %% [markdown]
# Both are right, and one reads every key three times, once for each query head of the group: each head is a program of
# its own, and programs do not talk to each other. In Llama 3 8B it would be four times. A card's cache catches some of
# that when the programs of a group happen to run at the same time; a kernel should not depend on luck.
#
# ### Query heads in one tile
#
# `decode_grouped` gives all query heads of a KV head to *one* program. They become the rows of a small matrix, and
# query times keys becomes a matrix product, which is what tensor cores do. A product has at least 16 rows, so three
# heads are padded to 16, and thirteen rows compute nothing. Isn't that a waste?

# %%
from minipaged.attention.kernels.arguments import decode_tile

tile = decode_tile(TARGET, GROUP, 64, BYTES)


def seconds_on_h200(rows_computed):
    """Reading a key and a value in 16 bits, or computing with them: the longer of the two."""
    return max(2 * BYTES / bandwidth, 2 * 2 * rows_computed / flops)


longer = 100 * (seconds_on_h200(tile.rows) / seconds_on_h200(GROUP) - 1)
wrong_longer = {
    433: "that is how much more is computed; but arithmetic was waiting for memory anyway",
    81: "thirteen of sixteen rows are empty, but they cost no time: memory is the limit",
}
compare(my_percent_longer, round(longer), "percent longer", wrong_longer)
operations_a_byte = 2 * 2 * tile.rows / (2 * BYTES)
say(f"""
    Padded to {tile.rows} rows the tile does {operations_a_byte:.0f} operations a byte instead of
    {GROUP}. The H200 could do {flops / bandwidth:.0f} while it reads that byte.
""")
assert tile.rows == operations_a_byte == 16 and longer == 0
assert all(f / b / 8 > 16 for b, f in CARDS.values())

# %% [markdown]
# The empty rows cost nothing. That is what a bound is good for: it says which waste matters. In one drawing, the
# [roofline](../docs/glossary.md#roofline): on the slope memory decides, on the flat part arithmetic does.

# %%
PROMPT = 2048
pairs = PROMPT * (PROMPT + 1) // 2  # a token sees itself and what came before
prefill = operations([pairs]) / least_bytes([PROMPT], queries=PROMPT)
padded_rows = (
    2 * 2 * 16 / (2 * BYTES)
)  # operations for each byte, when 4 heads are padded to 16 rows
assert intensity < padded_rows < flops / bandwidth < prefill
stands = {"decode": intensity, "decode, padded": padded_rows, "prefill": prefill}
show(
    roofline({"H200": CARDS["H200"], "T4": CARDS["T4"]}, stands, hollow=["decode, padded"]),
    "Two roofs, a slope and then flat. Decode is far down the slope; padded to 16 rows (the hollow "
    "mark) it still is. Prefill stands under the flat part.",
)

# %% [markdown]
# The hollow mark is decode with its heads padded to 16 rows: four times the operations, three quarters of them for
# nothing. It looks faster, but the time is the same: only the useless part has grown.
# [Prefill](../docs/glossary.md#prefill) reads a key once for a whole prompt of queries, so arithmetic is its limit.
# Both are limits of cards. A processor's is elsewhere: on the one that built this page, padded rows are *not* free, as
# the study [This processor](extra/07_this_processor.ipynb) measures.
#
# ### Who has work?
#
# Reading each key once instead of four times: is that four times as fast? A program runs on one
# [multiprocessor](../docs/glossary.md#multiprocessor) from start to end. One conversation on 8 KV heads is 8 programs,
# however long it is, and an H200 has 132 multiprocessors. `run_programs` is a small model of a card: each program goes
# to the multiprocessor that is free first, and all read equally fast.

# %%
H200, LONG = TARGETS["sm_90"].num_multiprocessors, 32768  # as many as an H100 has
each_head = run_programs(decode_programs([LONG], HEADS, part_len=LONG), H200)
whole = run_programs(decode_programs([LONG], KV_HEADS, part_len=LONG), H200)
done = {"a program per query head": each_head, "a program per KV head": whole}
rows = [
    (name, len(runs), round(100 * busy_share(runs, H200)), max(run.stop for run in runs))
    for name, runs in done.items()
]
table(["one conversation", "programs", "% of multiprocessors at work", "done after, in keys"], rows)
gain = rows[0][3] / rows[1][3]
wrong_gain = {
    4: "a quarter of the bytes, yes; but also a quarter of the programs, each as long as before"
}
compare(my_gain_of_reading_once, gain, "times as fast", wrong_gain)
assert (len(whole), H200, gain) == (8, 132, 1.0)

# %% [markdown]
# Nothing gained! A quarter of the bytes, and a quarter of the programs to read them. The other 124 multiprocessors
# wait. With many conversations it is different: all multiprocessors have work either way, and reading once saves three
# quarters of the bytes. A single long one must be cut. For that, softmax has to work in pieces.
#
# ### Softmax in one pass
#
# The kernel walks over the keys tile by tile and never holds all scores. But softmax divides by a sum over *all* of
# them, after subtracting the largest of *all*. Four scores are enough to see how it is done. First in two passes:

# %%
scores, values = np.array([1.0, 3.0, 2.0, 5.0]), np.array([10.0, 20.0, 30.0, 40.0])
softmax_weights = np.exp(scores - scores.max())
two_passes = (softmax_weights * values).sum() / softmax_weights.sum()
with np.errstate(over="ignore"):
    assert np.isinf(np.exp(np.float32(scores[-1] + 85)))  # why the largest is subtracted
print("two passes:", round(two_passes, 4))

# %% [markdown]
# Now in one pass, the [online softmax](../docs/glossary.md#online-softmax). Keep three numbers: the largest score so
# far $m$, the sum of weights $s$ and the weighted sum of values $a$, both relative to $m$. Two such summaries, $(m_1,
# s_1, a_1)$ and $(m_2, s_2, a_2)$, make one:
#
# $$m = \max(m_1, m_2), \qquad s = s_1 e^{m_1 - m} + s_2 e^{m_2 - m}, \qquad a = a_1 e^{m_1 - m} + a_2 e^{m_2 - m}$$
#
# A single key with score $x$ and value $v$ is the summary $(x, 1, v)$; no key at all is $(-\infty, 0, 0)$.

# %%
NOTHING = (-np.inf, 0.0, 0.0)


def together(one, other):
    """Two summaries as one."""
    largest = max(one[0], other[0])
    shift = 0.0 if largest == -np.inf else largest  # see below
    left, right = np.exp(one[0] - shift), np.exp(other[0] - shift)
    return largest, one[1] * left + other[1] * right, one[2] * left + other[2] * right


seen, rows = NOTHING, []
for score, value in zip(scores, values, strict=True):
    before = seen[0]
    seen = together(seen, (score, 1.0, value))
    rows.append((f"{score:g}", seen[0], seen[1], seen[2], float(np.exp(before - seen[0]))))
table(["score", "m", "s", "a", "old sums ×"], rows)
assert abs(seen[2] / seen[1] - two_passes) < 1e-12
print("one pass:", round(seen[2] / seen[1], 4))

# %% [markdown]
# The last column is the price: when a larger score comes, the old sums are scaled down. When none comes, they are
# multiplied by one.
#
# **And minus infinity?** Masked keys have that score. A row that sees *nothing* yet, such as an empty one, has the
# maximum $-\infty$, and $-\infty - (-\infty)$ is not zero. It is NaN, and once a sum is NaN it stays NaN. So the shift
# is taken as 0 there. The weights are then $e^{-\infty} = 0$, as they should be.

# %%
with np.errstate(invalid="ignore"):
    assert np.isnan(np.exp(-np.inf - -np.inf))
assert together(NOTHING, NOTHING) == NOTHING
assert together(NOTHING, (-60000.0, 1.0, 7.0)) == (-60000.0, 1.0, 7.0)  # very low, and yet visible
assert together(seen, NOTHING) == seen == together(NOTHING, seen)
for words, one in (("nothing", NOTHING), ("a key", (-9.0, 1.0, 7.0))):
    print(f"nothing and {words}:", *map(float, together(NOTHING, one)))

# %% [markdown]
# ### In pieces
#
# The formula works for a summary of one key, of a tile, or of half a conversation. So a conversation can be cut into
# parts for several programs, and the parts put together at the end. What is stored of a part is its average $a / s$ and
# its [log-sum-exp](../docs/glossary.md#log-sum-exp) $m + \log s$, which says how much the average weighs. (In float32
# that sum has a limit: near −60 000 its steps are 0.004. Scores of a real model are nowhere near.)

# %%
parts = []
for piece in (slice(0, 3), slice(3, 4), slice(4, 4)):  # the last is empty
    part = NOTHING
    for score, value in zip(scores[piece], values[piece], strict=True):
        part = together(part, (score, 1.0, value))
    if part[1] > 0:
        parts.append((part[2] / part[1], part[0] + np.log(part[1])))
averages, log_sum_exps = np.array(parts).T
part_weights = np.exp(log_sum_exps - log_sum_exps.max())
assert len(parts) == 2
assert abs((part_weights * averages).sum() / part_weights.sum() - two_passes) < 1e-12
print(
    "in three parts, one empty:",
    round(float((part_weights * averages).sum() / part_weights.sum()), 4),
)

# %% [markdown]
# [Split-KV](../docs/glossary.md#split-kv), also called Flash-Decoding, cuts the context this way. How long should a
# part be? Short enough that every multiprocessor gets several programs, and long enough that starting a program is
# worth it. `keys_per_part` decides from the batch and the card. Cutting also has a price: each part writes an average
# and a log-sum-exp in float32, and a second kernel reads them.

# %%
from minipaged.attention.kernels import arguments

rows = []
for count, context in ((1, LONG), (1, 2048), (4, 8192), (32, 4096), (128, 4096)):
    part_len = arguments.keys_per_part(count, KV_HEADS, context, H200)
    shares = []
    for keys in (context, part_len):
        runs = run_programs(decode_programs([context] * count, KV_HEADS, keys), H200)
        shares.append(round(busy_share(runs, H200), 2))
    rows.append((f"{count} × {context}", part_len, count * KV_HEADS, len(runs), *shares))
table(["batch", "keys per part", "programs", "programs, cut", "share used", "share, cut"], rows)
assert rows[0][1:4] == (512, 8, 512) and rows[0][5] >= 0.95

num_parts = LONG // arguments.keys_per_part(1, KV_HEADS, LONG, H200)
extra = 2 * num_parts * HEADS * (SIZE + 1) * 4 / least_bytes([LONG])
say(f"For the long conversation: {num_parts} parts, and **{100 * extra:.1f} %** more bytes.")
assert num_parts == 64 and extra < 0.02

# %% [markdown]
# The last two batches gain nothing. They are cut all the same, because a part has at most 2048 keys: in a real batch one
# conversation is longer than the others, and uncut it would keep a single multiprocessor busy after all others have
# finished.

# %% [markdown]
# ## The picture
#
# The long conversation on the card, first in one piece per KV head, then cut. Each row is a multiprocessor.

# %%
part_len = arguments.keys_per_part(1, KV_HEADS, LONG, H200)
cut = run_programs(decode_programs([LONG], KV_HEADS, part_len), H200)
finished = {name: max(run.stop for run in runs) for name, runs in (("whole", whole), ("cut", cut))}
assert finished == {"whole": LONG, "cut": LONG // 16}
show(
    programs_over_time({"one program per KV head": whole, f"parts of {part_len} keys": cut}, H200),
    "Above a thin blue line in a grey field; below the same work, a blue block that is done early.",
)
wrong_sooner = {
    64: "64 parts, but on 8 KV heads they make 512 programs for 132 multiprocessors, which "
    "take turns; before, 8 of them were at work",
    16.5: "132 multiprocessors instead of 8, almost: 512 programs do not go evenly into 132",
}
compare(my_gain_of_64_parts, finished["whole"] / finished["cut"], "times sooner", wrong_sooner)

# %% [markdown]
# That is *in this model*: every multiprocessor reads at the same rate, whatever the others do. A real card has one
# memory for all, and lets several programs share a multiprocessor. The model says who has work, not how long it takes.
#
# Try it. When does cutting stop mattering? Which card needs it most?


# %%
def card_at_work(card, sequences, context, part):
    count = TARGETS[card].num_multiprocessors
    chosen = arguments.keys_per_part(sequences, KV_HEADS, context, count)
    length = chosen if part == "chosen" else part
    lengths = {"not cut": context, f"parts of {length} keys": length}
    runs = {
        name: run_programs(decode_programs([context] * sequences, KV_HEADS, keys), count)
        for name, keys in lengths.items()
    }
    before, after = (busy_share(each, count) for each in runs.values())
    words = f"{sequences} × {context} keys: uncut, {before:.0%} of the time of {count} "
    words += f"multiprocessors is used; cut, {after:.0%}"
    return programs_over_time(runs, count), words


def choice(options, value, description):
    return ipywidgets.SelectionSlider(options=options, value=value, description=description)


controls = {
    "card": choice([(f"{t.card}", name) for name, t in TARGETS.items()], "sm_90", "card"),
    "sequences": choice([1, 2, 4, 8, 16, 32], 2, "sequences"),
    "context": choice([1024, 4096, 8192, 16384, 32768, 65536], 8192, "context"),
    "part": choice([2048, 1024, 512, 256, "chosen"], "chosen", "keys a part"),
}

# %%
Explorable(controls, card_at_work)

# %% [markdown]
# Cutting matters as long as the uncut programs leave multiprocessors without work. So the card with the most
# multiprocessors needs it most.
#
# ## Why
#
# **Why is decode so different from prefill?** Both do the same products. In prefill, a key that was read serves every
# later token of the prompt; in decode it serves one token, through the few query heads of its group. More conversations
# do not help: each brings its own keys. That is why batching speeds up the *weights* of a decode step and not its
# attention.
#
# **Why does one multiprocessor not read faster when the others are idle?** A load takes about a microsecond to come
# back. To read at full speed, enough bytes must be *on their way* at any moment: bandwidth × that time. How many are,
# the compiler knows: how many [tiles](../docs/glossary.md#tile) it fetches ahead into [shared
# memory](../docs/glossary.md#shared-memory), and how many programs fit on a multiprocessor. We compile the kernels for
# an H100 or H200, without having one, in a process of its own, because Triton in this one interprets.


# %%
command = [sys.executable, "-m", "minipaged", "kernels", "--json", "--target", "sm_90"]
command += ["--kernel", "decode_split"]
compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=True)
(report,) = [r for r in json.loads(done.stdout) if r["variant"] == "bf16 d128 g4"]
ahead, resident = max(report["buffers"].values()), report["resident"]

LATENCY = 1e-6  # seconds from asking to having; assumed, of the right order of magnitude
a_tile = 2 * decode_tile(TARGET, 4, SIZE, BYTES).keys * SIZE * BYTES  # keys and values
on_the_way = ahead * resident * a_tile
say(f"""
    {ahead} tiles ahead, {resident} programs at a time: {on_the_way / 1024:.0f} KiB on their way to
    a multiprocessor. **{bandwidth * LATENCY / 1e6:.1f} MB** are needed for full speed. With all
    {H200} at work, {H200 * on_the_way / 1e6:.0f} MB are on their way. With eight of them,
    **{8 * on_the_way / 1e6:.1f} MB**: not enough, however good the kernel.
""")
assert H200 * on_the_way > bandwidth * LATENCY > 8 * on_the_way

# %% [markdown]
# What else the compiler says (registers, spills, how wide the loads are, whether tensor cores are used), and what share
# of the bandwidth each kernel can reach at most, is in the study [What the compiler
# says](extra/07_what_the_compiler_says.ipynb). How fast the kernels *are* only a card can say; this course has not been
# run on one yet, and states no such number. `benchmarks/gpu_check.sh` measures it on yours.
#
# ## The code as it stands
#
# The heart of all the faster kernels is one function: a tile of query rows against a range of keys. Find in it the
# summary of three numbers, the shift for $-\infty$, and the look-up of blocks one tile ahead. (`visible` says how many
# keys each row may see, `COMPUTE` is the number format of the products, and the scales are for lesson 13.) Below it,
# the function that chooses how long a part is.

# %%
from minipaged.attention.kernels import attend, decode_grouped

show_source(attend.attend_keys.fn)
show_source(arguments.keys_per_part)

# %% [markdown]
# The kernels around it are short: [decode_grouped](../minipaged/attention/kernels/decode_grouped.py) finds the rows of
# a KV head and calls `attend_keys` on all keys, [decode_split](../minipaged/attention/kernels/decode_split.py) on the
# keys of one part, and [decode_combine](../minipaged/attention/kernels/decode_combine.py) adds up the parts. What is
# new in the first against lesson 06 is three lines:
#
# ```python
# row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
# heads = kv_head * GROUP + row
# used = (row < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
# ```
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | each key and value is read once | a multiple of the time, and the right answer: no test of results notices |
# | a row without keys has maximum −∞ and adds nothing | NaN, in one request out of many |
# | the number of parts does not change the answer | an answer changes as its conversation grows |
# | the order in which programs run does not matter | right here, wrong on a card |
#
# The last two. The third on three sequences, of which one has a single key and therefore empty parts; what the parts
# store starts as NaN, so reading an entry that was never written would show. For the fourth, `reversed_programs` lets the
# interpreter run the last program first.

# %%
from minipaged.attention.kernels.arguments import Tile
from minipaged.attention.kernels.decode_combine import decode_combine_launch
from minipaged.attention.kernels.decode_split import decode_split_launch

ragged = AttentionBatch.build([[6, 1, 4], [0, 3], [1]], [1, 1, 1], [40, 17, 1], BLOCK_SIZE)
three = torch.randn(3, 3 * GROUP, 64, generator=generator)
right = ReferenceBackend().paged_attention(three, layer, ragged, scale=SCALE)
sixteen = Tile(rows=16, keys=16, num_warps=4, num_stages=2)
for part_len in (16, 32, 48):
    average, log_sum_exp = torch.full((3, 9, 3, 64), torch.nan), torch.full((3, 9, 3), torch.nan)
    output = torch.full_like(three, torch.nan)
    split = (average, log_sum_exp, three, layer, ragged, SCALE)
    decode_split_launch(*split, part_len=part_len, tile=sixteen).run()
    decode_combine_launch(output, average, log_sum_exp, ragged, part_len=part_len).run()
    assert torch.allclose(output, right, atol=1e-5)
print("cut into parts of 16, 32 and 48 keys: equal to the float64 reference")

forward, backward = torch.empty_like(query), torch.empty_like(query)
decode_grouped_launch(forward, query, layer, batch, SCALE, target=TARGET).run()
with reversed_programs():
    decode_grouped_launch(backward, query, layer, batch, SCALE, target=TARGET).run()
assert torch.equal(forward, backward)
print("programs in reverse order: bit for bit the same")

# %% [markdown]
# ## Find the bug
#
# A colleague found the condition `row < GROUP` superfluous: nobody looks at the padded rows. In a copy of the file she
# took it out, in one line. Her test, one sequence with SmolLM2's nine heads on three, passed in the interpreter. On a
# card the same test gives nonsense, now and then, and never the same twice; a model with a single KV head is right even
# there.

# %%
import importlib.util
import tempfile
from pathlib import Path

text = Path(decode_grouped.__file__).read_text()
careful = "used = (row < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]"
careless = "used = (row >= 0)[:, None] & (dims < HEAD_SIZE)[None, :]"
assert text.count(careful) == 1
file = Path(tempfile.mkdtemp()) / "careless_decode.py"
file.write_text(text.replace(careful, careless))
module_spec = importlib.util.spec_from_file_location("careless_decode", file)
careless_decode = importlib.util.module_from_spec(module_spec)
module_spec.loader.exec_module(careless_decode)
print("taken out:", careful.split("[")[0].split("= ")[1])


# %%
def careless_error(sequences):
    """Largest error [sequences, heads]; there is room beyond the tensors, so nothing crashes."""
    some = AttentionBatch.build(block_lists[:sequences], [1] * sequences, LENGTHS[:sequences], 16)
    room, output = torch.zeros(sequences + 2, 9, 64), torch.zeros(sequences + 2, 9, 64)
    room[:sequences] = query[:sequences]
    call = (output[:sequences], room[:sequences], layer, some, SCALE)
    careless_decode.decode_grouped_launch(*call, target=TARGET).run()
    return (output[:sequences] - expected[:sequences]).abs().amax(dim=-1)


assert careless_error(sequences=1).max() < 1e-5
print("one sequence, programs in order: largest error", f"{float(careless_error(1).max()):.0e}")

# %% [markdown]
# **What is wrong, and why does the test pass? Decide before you go on.** Then look which heads are wrong when the
# programs run from last to first, and when there is a second sequence.

# %%
found = {"one sequence, in order": careless_error(1)[0] > 1e-3}
with reversed_programs():
    found["one sequence, reversed"] = careless_error(1)[0] > 1e-3
found["first of two, in order"], found["second of two, in order"] = careless_error(2) > 1e-3
rows = [(name, *("wrong" if bad else "·" for bad in heads)) for name, heads in found.items()]
table(["", *(f"head {h}" for h in range(9))], rows)
assert found["one sequence, reversed"].tolist() == [False] * 3 + [True] * 6
assert found["second of two, in order"].tolist() == [True] * 6 + [False] * 3

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The tile of a KV head has sixteen rows for three query heads. Row 3 has the address of head 3, which belongs to the
# *next* KV head, and so on, into the next sequence. Without the condition each program stores thirteen rows that belong
# to others: their queries, with its own keys. The interpreter runs programs one after the other, first to last, and
# each overwrites what earlier ones left in its heads: with one sequence the right answer comes last. A card promises no
# order. With a single KV head and one sequence there is no neighbour, only memory beyond the output, and nobody looked
# there.
#
# Ratios that are not powers of two trip real kernels as well: with five query heads on each KV head, vLLM's Triton
# kernel did not compile (issue 18088; pull request 18100 pads to 16 rows). A test that finds the silent kind has a
# ratio of three, more than one sequence, and an order of programs that nobody chose.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. Keys and values are stored in int8. What happens to the bound?</summary>
#
# Nearly half the bytes, so nearly half the time. The intensity nearly doubles and is still far below any card's.
# </details>
#
# <details><summary>2. A batch of two hundred conversations, all equally short. How much does splitting help?</summary>
#
# Not at all: there are far more programs than multiprocessors already, and `keys_per_part` leaves short ones whole.
# </details>
#
# <details><summary>3. Why not use a very large negative number instead of minus infinity, and save the special case?</summary>
#
# Then a row that sees nothing has that number as its maximum, every masked key gets the weight $e^0 = 1$, and the row
# becomes the average of values it must not see. And a real score may be lower than the number that seemed large enough.
# </details>
#
# <details><summary>4. A kernel reaches 85 % of the card's copy bandwidth. Is a cleverer product of query and key worth writing?</summary>
#
# No. It waits for memory, and faster arithmetic only waits longer. Reading fewer bytes would help, or keeping more of
# them on their way.
# </details>

# %% [markdown]
# ## Summary
#
# - A decode step must read each key and value once. Their bytes over the bandwidth is the shortest possible time; on
#   every card the arithmetic waits.
# - Packing the query heads of a KV head into one program reads each key once instead of once per query head. The padded
#   rows are free on a card.
# - Softmax can be taken in one pass, and in pieces, with three numbers: the largest score, the sum of weights, the
#   weighted sum of values.
# - A few long conversations leave a card idle, and reading less does not change that. Cutting them gives every
#   multiprocessor work; log-sum-exp puts the parts together.
#
# **Write it yourself:** [exercise 07](../exercises/07_decode_kernel/07_decode_kernel.ipynb), a kernel that reads
# through the table in one pass, and the sum of the parts.
#
# **Next:** [08 · Prefill and chunks](08_prefill_and_chunks.ipynb), where a key serves many queries and the bound is
# the other one. To go back: [06 · A first Triton kernel](06_first_triton_kernel.ipynb).
#
# ### Sources
#
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, CACM 2009, [doi:10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785).
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018,
#   [arXiv:1805.02867](https://arxiv.org/abs/1805.02867): algorithm 3.
# - T. Dao et al., *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, 2022,
#   [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): algorithm 1.
# - T. Dao, D. Haziza, F. Massa, G. Sizov, *Flash-Decoding for long-context inference*, 2023,
#   [crfm.stanford.edu](https://crfm.stanford.edu/2023/10/12/flashdecoding.html): cutting the context.
# - J. Ainslie et al., *GQA*, 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245).
# - The data sheets of NVIDIA (T4, A100, H100, H200) and AMD (MI300X) for bandwidth and dense 16-bit products.
