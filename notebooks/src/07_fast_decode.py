# %% [markdown]
# # 07 · A fast decode kernel
#
# Lesson 06 wrote a decode [kernel](../docs/glossary.md#kernel) that is right. This lesson asks whether it is fast, and
# begins with the question that comes before: how fast *can* it be? Two numbers of a card answer that. Then the kernel
# is changed twice, and each change follows from counting.
#
# **You will be able to** say how long a [decode](../docs/glossary.md#decode) step takes at least on a card you have
# never seen, take a softmax in one pass and in pieces, and find out why a card with nothing wrong stands idle.
#
# About 50 minutes. Runs in half a minute on two CPU cores, without a GPU: kernels run in Triton's interpreter, and are
# compiled for a card that is not there. It needs Triton, which exists for Linux and Windows: elsewhere, read along, the
# outputs are stored.

# %%
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This lesson runs on Linux and Windows, where Triton exists: read along here.")
import json
import subprocess
import sys
import time

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
# A kernel takes 300 microseconds. Is that good? Nobody can say who does not know what the card had to do. So the
# question is: **what must a decode step do at least, and how long does the card need for that?** Everything above is
# ours to remove.
#
# The step of this lesson: one layer of attention of Llama 3 8B (32 query heads on 8 KV heads of size 128, 16 bits),
# on an H200. Its data sheet has the two numbers: memory is read at 4.8 TB/s, and the tensor cores do 989 TFLOP/s
# (10¹² multiplications or additions a second) in 16 bits.

# %% [markdown]
# ## Your prediction
#
# 1. 32 conversations of 4096 tokens each get their next token. How many microseconds does the layer's attention take
#    at least?
# 2. The kernel of lesson 06 has one [program](../docs/glossary.md#program) for each query head. How often does it
#    read each key of this layer?
# 3. An H200 has 132 [multiprocessors](../docs/glossary.md#multiprocessor). *One* conversation of 32 768 tokens, one
#    program for each KV head: what percentage of the multiprocessors' time is used?

# %%
my_microseconds = None  # your guess
my_reads_of_each_key = None  # your guess
my_percent_used = None  # your guess

# %% [markdown]
# ## Measure
#
# ### Bytes and operations
#
# A decode step reads every key and every value of every conversation once. It also reads a query and writes an output
# for each conversation. Each query head multiplies and adds once per number of a key, and once per number of a value.

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
# cancelled out of it. In 16 bits it is the number of query heads per KV head, and nothing else: a key is two bytes a
# number, and each of its query heads does two operations with it.
#
# ### The two numbers of a card
#
# A card has its own quotient: operations per second over bytes per second. It says how many operations the card could
# do in the time it takes to read one byte. A kernel below it waits for memory. A kernel above it waits for
# arithmetic. The numbers are those of the vendors' data sheets.
#
# Reading and arithmetic go on at the same time, so a step takes the *larger* of the two times.

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
assert 111e-6 < floor < 113e-6
compare(my_microseconds, round(1e6 * floor), "microseconds at least")

# %% [markdown]
# It is the reading, on every card, by a factor of more than thirty. Decode is **bound by memory**: its time is its
# bytes over the bandwidth.
#
# The same in the whole model: a decode step also reads all weights, once for the batch. Where do the milliseconds go?

# %%
from minipaged.config import ModelConfig
from minipaged.memory import count_parameters

llama = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_query_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_size=SIZE,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
weights = count_parameters(llama) * BYTES
kv = {batch: 32 * spec.bytes_per_token * 4096 * batch for batch in (1, 8, 32, 128)}
rows = [(f"{batch} × 4096", weights / 1e9, k / 1e9, k / (k + weights)) for batch, k in kv.items()]
table(["conversations", "weights, GB", "keys and values, GB", "share of keys and values"], rows)
assert kv[1] < 0.05 * weights and kv[32] > weights and kv[128] > 4 * weights

# %% [markdown]
# With one conversation the keys and values hardly count. From about thirty on they are most of what a step reads, and
# thirty at once is what paging is for. So the kernel that reads them decides.
#
# ### This machine
#
# The same two numbers can be measured. A copy moves each byte twice, in and out; a product of two large matrices
# keeps the arithmetic busy. (Times differ from run to run, so this output is not compared when the lesson is tested.)


# %%
def seconds(work, device="cpu", times=6):
    """Best of several runs."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def measured_rates(device):
    """Bytes per second of a copy, operations per second of a product."""
    size, dtype = (1024, torch.float32) if device == "cpu" else (8192, torch.float16)
    source = torch.ones(size * 2**14, device=device)
    target, square = torch.empty_like(source), torch.ones(size, size, device=device, dtype=dtype)
    copy = seconds(lambda: target.copy_(source), device)
    product = seconds(lambda: square @ square, device)
    return 2 * source.nbytes / copy, 2 * size**3 / product


# %% tags=["nbval-ignore-output"]
machines = {"this processor": measured_rates("cpu")}
if torch.cuda.is_available():
    machines["this GPU"] = measured_rates("cuda")
rows = [(name, b / 1e9, f / 1e9, f / b) for name, (b, f) in machines.items()]
table(["", "GB/s", "GFLOP/s", "operations per byte"], rows)
assert all(rate > 0 for pair in machines.values() for rate in pair)

# %% [markdown]
# ### What the readable kernel reads
#
# Now the kernel of lesson 06. In the interpreter every load is a call, and `counted_reads` adds up what is loaded
# from the cache. Small shapes with SmolLM2's ratio, three query heads on each KV head; a pool of NaN with two
# sequences in it; the float64 reference to compare with.

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
wrong_reads_of_each_key = {
    1: "that is what it would be if one program served all query heads that share "
        "the KV head; here each has its own",
    32: "that is all query heads; only those of the key's own group read it",
}
unit = "times, or once per query head of the group"
compare(my_reads_of_each_key, HEADS // KV_HEADS, unit, wrong_reads_of_each_key)

# %% [markdown]
# Both are right, and one reads every key three times: once for each query head of the group, because each query head
# is a program of its own and programs do not talk to each other. In Llama 3 8B it would be four times. A card's cache
# may catch some of that, when the programs of a group happen to run at the same time; a kernel should not depend on
# luck.
#
# ### Query heads in one tile
#
# `decode_grouped` gives all query heads of a KV head to *one* program. They become the rows of a small matrix, and
# query times keys becomes a matrix product, which is what tensor cores do. A product has at least 16 rows, so three
# heads are padded to 16, and thirteen rows compute nothing that anybody wants. Isn't that a waste?

# %%
from minipaged.attention.kernels.arguments import decode_tile

tile = decode_tile(TARGET, GROUP, 64, BYTES)
padded_intensity = 2 * 2 * tile.rows / (2 * BYTES)  # operations for a number of key and of value
for card_bandwidth, card_flops in CARDS.values():
    assert padded_intensity < card_flops / card_bandwidth / 8
say(f"""
    Padded to {tile.rows} rows the tile does {padded_intensity:.0f} operations a byte instead of
    {GROUP}. Every card above does more than eight times as many while it reads that byte.
""")
assert tile.rows == padded_intensity == 16 == GROUP + 13

# %% [markdown]
# The idle rows cost nothing, because the arithmetic was waiting anyway. That is what a bound is good for: it says which
# waste matters.
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
print(round(two_passes, 4))

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

# %% [markdown]
# The last column is the price: when a larger score comes, what was there is scaled down. When none comes, it is
# multiplied by one.
#
# **And minus infinity?** Masked keys have that score. A row of which *nothing* is visible yet, a padded one for
# example, has the maximum $-\infty$, and $-\infty - (-\infty)$ is not zero. It is NaN, and NaN never goes away again.
# So the shift is taken as 0 there. The weights are then $e^{-\infty} = 0$, as they should be.

# %%
with np.errstate(invalid="ignore"):
    assert np.isnan(np.exp(-np.inf - -np.inf))
assert together(NOTHING, NOTHING) == NOTHING
assert together(NOTHING, (-60000.0, 1.0, 7.0)) == (-60000.0, 1.0, 7.0)  # very low, and yet visible
assert together(seen, NOTHING) == seen == together(NOTHING, seen)

# %% [markdown]
# ### In pieces
#
# The formula does not care whether a summary is of one key, a tile, or half of a conversation. So a conversation can
# be cut into parts for several programs, and the parts put together at the end. What is stored of a part is its
# average $a / s$ and its [log-sum-exp](../docs/glossary.md#log-sum-exp) $m + \log s$, which is how much the average
# weighs.

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

# %% [markdown]
# ### Who has work?
#
# Why would anybody cut? A multiprocessor is one of the card's workers. A program runs on one of them, whole. One
# conversation on 8 KV heads is 8 programs, however long it is.

# %%
H200, LONG = TARGETS["sm_90"].num_multiprocessors, 32768  # as many as an H100 has
whole = run_programs(decode_programs([LONG], KV_HEADS, part_len=LONG), H200)
share = busy_share(whole, H200)
assert (len(whole), H200) == (8, 132) and share == 8 / 132
compare(my_percent_used, round(100 * share), "percent")

# %% [markdown]
# Eight work, the others wait. And a multiprocessor can have only so many loads on their way, so the memory waits too.
#
# [Split-KV](../docs/glossary.md#split-kv), also called Flash-Decoding, cuts the context into parts. How long should a
# part be? Short enough that there are several programs for each multiprocessor, and not so short that starting
# programs is all that happens. A pure function of the batch and the card decides, `keys_per_part`. Cutting also has a
# price: each part writes an average and a log-sum-exp in float32, and a second kernel reads them.

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
# Both kernels in the interpreter, on three sequences of which one has a single key and therefore two empty parts.
# What they store in between starts as NaN, so an entry that is read without having been written would be noticed.

# %%
from minipaged.attention.kernels.arguments import Tile
from minipaged.attention.kernels.decode_combine import decode_combine_launch
from minipaged.attention.kernels.decode_split import decode_split_launch

ragged = AttentionBatch.build([[6, 1, 4], [0, 3], [1]], [1, 1, 1], [40, 17, 1], BLOCK_SIZE)
three = torch.randn(3, 3 * GROUP, 64, generator=generator)
average = torch.full((3, 3 * GROUP, 3, 64), torch.nan)  # [tokens, heads, parts, size]
log_sum_exp, cut_output = (
    torch.full((3, 3 * GROUP, 3), torch.nan),
    torch.full_like(three, torch.nan),
)
sixteen = Tile(rows=16, keys=16, num_warps=4, num_stages=2)
split = (average, log_sum_exp, three, layer, ragged, SCALE)
decode_split_launch(*split, part_len=16, tile=sixteen).run()
decode_combine_launch(cut_output, average, log_sum_exp, ragged, part_len=16).run()

right = ReferenceBackend().paged_attention(three, layer, ragged, scale=SCALE)
assert torch.allclose(cut_output, right, atol=1e-5)
assert log_sum_exp[2, :, 1:].isnan().all() and not log_sum_exp[:, :, 0].isnan().any()

# %% [markdown]
# ### A compiled kernel, timed here
#
# The interpreter says nothing about speed. But the same job is there as a compiled kernel for the processor, in
# [C++](../minipaged/cpu/csrc/decode.cpp): what `LLM` runs on a CPU with a C++ compiler (without one both rows below
# gather; lesson 12 shows all of that folder). Here it is beside the gather of lesson 05, and beside what a copy of
# memory reaches on this machine; many short conversations, and few long ones.

# %% tags=["nbval-ignore-output"]
from functools import partial

from minipaged.attention.torch_backend import TorchBackend
from minipaged.cpu.backend import CpuBackend

rows = []
for count, context in ((64, 64), (16, 2048)):
    pool = KVStorage(small_spec, count * context // BLOCK_SIZE, BLOCK_SIZE)
    for tensor in pool.tensors:
        tensor.normal_(generator=generator)
    places = np.random.default_rng(7).permutation(pool.num_blocks).reshape(count, -1).tolist()
    wide = AttentionBatch.build(places, [1] * count, [context] * count, BLOCK_SIZE)
    call = (torch.randn(count, 9, 64, generator=generator), pool.layer(0), wide)
    answers = []
    for name, backend in (("gathered", TorchBackend()), ("compiled", CpuBackend())):
        attention = partial(backend.paged_attention, *call, scale=SCALE)
        answers.append(attention())
        took = seconds(attention)
        rate = count * context * small_spec.bytes_per_token / took
        of_copy = rate / machines["this processor"][0]
        rows.append((f"{count} × {context}, {name}", 1000 * took, rate / 1e9, of_copy))
    assert torch.allclose(*answers, atol=1e-4)
table(["", "ms", "GB/s of keys and values", "of a copy"], rows)

# %% [markdown]
# How much the gather loses depends on the length: its preparations cost the same for a short context as for a long one.
# The smaller batch may stay in the processor's cache, and is then read faster than memory is copied. The larger one
# comes from memory, in pieces of one block, and a core can have only few loads on their way. In the C++ file look for
# `GROUP`: as in `decode_grouped`, a row that has been loaded serves all query heads of its group.
#
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

# %% [markdown]
# Sixteen times sooner, *in this model*: every multiprocessor reads at the same rate, whatever the others do. A real
# card has one memory for all, and lets several programs share a multiprocessor. The model says who has work, not how
# long it takes.
#
# Try it. When does cutting stop mattering? Which card needs it most?


# %%
def card_at_work(card, sequences, context, part):
    count = TARGETS[card].num_multiprocessors
    chosen = arguments.keys_per_part(sequences, KV_HEADS, context, count)
    length = {"not cut": context, "chosen": chosen}.get(part, part)
    runs = run_programs(decode_programs([context] * sequences, KV_HEADS, length), count)
    used = busy_share(runs, count)
    words = f"{sequences} × {context} keys in parts of {length}: {len(runs)} programs"
    figure = programs_over_time({f"parts of {length} keys": runs}, count)
    return figure, f"{words}, {used:.0%} of the time of {count} multiprocessors used"


def choice(options, value, description):
    return ipywidgets.SelectionSlider(options=options, value=value, description=description)


controls = {
    "card": choice([(f"{t.card}", name) for name, t in TARGETS.items()], "sm_90", "card"),
    "sequences": choice([1, 2, 4, 8, 16, 32], 2, "sequences"),
    "context": choice([1024, 4096, 8192, 16384, 32768, 65536], 8192, "context"),
    "part": choice(["not cut", 2048, 1024, 512, "chosen"], "not cut", "keys a part"),
}
Explorable(controls, card_at_work)

# %% [markdown]
# Cutting matters as long as the programs that are not cut leave multiprocessors without work. So the card with the most
# multiprocessors needs it most.
#
# ### The roof
#
# All of it in one drawing, the [roofline](../docs/glossary.md#roofline). On the slope, memory decides; on the flat
# part, arithmetic does. Decode stands far down the slope, padded rows or not. [Prefill](../docs/glossary.md#prefill)
# uses each key for a whole prompt of queries, and stands under the flat roof.

# %%
PROMPT = 2048
pairs = PROMPT * (PROMPT + 1) // 2  # a token sees itself and what came before
prefill = operations([pairs]) / least_bytes([PROMPT], queries=PROMPT)
assert intensity < padded_intensity < flops / bandwidth < prefill
roofs = {"H200": CARDS["H200"], "T4": CARDS["T4"], "this processor": machines["this processor"]}
stands = {"decode": intensity, "with padded rows": padded_intensity, "prefill": prefill}
show(
    roofline(roofs, stands),
    "Three roofs, a slope and then flat; decode is low on the slope, prefill on the flat part.",
)

# %% [markdown]
# ## Why
#
# **Why is decode so different from prefill?** Both do the same products. A key that was read in prefill serves every
# later token of the prompt; in decode it serves one token, through the few query heads of its group. More
# conversations do not help: each brings keys of its own. That is why batching speeds up the *weights* of a decode
# step and not its attention.
#
# **Why does one multiprocessor not read faster when the others are idle?** A load takes its time to come back. To
# read at full speed, enough bytes must be *on their way* at any moment: bandwidth × that time. How many are, the
# compiler's report tells.


# %% tags=["nbval-ignore-output"]
command = [sys.executable, "-m", "minipaged", "kernels", "--json", "--target", "sm_90"]
for name in ("decode", "decode_grouped", "decode_split"):
    command += ["--kernel", name]
compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=True)
reports = json.loads(done.stdout)
rows = [
    (
        f"{r['kernel']} {r['variant']}",
        r["registers"],
        r["spill_bytes"],
        min(r["load_bytes"].values()),
        max(r["buffers"].values(), default=0),
        ", ".join(name.split(".")[0] for name in r["matrix"]) or "none",
        r["resident"],
    )
    for r in reports
]
table(["", "registers", "spilled", "bytes a load", "tiles ahead", "tensor cores", "resident"], rows)

# %% [markdown]
# These are the kernels as the compiler makes them for an H100 or H200, with no such card here (`minipaged kernels`
# prints the full table, for other cards too). The command runs in a process of its own, because Triton in this one
# interprets. A row names the kernel, the numbers it reads, the head size (d) and the query heads of a group (g). Read
# it like this:
#
# - *registers, spilled*: what does not fit in registers goes to memory, and memory is what we are short of. Nothing
#   spills.
# - *bytes a load*: a thread asks for 16 bytes at once, the most that one instruction usually can, where keys are
#   16-bit numbers.
# - *tiles ahead*: while one [tile](../docs/glossary.md#tile) is used, the next is being copied into shared memory.
#   The readable kernel has none.
# - *tensor cores*: the product of the packed heads runs on them; the readable kernel has no product to give them.
# - *resident*: programs that one multiprocessor holds at a time, an estimate.

# %%
by_name = {r["kernel"]: r for r in reports if r["variant"] == "bf16 d128 g4"}
assert all(r["spill_bytes"] == 0 for r in reports)
assert all(min(r["load_bytes"].values()) == 16 for r in by_name.values())
packed = [by_name["decode_grouped"], by_name["decode_split"]]
assert all(max(r["buffers"].values()) >= 2 and r["matrix"] for r in packed)
assert (
    not by_name["decode"]["matrix"] and max(by_name["decode"]["buffers"].values(), default=0) == 0
)

LATENCY = 1e-6  # seconds from asking to having; assumed, of the right order of magnitude
key_and_value_tile = 2 * decode_tile(TARGET, 4, SIZE, BYTES).keys * SIZE * BYTES
on_the_way = [r["resident"] * max(r["buffers"].values()) * key_and_value_tile for r in packed]
assert all(H200 * each > bandwidth * LATENCY for each in on_the_way)
assert 8 * max(on_the_way) < bandwidth * LATENCY

# %% [markdown]
# The last two lines are the answer. With programs on *all* multiprocessors, more bytes are on their way than a load
# of a microsecond needs. With eight multiprocessors at work, far fewer, however good the kernel.
#
# ### Predicted, and recorded
#
# What share of the bandwidth can each kernel reach at most, if every load goes to memory and each multiprocessor has
# an equal share of it? The bytes that must be read, over those that are, times the share of multiprocessors' time used.

# %%
rows = []
for count, context in ((32, 4096), (1, LONG)):
    programs = {"decode": HEADS, "decode_grouped": KV_HEADS, "decode_split": KV_HEADS}
    for name, heads in programs.items():
        length = arguments.keys_per_part(count, KV_HEADS, context, H200)
        length = length if name == "decode_split" else context
        runs = run_programs(decode_programs([context] * count, heads, length), H200)
        useful = KV_HEADS / heads
        if name == "decode_split":
            stored = 2 * count * -(-context // length) * HEADS * (SIZE + 1) * 4
            useful = 1 / (1 + stored / least_bytes([context] * count))
        rows.append((f"{name}, {count} × {context}", useful, useful * busy_share(runs, H200)))
table(["", "useful bytes", "share at most"], rows)
at_most = {name: share for name, _, share in rows}
assert at_most[f"decode_split, 1 × {LONG}"] > 10 * at_most[f"decode_grouped, 1 × {LONG}"]
assert at_most["decode_grouped, 32 × 4096"] > 3 * at_most["decode, 32 × 4096"]
assert abs(at_most[f"decode_grouped, 1 × {LONG}"] - at_most[f"decode, 1 × {LONG}"]) < 1e-9

# %% [markdown]
# For many conversations, packing the heads is what counts. For a single long one it gains *nothing* by itself: fewer
# bytes, and as many times fewer programs. Only together with the split does it help.
#
# A prediction is worth what a measurement makes of it. `benchmarks/gpu_check.sh` measures the kernels on a GPU, as
# shares of that card's own copy of memory. What it recorded is shown here; without a record it says so, and no number
# stands in for it.

# %% tags=["nbval-ignore-output"]
from coursekit.gpu_results import goals_text

print(goals_text())

# %% [markdown]
# ## The code as it stands
#
# The heart of all the faster kernels is one function: a tile of query rows against a range of keys. Find in it the
# summary of three numbers, the shift for $-\infty$, and the look-up of blocks one tile ahead. Around it, the kernel
# that packs the heads. What is new there against lesson 06 is `row`, `heads` and `used`.

# %%
from minipaged.attention.kernels import attend, decode_combine, decode_grouped, decode_split

show_source(attend.attend_keys.fn, attend.normalise.fn)
show_source(decode_grouped.decode_grouped_kernel.fn)

# %% [markdown]
# The split differs in its range of keys and in what it stores. The second kernel adds up the parts. Last comes the
# function that chooses how long a part is.

# %%
show_source(decode_split.decode_split_kernel.fn)
show_source(decode_combine.decode_combine_kernel.fn)
show_source(arguments.keys_per_part)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | each key and value is read once | a multiple of the time, and the right answer: no test of results notices |
# | a row without keys has maximum −∞ and adds nothing | NaN, in one request out of many |
# | the number of parts does not change the answer | a conversation changes its mind as it grows |
# | the order in which programs run does not matter | right here, wrong on a card |
#
# The last two, on the sequences above. `reversed_programs` lets the interpreter run the last program first.

# %%
for part_len in (16, 32, 48):
    average, log_sum_exp = torch.full((3, 9, 3, 64), torch.nan), torch.full((3, 9, 3), torch.nan)
    other = torch.full_like(three, torch.nan)
    split = (average, log_sum_exp, three, layer, ragged, SCALE)
    decode_split_launch(*split, part_len=part_len, tile=sixteen).run()
    decode_combine_launch(other, average, log_sum_exp, ragged, part_len=part_len).run()
    assert torch.allclose(other, right, atol=1e-5)

forward, backward = torch.empty_like(query), torch.empty_like(query)
decode_grouped_launch(forward, query, layer, batch, SCALE, target=TARGET).run()
with reversed_programs():
    decode_grouped_launch(backward, query, layer, batch, SCALE, target=TARGET).run()
assert torch.equal(forward, backward)

# %% [markdown]
# ## Find the bug
#
# A colleague found the condition `row < GROUP` superfluous: nobody looks at the padded rows. In a copy of the file
# she took it out, in one line. Her test, one sequence with SmolLM2's nine heads on three, passed in the interpreter.
# On a card the same test gives nonsense, now and then, and not the same each time; a model with a single KV head is
# right even there.

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
# The tile of a KV head has sixteen rows for three query heads. Row 3 has the address of head 3, which is the *next*
# KV head's, and so on, into the next sequence. Without the condition each program stores thirteen rows that belong to
# others: their queries, with its own keys. In the interpreter programs run one after the other, from the first to the
# last, and each overwrites what its predecessors left in its heads: with one sequence the right answer comes last. A
# card promises no order. With a single KV head and one sequence there is no neighbour, only memory beyond the output,
# and nobody looked there.
#
# This happened: vLLM's kernels met ratios that are not powers of two (issue 18088, pull request 18100), and padded
# rows that reached the next group (pull request 47248). The test that finds it has a ratio of three, more than one
# sequence, and an order of programs that nobody chose.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A model has as many KV heads as query heads. What is the intensity of decode in 16 bits, and what does head packing gain?</summary>
#
# One operation a byte, and nothing: a group is a single head, so each key is read once anyway.
# </details>
#
# <details><summary>2. Keys and values are stored in int8. What happens to the bound?</summary>
#
# Nearly half the bytes, so nearly half the time. The intensity nearly doubles and is still far below any card's.
# </details>
#
# <details><summary>3. A batch of two hundred short conversations. How much does splitting help?</summary>
#
# Not at all. There are far more programs than multiprocessors already; a part would only add stores and a second
# launch.
# </details>
#
# <details><summary>4. Why is the largest score subtracted at all, when it cancels out?</summary>
#
# In exact arithmetic it does. In float32 the exponential of a score around 90 is infinite, and infinity over infinity
# is NaN.
# </details>
#
# <details><summary>5. Why not use a very large negative number instead of minus infinity, and save the special case?</summary>
#
# Then a row with nothing visible has that number as its maximum, every masked key gets the weight $e^0 = 1$, and the
# row becomes the average of values it must not see. And a real score can be lower than a number that somebody thought
# very large.
# </details>
#
# <details><summary>6. A kernel reaches 85 % of the card's copy bandwidth. Is a cleverer product of query and key worth writing?</summary>
#
# No. It waits for memory; faster arithmetic only waits longer. Fewer bytes would help, or more of them on their way.
# </details>

# %% [markdown]
# ## Summary
#
# - A decode step must read each key and value once. That over the bandwidth is the least time, and every card's
#   arithmetic waits.
# - Packing the query heads of a KV head reads each key once instead of once per query head. The padded rows are free.
# - Softmax goes in one pass, and in pieces, with three numbers: the largest score, the sum of weights, the weighted
#   sum of values.
# - Few long conversations leave a card idle. Cutting them gives every multiprocessor work; log-sum-exp puts the parts
#   together.
# - The compiler's report says without a card whether a kernel spills, how wide it loads and what is on its way. Only
#   a card says how fast.
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
