# %% [markdown]
# # 11 · Study: recompute or swap
#
# A study beside [lesson 11](../11_scheduler.ipynb): both ways to [preempt](../../docs/glossary.md#preemption) a request,
# timed on the machine in front of you, and the speed of the bus at which they cost the same. Times differ from run to
# run, so these outputs are not compared when the notebook is tested.

# %%
import time

import torch

from minipaged import LLM, BlockTable, SamplingParams
from coursekit.figures import show
from coursekit.figures.scheduling import preemption_costs
from coursekit.lesson import say, table

# %% [markdown]
# ## Both, timed
#
# SmolLM2, with a pool of 32 blocks. Recomputing is a prompt of as many tokens; swapping copies its blocks out and back.
# Each is the best of three.

# %% tags=["nbval-ignore-output"]
llm = LLM(
    num_blocks=32,
    max_model_len=512,
    preemption="swap",
    swap_space="64MiB",
    enable_prefix_caching=False,
)
spec, manager = llm.engine.storage.spec, llm.engine.manager
one_token = SamplingParams(temperature=0, max_tokens=1)


def best_of(action, *arguments, times=3, **options):
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action(*arguments, **options)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def there_and_back(blocks):
    assert manager.swap.swap_out([blocks]) and manager.swap.swap_in([blocks])
    if llm.device.type == "cuda":
        torch.cuda.synchronize()


# %% tags=["nbval-ignore-output"]
recompute_ms, swap_ms = {}, {}
for tokens in (32, 64, 128, 256, 384):
    prompt = {"prompt_token_ids": list(range(100, 100 + tokens))}
    recompute_ms[tokens] = 1e3 * best_of(llm.generate, prompt, one_token, use_tqdm=False)
    blocks = BlockTable(llm.engine.pool, 16)
    blocks.append(tokens)
    swap_ms[tokens] = 1e3 * best_of(there_and_back, blocks)
    blocks.free()
a_token, a_block = recompute_ms[128] / 128, swap_ms[128] / 8  # the two speeds, at 128 tokens
table(
    ["tokens held", "ms to compute again", "predicted", "ms to move out and back", "predicted"],
    [(str(n), recompute_ms[n], n * a_token, swap_ms[n], n / 16 * a_block) for n in recompute_ms],
)

# %% [markdown]
# (The predictions take both speeds from the row of 128 tokens.) Both costs grow with the tokens held. Recompute does
# not grow quite evenly: each step has a fixed cost, which few tokens cannot share, and attention over many tokens
# costs more for each. But where the two lines are far apart, no length makes the other way win. What decides is a
# ratio of the two speeds. Divide the bytes that a swap moves by the time that recomputing takes: that is the **speed
# of the bus at which both cost the same**. On a slower one, recompute.

# %% tags=["nbval-ignore-output"]
TOKENS = 256
moved_bytes = 2 * spec.bytes_for(TOKENS, 16)
bandwidth = moved_bytes / (swap_ms[TOKENS] / 1e3)
crossing = moved_bytes / (recompute_ms[TOKENS] / 1e3)
cheaper = "swapping" if bandwidth > crossing else "recomputing"
say(f"""
    {TOKENS} tokens: {moved_bytes / 2**20:.0f} MiB moved. Here blocks are copied at
    {bandwidth / 1e9:.2g} GB/s; the two ways cost the same at {crossing / 1e9:.2g} GB/s. So on this
    machine {cheaper} is cheaper, {max(bandwidth / crossing, crossing / bandwidth):.0f} times.
""")
show(
    preemption_costs(
        recompute_ms,
        swap_ms,
        tokens=TOKENS,
        recompute_ms=recompute_ms[TOKENS],
        moved_bytes=moved_bytes,
        bandwidth=bandwidth,
    ),
    "Left: milliseconds of both ways against the tokens held. Right: recompute is a flat line, "
    "swap falls with the speed of the bus; they cross at the speed where both cost the same.",
)

# %% [markdown]
# Without a GPU that is not a verdict: there is no bus, "host" and "device" are the same memory, and computing is slow.
# For a card, lesson 11 does the arithmetic.
#
# ## For each victim?
#
# Recompute or swap is a setting, and the engine does not choose for each victim. Should it? Say a token takes 1 ms to
# compute, and moving a block of 16 takes 4 ms on one machine and 20 ms on another. Which victims would be better off
# swapped?

# %%
held = (1, 3, 5, 16, 17, 100)
rows = []
for block_ms in (4, 20):
    ways = ["swap" if -(-n // 16) * block_ms < n * 1 else "recompute" for n in held]
    rows.append((f"{block_ms} ms a block", *ways))
table(["tokens held", *map(str, held)], rows)
assert rows[0][1:] == ("recompute",) * 2 + ("swap",) * 4 and set(rows[1][1:]) == {"recompute"}

# %% [markdown]
# Blocks are moved whole, however little is in the last one. So a very short request is better recomputed even on a
# fast bus. The crossing is where a full block costs as much as its 16 tokens. For all but the shortest requests the
# machine decides, and not the length; that is why it can be a setting.
#
# ### Source
#
# - W. Kwon et al., *PagedAttention*, SOSP 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 7.3.
