# %% [markdown]
# # 07 · A fast decode kernel
#
# Lesson 06 wrote a decode [kernel](../docs/glossary.md#kernel) that is right. Is it fast? Two numbers of a card tell how
# fast it *can* be. Then the kernel is changed twice, and each change follows from counting.
#
# **You will be able to** compute the shortest time of a [decode](../docs/glossary.md#decode) step on a card you have
# never seen, take a softmax in one pass and in pieces, and explain why a healthy card stands idle.
#
# About 40 minutes. Runs in half a minute on two CPU cores, without a GPU: kernels run in Triton's interpreter. Triton
# exists for Linux and Windows; elsewhere, read the stored outputs.

# %%
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This lesson needs Triton (Linux, Windows): read the stored outputs here.")
import ipywidgets
import numpy as np
import torch

from minipaged import AttentionBatch, KVSpec
from minipaged.attention.kernels import arguments, attend, decode_grouped
from minipaged.attention.reference import ReferenceBackend
from minipaged.attention.targets import TARGETS
from coursekit.figures import show
from coursekit.figures.programs import decode_on_a_card, programs_over_time
from coursekit.figures.roofline import roofline
from coursekit.given.layers import decode_in_parts, written_layer
from coursekit.interpreted import counted_reads, reversed_programs
from coursekit.lesson import changed_copy, compare, say, show_source, table
from coursekit.multiprocessors import busy_share, decode_programs, run_programs
from coursekit.widgets import Explorable

# %% [markdown]
# ## The question
#
# A kernel takes 300 microseconds. Is that good? **What must a decode step do at the very least, and how long does the
# card need for it?** Any time beyond that can be saved.
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
# A decode step reads every key and value once, and for each conversation a query; it writes an output. Each query head
# multiplies and adds once for every number of a key, and once for every number of a value.

# %%
HEADS, KV_HEADS, SIZE, BYTES = 32, 8, 128, torch.bfloat16.itemsize
spec = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16)


def least_bytes(contexts, queries=1):  # keys and values once, queries in, outputs out
    return sum(contexts) * spec.bytes_per_token + 2 * len(contexts) * queries * HEADS * SIZE * BYTES


def operations(contexts):  # query times key and weight times value: multiply and add, each
    return 2 * 2 * sum(contexts) * HEADS * SIZE


step_bytes, step_operations = least_bytes([4096] * 32), operations([4096] * 32)
intensity = step_operations / step_bytes
say(f"""
    32 conversations of 4096 tokens: {step_bytes / 1e6:.0f} MB and {step_operations / 1e9:.1f}
    billion operations, **{intensity:.1f} operations for each byte**.
""")
assert 3.99 < intensity < 4 == HEADS // KV_HEADS

# %% [markdown]
# That quotient is called [arithmetic intensity](../docs/glossary.md#arithmetic-intensity). In 16 bits it is the number of
# query heads per KV head, whatever the contexts and the batch: each number of a key is two bytes, and each query head
# does two operations with it.
#
# ### The two numbers of a card
#
# A card has such a quotient too: the operations it could do while it reads one byte. A kernel below it waits for memory,
# a kernel above it waits for arithmetic. Reading and arithmetic go on at the same time, so a step takes the *longer* of
# the two times.

# %%
CARDS = {  # bytes per second; operations per second, dense products in 16 bits (data sheets)
    "H200": (4800e9, 989e12),
    "H100-SXM": (3350e9, 989e12),
    "A100-80GB": (2039e9, 312e12),
    "T4": (320e9, 65e12),
    "MI300X": (5300e9, 1307e12),
}
rows = [
    (card, round(flops / rate), round(1e6 * step_bytes / rate), 1e6 * step_operations / flops)
    for card, (rate, flops) in CARDS.items()
]
table(["", "operations per byte", "reading, µs", "arithmetic, µs"], rows)
assert all(reading > 30 * arithmetic for _, _, reading, arithmetic in rows)
bandwidth, flops = CARDS["H200"]

# %% [markdown]
# It is the reading, on every card, by a factor of more than thirty. Decode is **bound by memory**: its time is its
# bytes over the bandwidth.
#
# (A step also reads all weights, once for the whole batch. From about thirty conversations on, keys and values are more:
# the study [What the compiler says](extra/07_what_the_compiler_says.ipynb) counts them.)
#
# ### What the readable kernel reads
#
# Now the kernel of lesson 06. In the interpreter every load is a call, and `counted_reads` adds up what is loaded from
# the cache. Two short sequences with SmolLM2's three query heads on each KV head stand in a pool that is otherwise full
# of NaN; the float64 reference says what is right.

# %%
from minipaged.attention.kernels.decode import decode_launch
from minipaged.attention.kernels.decode_grouped import decode_grouped_launch

LENGTHS, BLOCK_SIZE, GROUP, SCALE, H200 = [40, 17], 16, 3, 64**-0.5, TARGETS["sm_90"]
small_spec = KVSpec(num_layers=1, num_kv_heads=3, head_size=64, dtype=torch.float32)
generator = torch.Generator().manual_seed(7)
block_lists = [[6, 1, 4], [0, 3]]
layer = written_layer(small_spec, 8, BLOCK_SIZE, block_lists, LENGTHS, generator)
batch = AttentionBatch.build(block_lists, [1, 1], LENGTHS, BLOCK_SIZE)
query = torch.randn(2, 3 * GROUP, 64, generator=generator)
expected = ReferenceBackend().paged_attention(query, layer, batch, scale=SCALE)

there, rows = sum(LENGTHS) * small_spec.bytes_per_token, []
for launch, options in ((decode_launch, {}), (decode_grouped_launch, {"target": H200})):
    output = torch.full_like(query, torch.nan)
    with counted_reads(layer.key, layer.value) as reads:
        launch(output, query, layer, batch, SCALE, **options).run()
    assert torch.allclose(output, expected, atol=1e-5)
    rows.append((launch.__name__, reads.num_bytes, reads.num_bytes / there))
table(["kernel", "bytes read", "÷ bytes that are there"], rows)
assert [row[2] for row in rows] == [GROUP, 1]

# %% [markdown]
# Both are right, and one reads every key three times: each query head is a program of its own, and programs do not talk
# to each other. In Llama 3 8B it would be four times. A card's cache may catch some of that; a kernel should not depend
# on luck.
#
# ### Query heads in one tile
#
# `decode_grouped` gives all query heads of a KV head to *one* program. They become the rows of a small matrix, and
# query times keys becomes a matrix product, which is what tensor cores do. Three heads are padded to 16 rows, and
# thirteen rows compute nothing. Isn't that a waste?

# %%
padded = arguments.decode_tile(H200, GROUP, 64, BYTES).rows
reading = 2 * BYTES / bandwidth  # seconds for one number of a key and one of a value
needed, with_empty_rows = (max(reading, 2 * 2 * rows / flops) for rows in (GROUP, padded))
longer = 100 * (with_empty_rows / needed - 1)
wrong_longer = {
    433: "that is how much more is computed; but arithmetic was waiting for memory anyway",
    81: "thirteen of sixteen rows are empty, but they cost no time: memory is the limit",
}
compare(my_percent_longer, round(longer), "percent longer", wrong_longer)
say(f"""
    Padded to {padded} rows the tile does {padded} operations a byte instead of {GROUP}. The H200
    could do {flops / bandwidth:.0f} while it reads that byte.
""")
assert padded == 16 and longer == 0

# %% [markdown]
# The empty rows cost nothing. That is what a bound is good for: it says which waste matters. In one drawing, the
# [roofline](../docs/glossary.md#roofline): on the slope memory decides, on the flat part arithmetic does.

# %%
pairs = 2048 * 2049 // 2  # of query and key: a token of a prompt sees itself and what came before
prefill = operations([pairs]) / least_bytes([2048], queries=2048)
stands = {"decode": intensity, "decode, padded": padded, "prefill": prefill}
assert intensity < padded < flops / bandwidth < prefill
show(
    roofline({name: CARDS[name] for name in ("H200", "T4")}, stands, hollow=["decode, padded"]),
    "Two roofs, a slope and then flat. Decode is far down the slope; padded to 16 rows (the hollow "
    "mark) it still is. Prefill stands under the flat part.",
)

# %% [markdown]
# The hollow mark stands higher, but the time is the same: only the useless part has grown.
# [Prefill](../docs/glossary.md#prefill) reads a key once for a whole prompt of queries, so arithmetic is its limit. (On
# a processor padded rows are *not* free: see [This processor](extra/07_this_processor.ipynb).)
#
# ### Who has work?
#
# Reading each key once instead of four times: is that four times as fast? A program runs on one
# [multiprocessor](../docs/glossary.md#multiprocessor) from start to end, and an H200 has 132 of them. `run_programs` is a
# small model of a card: each program goes to the multiprocessor that is free first, and all read equally fast.

# %%
LONG, count = 32768, H200.num_multiprocessors
each_head = run_programs(decode_programs([LONG], HEADS, part_len=LONG), count)
whole = run_programs(decode_programs([LONG], KV_HEADS, part_len=LONG), count)
rows = [
    (name, len(runs), round(100 * busy_share(runs, count)), max(run.stop for run in runs))
    for name, runs in (("a program per query head", each_head), ("one per KV head", whole))
]
table(["one conversation", "programs", "% of multiprocessors at work", "done after, in keys"], rows)
wrong_gain = {4: "a quarter of the bytes, but a quarter of the programs, each as long as before"}
compare(my_gain_of_reading_once, rows[0][3] / rows[1][3], "times as fast", wrong_gain)
assert rows[0][3] == rows[1][3]

# %% [markdown]
# Nothing gained! The other 124 multiprocessors wait. With many conversations all have work either way, and reading once
# saves three quarters of the bytes. A single long one must be cut. For that, softmax has to work in pieces.
#
# ### Softmax in one pass
#
# The kernel walks over the keys tile by tile and never holds all scores. But softmax divides by a sum over *all* of
# them, after subtracting the largest of *all*. Four scores are enough to see how it is done. First in two passes:

# %%
scores, values = np.array([1.0, 3.0, 2.0, 5.0]), np.array([10.0, 20.0, 30.0, 40.0])
softmax_weights = np.exp(scores - scores.max())
two_passes = (softmax_weights * values).sum() / softmax_weights.sum()
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
    rows.append((f"{score:g}", *seen, np.exp(before - seen[0])))
table(["score", "m", "s", "a", "old sums ×"], rows)
assert abs(seen[2] / seen[1] - two_passes) < 1e-12
print("one pass:", round(seen[2] / seen[1], 4))

# %% [markdown]
# The last column is the price: when a larger score comes, the old sums are scaled down.
#
# **And minus infinity?** Masked keys have that score. A row that sees *nothing* yet has the maximum $-\infty$, and
# $-\infty - (-\infty)$ is NaN, and once a sum is NaN it stays NaN. So the shift is taken as 0 there, and the weights are
# $e^{-\infty} = 0$, as they should be.

# %%
for words, one in (("nothing", NOTHING), ("a key", (-9.0, 1.0, 7.0))):
    print(f"nothing and {words}:", *map(float, together(NOTHING, one)))
    assert together(NOTHING, one) == one

# %% [markdown]
# ### In pieces
#
# The formula works for a summary of one key, of a tile, or of half a conversation. So a conversation can be cut into
# parts for several programs, and the parts put together at the end. What is stored of a part is its average $a / s$ and
# its [log-sum-exp](../docs/glossary.md#log-sum-exp) $m + \log s$, which says how much the average weighs.

# %%
parts = []
for piece in (slice(0, 3), slice(3, 4), slice(4, 4)):  # the last is empty
    part = NOTHING
    for score, value in zip(scores[piece], values[piece], strict=True):
        part = together(part, (score, 1.0, value))
    if part[1] > 0:
        parts.append((part[2] / part[1], part[0] + np.log(part[1])))
averages, log_sum_exps = np.array(parts).T
result = np.average(averages, weights=np.exp(log_sum_exps - log_sum_exps.max()))
assert abs(result - two_passes) < 1e-12
print("in three parts, one empty:", round(float(result), 4))

# %% [markdown]
# [Split-KV](../docs/glossary.md#split-kv), also called Flash-Decoding, cuts the context this way. A part should be short
# enough that every multiprocessor gets several programs, and long enough that starting a program is worth it;
# `keys_per_part` decides. The price: each part writes an average and a log-sum-exp in float32, and a second kernel reads
# them.

# %%
part_len = arguments.keys_per_part(1, KV_HEADS, LONG, count)
num_parts = LONG // part_len
extra = 2 * num_parts * HEADS * (SIZE + 1) * 4 / least_bytes([LONG])
say(f"{num_parts} parts of {part_len} keys, and **{100 * extra:.1f} %** more bytes.")
assert num_parts == 64 and extra < 0.02

# %% [markdown]
# ## The picture
#
# The long conversation on the card, first in one piece per KV head, then cut. Each row is a multiprocessor.

# %%
cut = run_programs(decode_programs([LONG], KV_HEADS, part_len), count)
show(
    programs_over_time({"one program per KV head": whole, f"parts of {part_len} keys": cut}, count),
    "Above a thin blue line in a grey field; below the same work, a blue block that is done early.",
)
sooner = max(run.stop for run in whole) / max(run.stop for run in cut)
wrong_sooner = {
    64: "64 parts of 8 KV heads are 512 programs; 132 multiprocessors take turns with them",
    16.5: "132 multiprocessors instead of 8, almost: 512 programs do not go evenly into 132",
}
compare(my_gain_of_64_parts, sooner, "times sooner", wrong_sooner)
assert sooner == 16

# %% [markdown]
# That is *in this model*. On a real card all multiprocessors share one memory: the model says who has work, not how long
# it takes.
#
# Try it. When does cutting stop mattering? Which card needs it most?

# %%
controls = {
    name: ipywidgets.SelectionSlider(options=options, value=value, description=name)
    for name, options, value in (
        ("card", [(f"{target.card}", name) for name, target in TARGETS.items()], "sm_90"),
        ("sequences", [1, 2, 4, 8, 16, 32], 2),
        ("context", [1024, 4096, 8192, 16384, 32768, 65536], 8192),
    )
}
Explorable(controls, lambda card, **step: decode_on_a_card(card, **step, num_kv_heads=KV_HEADS))

# %% [markdown]
# Cutting matters as long as the uncut programs leave multiprocessors idle: most on the card that has most of them.
#
# ## Why
#
# **Why does batching not help?** It helps the weights: read once, they serve every conversation of the step. A key
# serves only its own conversation. In prefill it serves every later token of the prompt, in decode a single one.
#
# **Why does one multiprocessor not read faster when the others are idle?** A load takes about a microsecond to come
# back. To read at full speed, enough bytes must be *on their way* at any moment: bandwidth × that time. They go into the
# [shared memory](../docs/glossary.md#shared-memory) of a multiprocessor, and that is small.

# %%
LATENCY = 1e-6  # seconds from asking to having; assumed, of the right order of magnitude
needed, room = bandwidth * LATENCY, H200.shared_memory
say(f"""
    **{needed / 1e6:.1f} MB** must be on their way. All {count} multiprocessors have room for
    {count * room / 1e6:.0f} MB, eight of them for **{8 * room / 1e6:.1f} MB**: not enough, however
    good the kernel.
""")
assert count * room > needed > 8 * room

# %% [markdown]
# What the kernels use of that room, what share of the bandwidth each can reach, and when cutting pays: [What the compiler
# says](extra/07_what_the_compiler_says.ipynb). How fast they *are* only a card can say; this course has not been run on
# one yet. `benchmarks/gpu_check.sh` measures it on yours.
#
# ## The code as it stands
#
# The heart of all the faster kernels is one function: a [tile](../docs/glossary.md#tile) of query rows against a range
# of keys. Find in it the summary of three numbers, the shift for $-\infty$, and the look-up of blocks one tile ahead.
# (`visible`: how many keys each row may see; `COMPUTE`: the number format of the products; the scales: lesson 13.)

# %%
show_source(attend.attend_keys.fn)

# %% [markdown]
# The kernels around it are short: [decode_grouped](../minipaged/attention/kernels/decode_grouped.py) calls `attend_keys`
# on all keys, [decode_split](../minipaged/attention/kernels/decode_split.py) on those of one part, and
# [decode_combine](../minipaged/attention/kernels/decode_combine.py) adds up the parts. What is new in the first against
# lesson 06 is three lines:
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
# The third, by the two kernels of [decode_in_parts](../coursekit/given/layers.py). One sequence has a single key and
# therefore empty parts.

# %%
ragged = AttentionBatch.build([[6, 1, 4], [0, 3], [1]], [1, 1, 1], [40, 17, 1], BLOCK_SIZE)
three = torch.randn(3, 3 * GROUP, 64, generator=generator)
right = ReferenceBackend().paged_attention(three, layer, ragged, scale=SCALE)
for part_len in (16, 32, 48):
    output = decode_in_parts(three, layer, ragged, SCALE, part_len)
    assert torch.allclose(output, right, atol=1e-5)
print("cut into parts of 16, 32 and 48 keys: equal to the float64 reference")

# %% [markdown]
# ## Find the bug
#
# A colleague found the condition `row < GROUP` superfluous: nobody looks at the padded rows. In a copy of the file she
# took it out. Her test, one sequence with SmolLM2's nine heads on three, passed in the interpreter. On a card the same
# test gives nonsense, now and then, and never the same twice; a model with a single KV head is right even there.

# %%
careless = changed_copy(decode_grouped, "used = (row < GROUP)", "used = (row >= 0)")


def errors(module, sequences):  # the largest [sequences, heads]
    some = AttentionBatch.build(block_lists[:sequences], [1] * sequences, LENGTHS[:sequences], 16)
    room, output = torch.zeros(2, sequences + 2, 9, 64)  # with room at the end: nothing crashes
    room[:sequences] = query[:sequences]
    call = (output[:sequences], room[:sequences], layer, some, SCALE)
    module.decode_grouped_launch(*call, target=H200).run()
    return (output[:sequences] - expected[:sequences]).abs().amax(dim=-1)


print("one sequence: largest error", f"{float(errors(careless, 1).max()):.0e}")

# %% [markdown]
# **What is wrong, and why does the test pass? Decide before you go on.** Then look which heads are wrong when the
# programs run from last to first (`reversed_programs`), and when there is a second sequence.

# %%
found = {"one sequence, in order": errors(careless, 1)[0]}
with reversed_programs():
    found["one sequence, reversed"] = errors(careless, 1)[0]
    found["the same, with the condition"] = errors(decode_grouped, 1)[0]
found["first of two, in order"], found["second of two, in order"] = errors(careless, 2)
rows = [(name, *("wrong" if e > 1e-3 else "·" for e in heads)) for name, heads in found.items()]
table(["", *(f"head {h}" for h in range(9))], rows)
assert [row.count("wrong") for row in rows] == [0, 6, 0, 0, 6]

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The tile of a KV head has sixteen rows for three query heads. Row 3 has the address of head 3, which belongs to the
# *next* KV head, and so on, into the next sequence. Without the condition each program stores thirteen rows that belong
# to others: their queries, with its own keys. The interpreter runs programs from first to last, and each overwrites what
# earlier ones left in its heads: with one sequence the right answer comes last. A card promises no order. With a single
# KV head there is no neighbour, only memory beyond the output, and nobody looked there.
#
# Real kernels trip here as well: with five query heads on each KV head, vLLM's did not compile (issue 18088; pull
# request 18100 pads to 16 rows).
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. Keys and values are stored in int8. What happens to the bound?</summary>
#
# Nearly half the bytes, so nearly half the time. The intensity nearly doubles, still far below any card's.
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
# becomes the average of values it must not see. And a real score may be lower still.
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
# - A decode step must read each key and value once. Their bytes over the bandwidth is the shortest possible time.
# - Packing the query heads of a KV head into one program reads each key once. The padded rows are free on a card.
# - Softmax can be taken in one pass, and in pieces, with three numbers: the largest score, the sum of weights, the
#   weighted sum of values.
# - A few long conversations leave a card idle. Cutting them gives every multiprocessor work; log-sum-exp puts the parts
#   together.
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
# - The data sheets of NVIDIA (T4, A100, H100, H200) and AMD (MI300X) for bandwidth and dense 16-bit products.
