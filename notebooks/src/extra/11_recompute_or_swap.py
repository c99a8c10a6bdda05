# %% [markdown]
# # 11 · Study: recompute or swap
#
# A study beside [lesson 11](../11_scheduler.ipynb). There are two ways to [preempt](../../docs/glossary.md#preemption) a
# request: compute its tokens again later, or move its blocks to the host's memory and back. Which is cheaper? On paper it
# is swap. vLLM recomputes. This study has the arithmetic, both ways timed, and what the arithmetic leaves out.

# %%
import time

import torch

from minipaged import LLM, BlockTable, KVSpec, SamplingParams
from coursekit.figures import show
from coursekit.figures.scheduling import gantt, preemption_costs
from coursekit.lesson import number, say, table
from coursekit.small_engine import serve_lengths, serve_to_end, small_llm, small_mix
from coursekit.timeline import Timeline

# %% [markdown]
# ## On paper
#
# Two speeds of the machine decide: how fast it computes prompts, and how fast it copies blocks to the host and back. The
# PagedAttention paper's card, an A100, does at most 312 · 10¹² operations a second. It sits on a bus of 16 lanes (PCI
# Express 4.0), each with 16 · 10⁹ bits a second in either direction, of which 128 in 130 are data. A token takes two
# operations for each parameter; OPT-13B has 800 KiB of keys and values a token.

# %%
OPERATIONS, BUS = 312e12, 16 * 16e9 * 128 / 130 / 8  # a second, and bytes a second
llama = KVSpec(num_layers=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
models = {"OPT-13B": (13e9, 800 * 1024), "Llama 3 8B": (8e9, llama.bytes_per_token)}
costs, rows = {}, []
for name, (parameters, kv_bytes) in models.items():
    again, moved = 1e6 * 2 * parameters / OPERATIONS, 1e6 * 2 * kv_bytes / BUS  # µs, for one token
    costs[name] = again / moved
    rows.append((name, again, moved, costs[name], BUS / costs[name] / 1e9))
say(f"The bus carries {BUS / 1e9:.1f} GB a second each way.")
names = ["recompute, µs a token", "swap, µs a token", "ratio"]
table(["on an A100", *names, "the bus (GB/s) at which both cost the same"], rows)
assert 1 < costs["OPT-13B"] < 2 and costs["Llama 3 8B"] > 6

# %% [markdown]
# For OPT-13B the two are within a factor of two; the paper measured them about equal for blocks of 16 to 64 tokens (its
# section 7.3). In Llama 3 several query heads share their keys ([GQA](../../docs/glossary.md#gqa)), so there is little to
# move, and swap wins by far, even on a bus of a fifth of this speed.
#
# ## Both, timed
#
# No machine reaches these full speeds. So time both, on the machine in front of you: SmolLM2, with a pool of 32 blocks.
# Recomputing is a prompt of as many tokens; swapping copies its blocks out and back. Each is the best of three.

# %% tags=["nbval-ignore-output"]
sizes = {"num_blocks": 32, "max_model_len": 512, "enable_prefix_caching": False}
llm = LLM(preemption="swap", swap_space="64MiB", **sizes)
one_token = SamplingParams(temperature=0, max_tokens=1)


def best_of(action, *arguments, times=3, **options):
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action(*arguments, **options)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def there_and_back(blocks):
    swap = llm.engine.manager.swap
    assert swap.swap_out([blocks]) and swap.swap_in([blocks])
    if llm.device.type == "cuda":
        torch.cuda.synchronize()


# %% tags=["nbval-ignore-output"]
recompute_ms, swap_ms = {}, {}
for tokens in (32, 64, 128, 256, 384):
    prompt = {"prompt_token_ids": list(range(100, 100 + tokens))}
    recompute_ms[tokens] = best_of(llm.generate, prompt, one_token, use_tqdm=False)
    blocks = BlockTable(llm.engine.pool, 16)
    blocks.append(tokens)
    swap_ms[tokens] = best_of(there_and_back, blocks)
    blocks.free()
table(
    ["tokens held", "ms to compute again", "ms to move out and back"],
    [(str(n), recompute_ms[n], swap_ms[n]) for n in recompute_ms],
)
show(
    preemption_costs(recompute_ms, swap_ms),
    "Milliseconds of both ways against the tokens held, on a logarithmic axis: a line for each, "
    "and both rise with the tokens.",
)

# %% [markdown]
# Both costs grow with the tokens held. Where the two lines are far apart, no length makes the other way win: the machine
# decides, not the request. Without a GPU the times say no more than that. There is no bus then: "host" and "device" are
# the same memory, and computing is slow.
#
# ## What the arithmetic leaves out
#
# vLLM's documents say: "In vLLM V1, the default preemption mode is `RECOMPUTE` rather than `SWAP`, as recomputation has
# lower overhead in the V1 architecture." One reason can be measured here. With [prefix
# caching](../../docs/glossary.md#prefix-caching) (lesson 10) the content of a block that is given up stays known until
# the block is needed. A request that returns finds part of its own keys still there. The 48 chats of lesson 11, in 100
# blocks:

# %%
again = {}
for caching in (False, True):
    small = small_llm(num_blocks=100, enable_prefix_caching=caching)
    timeline = Timeline(small.engine)
    serve_to_end(small, small_mix())
    again[caching] = timeline.again
say(f"""
    Computed again: {number(again[False])} tokens without prefix caching, {number(again[True])}
    with it.
""")
assert 0.5 < again[True] / again[False] < 2 / 3

# %% [markdown]
# More than a third of the work is saved, without moving a byte, and without a line of code for swapping. And recomputing
# shares a step with the decodes of others, while a copy has to be waited for. So an engine without swap loses less than
# the arithmetic says, and is simpler.
#
# ## The picture with swap
#
# Lesson 11 shows five requests in twelve blocks, with recompute. The same with swap:

# %%
FIVE = [(6, 18), (9, 14), (20, 8), (5, 16), (11, 6)]
limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
recompute, _ = serve_lengths(FIVE, **limits)
swap, _ = serve_lengths(FIVE, preemption="swap", swap_space="1MiB", **limits)
show(
    gantt(swap.states()),
    "A chart of five requests over the steps, with swap: C, D and E leave with their blocks and "
    f"come back with them: {swap.preemptions} preemptions instead of {recompute.preemptions}.",
)
assert (recompute.preemptions, swap.preemptions) == (2, 4) and swap.again == 0 < recompute.again

# %% [markdown]
# No prompt is computed a second time: a request that comes back decodes at once. So requests grow at other times than with
# recompute, and others must leave: here there are four preemptions instead of two. That is chance, not a rule: on the 48
# chats both ways had the same number.
#
# ## A choice for each request?
#
# Recompute or swap is a setting, and the engine does not choose for each request that has to give way. Should it? Say a
# token takes 1 ms to compute, and moving a block of 16 takes 4 ms on one machine and 20 ms on another. Which requests
# would be better off swapped?

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
# fast bus. The two ways cost the same where a full block costs as much as its 16 tokens. For all but the shortest
# requests the machine decides, and not the length; that is why it can be a setting.
#
# ### Sources
#
# - W. Kwon et al., *PagedAttention*, SOSP 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 7.3.
# - NVIDIA, *A100 40GB PCIe GPU Accelerator*, product brief, 2020: the bus; the A100's data sheet: its operations.
# - vLLM, [*Optimization and Tuning*](https://docs.vllm.ai/en/stable/configuration/optimization/), section Preemption.
