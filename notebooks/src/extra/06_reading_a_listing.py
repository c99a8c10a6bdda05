# %% [markdown]
# # 06 · Study: reading a compiler's listing
#
# A study to [lesson 06](../06_first_triton_kernel.ipynb): what Triton's compiler makes of the decode kernel, for cards that are not
# here. The listing has hundreds of lines, but we have few questions: what is read in the innermost loop, how wide, and by which
# line of the kernel?
#
# About 20 minutes. It needs Triton, which exists for Linux and Windows.

# %%
# Triton decides when it is imported whether it compiles or interprets, so this comes first.
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("triton") is None:
    raise SystemExit("This study needs Triton, which exists for Linux and Windows: read on here.")

import inspect
import json
import subprocess
import sys

from coursekit.aot.listing import Listing, matrix_instructions
from coursekit.lesson import table
from minipaged.attention.kernels.addresses import look_up_blocks
from minipaged.attention.kernels.decode import decode_kernel

# %% [markdown]
# This process interprets kernels, so another one compiles `decode`, for an H100 (`sm_90`), with the heads of an 8-billion-parameter
# Llama, and prints the result.

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
# It is [PTX](../../docs/glossary.md#ptx), NVIDIA's assembly language. A *load* brings one thread some bytes from the card's memory.
# Which loads are there in the loop?

# %%
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
assert set(reads["keys"]) == set(reads["values"]) == {16} and set(reads["block table"]) == {4}
assert loads == {}  # nothing else is read in the loop
THREADS, KEYS, NUMBERS, BYTES = 128, 32, 128, 2
assert THREADS * sum(reads["keys"]) == KEYS * NUMBERS * BYTES

# %% [markdown]
# A program has 128 threads here, and its tile is 32 keys of 128 numbers of two bytes: 8192 bytes, 64 for each thread. They come in
# four loads of 16 bytes, the most that one load can bring a thread here, and no key is read twice. The table's entries come one by
# one. Here are the instructions, the first of each kind:

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
# Other cards, from the command that does this for every kernel of the engine, `minipaged kernels`. (A thread keeps the numbers it
# works on in [registers](../../docs/glossary.md#register). When it has more numbers than registers, some are *spilled*: they go to
# memory and back.)

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
# ## When the compiler knows less
#
# The wide loads come from a promise: the cache begins at a multiple of 16 bytes, and the strides are multiples of 16 numbers. Take the
# promise away, with heads that lie 136 numbers apart or 129, and look at the width of the loads of keys.

# %%
widths = {}
for stride in (128, 129, 136, 144):
    apart = loads_of(Listing.parse(compiling_process("-c", COMPILE, str(stride))))[LINES["keys"]]
    widths[stride] = len(apart)
    print(f"heads {stride} numbers apart: {len(apart):>3} loads of {apart[0]} bytes")
    assert sum(apart) == sum(reads["keys"])
assert widths[128] == widths[144] and widths[129] == widths[136] == 8 * widths[128]

# %% [markdown]
# With 136 the addresses would even lie at multiples of 16 bytes; but all that the compiler is told of a stride is whether it is a
# multiple of 16 numbers. The answers are the same either way: only the listing tells.
#
# ### Sources
#
# - NVIDIA, [*PTX ISA*](https://docs.nvidia.com/cuda/parallel-thread-execution/): the instructions of the listing.
