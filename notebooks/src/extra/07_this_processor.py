# %% [markdown]
# # 07 · Study: this processor
#
# A study beside [lesson 07](../07_fast_decode.ipynb): the two numbers of the machine that you are reading this on, and a
# compiled decode kernel timed on it. Times differ from run to run, so none of these outputs is compared when the
# notebook is tested.

# %%
import time
from functools import partial

import numpy as np
import torch

from minipaged import AttentionBatch, KVSpec, KVStorage
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cpu.backend import CpuBackend
from coursekit.figures import show
from coursekit.figures.roofline import roofline
from coursekit.lesson import say, table

# %% [markdown]
# ## Its two numbers
#
# A copy moves each byte twice, in and out; a product of two large matrices keeps the arithmetic busy. Each is the best
# of six runs.


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
# The last column is the machine's own quotient, the ridge of its [roofline](../../docs/glossary.md#roofline). Where do
# decode (4 operations a byte for Llama 3's groups of four) and decode padded to 16 rows stand under it?

# %% tags=["nbval-ignore-output"]
b, f = machines["this processor"]
stands = {"decode": 4.0, "16 rows": 16.0}
show(
    roofline({"this processor": (b, f), "H200": (4800e9, 989e12)}, stands, hollow=["16 rows"]),
    "The roof of this processor and, far above, that of an H200.",
)
slower = max(1.0, 16 * b / f) / max(1.0, 4 * b / f)
say(f"""
    The ridge is at {f / b:.1f} operations a byte. Padding four heads to 16 rows would make decode
    attention **{slower:.1f} times** as slow here. On a card it is free: its ridge is beyond 150.
""")
assert slower >= 1

# %% [markdown]
# That is why the kernel for the processor pads no rows.
#
# ## A compiled kernel, timed
#
# The decode kernel for the processor is in [C++](../../minipaged/cpu/csrc/decode.cpp): what `LLM` runs on a CPU with a
# C++ compiler (without one both rows below gather). Here it is beside the gather of lesson 05, and beside what a copy of
# memory reaches on this machine; many short conversations, and few long ones.

# %% tags=["nbval-ignore-output"]
BLOCK_SIZE, SCALE = 16, 64**-0.5
small_spec = KVSpec(num_layers=1, num_kv_heads=3, head_size=64, dtype=torch.float32)
generator = torch.Generator().manual_seed(7)
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
# Where a whole step's time goes on a processor is in [profile.md](../../docs/profile.md).
