# %% [markdown]
# # 07 · Study: what the compiler says
#
# A study beside [lesson 07](../07_fast_decode.ipynb). The Triton kernels are compiled for an H100 or H200, with no such
# card here, and the compiler's report is read. Then come three questions that counting answers. Triton exists for Linux
# and Windows; elsewhere, read along.

# %%
import importlib.util
import json
import os
import subprocess
import sys

if importlib.util.find_spec("triton") is None:
    raise SystemExit("This study needs Triton (Linux, Windows): read the stored outputs here.")

from minipaged.attention.kernels import arguments
from minipaged.attention.targets import TARGETS
from coursekit.lesson import say, table
from coursekit.multiprocessors import busy_share, decode_programs, run_programs

# %% [markdown]
# ## The report
#
# `minipaged kernels` prints it for other cards and kernels too. The command runs in a process of its own. A row names the
# kernel, the numbers it reads, the head size (d) and the query heads of a group (g). Read the columns like this:
#
# - *registers*: numbers that each thread keeps at hand ([register](../../docs/glossary.md#register)); *spilled*: bytes of
#   those that did not fit and go to memory ([spill](../../docs/glossary.md#spill)), which is what we are short of;
# - *bytes a load*: a thread asks for 16 bytes at once, the most that one instruction usually can, where keys are 16-bit
#   numbers;
# - *tiles ahead*: while one [tile](../../docs/glossary.md#tile) is used, the next is copied into [shared
#   memory](../../docs/glossary.md#shared-memory);
# - *tensor cores*: the instruction by which a product runs on [them](../../docs/glossary.md#tensor-core);
# - *resident*: programs that one multiprocessor holds at a time, an estimate.

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

# %%
by_name = {r["kernel"]: r for r in reports if r["variant"] == "bf16 d128 g4"}
assert all(r["spill_bytes"] == 0 for r in reports)
assert all(min(r["load_bytes"].values()) == 16 for r in by_name.values())
packed = [by_name["decode_grouped"], by_name["decode_split"]]
assert all(max(r["buffers"].values()) >= 2 and r["matrix"] for r in packed)
readable = by_name["decode"]
assert not readable["matrix"] and max(readable["buffers"].values(), default=0) == 0
say("""
    No kernel spills. Those that pack the heads use the tensor cores and fetch two tiles ahead; the
    readable kernel of lesson 06 does neither.
""")

# %% [markdown]
# ## How many bytes are on their way?
#
# The lesson says that 4.8 MB must be on their way to read at an H200's full speed, if a load takes a microsecond to come
# back. How much is it with the tiles that the compiler fetches ahead, and the programs that a multiprocessor holds?

# %% tags=["nbval-ignore-output"]
target = TARGETS["sm_90"]
H200, report = target.num_multiprocessors, by_name["decode_split"]
ahead, resident = max(report["buffers"].values()), report["resident"]
a_tile = 2 * arguments.decode_tile(target, 4, 128, 2).keys * 128 * 2  # keys and values
on_the_way = ahead * resident * a_tile
say(f"""
    {ahead} tiles ahead, {resident} programs at a time: {on_the_way / 1024:.0f} KiB for a
    multiprocessor. With all {H200} at work, {H200 * on_the_way / 1e6:.0f} MB are on their way; with
    eight of them, {8 * on_the_way / 1e6:.1f} MB.
""")
assert H200 * on_the_way > 4.8e6 > 8 * on_the_way

# %% [markdown]
# ## What share of a step is it?
#
# A decode step reads the keys and values of each conversation, and all weights, once for the whole batch. Llama 3 8B,
# 16 bits:

# %%
weights = 8.03e9 * 2  # 8.03 billion parameters
kv = {batch: 32 * 2 * 8 * 128 * 2 * 4096 * batch for batch in (1, 8, 32, 128)}  # 32 layers
rows = [(f"{batch} × 4096", weights / 1e9, k / 1e9, k / (k + weights)) for batch, k in kv.items()]
table(["conversations", "weights, GB", "keys and values, GB", "share of keys and values"], rows)
assert kv[1] < 0.05 * weights and kv[32] > weights and kv[128] > 4 * weights

# %% [markdown]
# With one conversation the keys and values hardly count. From about thirty on they are most of what a step reads, and
# thirty at once is what paging makes possible.
#
# ## When does cutting pay?
#
# `keys_per_part` chooses how long a part is; `run_programs` says what share of the multiprocessors' time is used.

# %%
HEADS, KV_HEADS, SIZE, BYTES, LONG = 32, 8, 128, 2, 32768
rows = []
for count, context in ((1, LONG), (1, 2048), (4, 8192), (32, 4096), (128, 4096)):
    part_len = arguments.keys_per_part(count, KV_HEADS, context, H200)
    runs = [
        run_programs(decode_programs([context] * count, KV_HEADS, keys), H200)
        for keys in (context, part_len)
    ]
    shares = [round(busy_share(each, H200), 2) for each in runs]
    rows.append((f"{count} × {context}", part_len, *map(len, runs), *shares))
table(["batch", "keys per part", "programs", "programs, cut", "share used", "share, cut"], rows)
assert rows[0][1:4] == (512, 8, 512) and rows[0][5] >= 0.95

# %% [markdown]
# The last two batches gain nothing. They are cut all the same, because a part has at most 2048 keys: in a real batch one
# conversation is longer than the others, and uncut it would keep a single multiprocessor busy after all others have
# finished.
#
# ## What share of the bandwidth can each reach?
#
# At most, if every load goes to memory and each multiprocessor has an equal share of it: the bytes that must be read over
# those that are read, times the share of the multiprocessors' time that is used. One layer of Llama 3 8B on an H200.



# %%
def least_bytes(contexts):
    """Keys and values once, queries in, outputs out."""
    return 2 * BYTES * SIZE * (sum(contexts) * KV_HEADS + len(contexts) * HEADS)


def at_most(name, count, context):
    """Useful share of the bytes read, and the share of the bandwidth that can be reached."""
    heads = HEADS if name == "decode" else KV_HEADS
    length, useful = context, KV_HEADS / heads
    if name == "decode_split":
        length = arguments.keys_per_part(count, KV_HEADS, context, H200)
        stored = 2 * count * -(-context // length) * HEADS * (SIZE + 1) * 4
        useful = 1 / (1 + stored / least_bytes([context] * count))
    runs = run_programs(decode_programs([context] * count, heads, length), H200)
    return useful, useful * busy_share(runs, H200)


# %%
shares = {
    f"{name}, {count} × {context}": at_most(name, count, context)
    for count, context in ((32, 4096), (1, LONG))
    for name in ("decode", "decode_grouped", "decode_split")
}
table(["", "useful bytes", "share at most"], [(name, *pair) for name, pair in shares.items()])
limit = {name: share for name, (_, share) in shares.items()}
assert limit[f"decode_split, 1 × {LONG}"] > 10 * limit[f"decode_grouped, 1 × {LONG}"]
assert limit["decode_grouped, 32 × 4096"] > 3 * limit["decode, 32 × 4096"]
assert abs(limit[f"decode_grouped, 1 × {LONG}"] - limit[f"decode, 1 × {LONG}"]) < 1e-9

# %% [markdown]
# For many conversations, packing the heads is what counts. For a single long one it gains nothing by itself: fewer bytes,
# and as many times fewer programs. Only together with the split does it help.
#
# These are upper limits. `benchmarks/gpu_check.sh` measures the kernels on a card, as shares of that card's own copy of
# memory; none has been recorded yet.
