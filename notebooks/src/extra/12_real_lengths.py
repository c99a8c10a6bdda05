# %% [markdown]
# # 12 · Study: real lengths
#
# A study beside [lesson 12](../12_engine.ipynb): the real model serves conversations of real lengths, under both
# policies, until the whole budget is filled. To keep it short, the budget is half of the lesson's: four strips of 4096.
# At the end it checks that both policies give the same tokens.

# %%
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from minipaged import KVSpec, load_model
from minipaged.attention import get_backend
from minipaged.cpu.accelerate import accelerate
from coursekit.comparison import equal_outputs, serve
from coursekit.figures import memory_over_time, show
from coursekit.lesson import number, pick_device, say, table
from coursekit.silent import add_all, real_llm, replay
from coursekit.workloads import azure_lengths, load_mix

# %% [markdown]
# The trace itself, from its first conversation on, in the order in which they came; only those longer than 4096 are
# skipped. SmolLM2 gets random tokens in exactly these lengths, at most 2048 in a step. Both policies go the same number
# of steps; then we stop. All requests came before the first step, so a [time to first
# token](../../docs/glossary.md#ttft) is the sum of the steps up to it.

# %%
device, half = pick_device()
loaded = load_model("smollm2-135m", dtype=half, device=device)
loaded, _ = accelerate(loaded, get_backend("auto", device))
config = loaded.config
MAX_LEN, STRIPS = 4096, 4
SLOTS = STRIPS * MAX_LEN
BUDGET = SLOTS * KVSpec.from_model(config, half).bytes_per_token
CHUNK, CHAT_STEPS, POLICIES = 2048, 10, {"strips": MAX_LEN, "blocks": 16}
replay_here = partial(replay, config, half, num_slots=SLOTS, max_len=MAX_LEN, chunk=CHUNK)

trace = azure_lengths("conv")
arrivals = np.flatnonzero(trace.sum(axis=1) <= MAX_LEN)[:150]  # far more than get in
chats = trace[arrivals]
say(f"{len(chats)} conversations wait; {arrivals[-1] + 1 - len(chats)} were skipped as too long.")

# %%
sizes = {"num_slots": SLOTS, "max_len": MAX_LEN, "chunk": CHUNK}
llms = {policy: real_llm(loaded, block_size=size, **sizes) for policy, size in POLICIES.items()}
asked = {policy: add_all(llm.engine, chats) for policy, llm in llms.items()}
rows, peak, held = [], {}, {}
for policy, llm in llms.items():
    while len(llm.trace) < CHAT_STEPS:
        llm.engine.step()
    silent, _ = replay_here(chats, block_size=POLICIES[policy], most_steps=CHAT_STEPS)
    for what in ("running", "used_bytes"):
        assert [getattr(r, what) for r in llm.trace] == [getattr(r, what) for r in silent.trace]
    peak[policy] = max(record.running for record in llm.trace)
    held[policy] = 100 * llm.trace[-1].used_bytes / BUDGET
    computed = llm.stats.num_prefill_tokens
    inside = [i for i, r in enumerate(asked[policy]) if r.metrics.ttft is not None]
    rows.append((policy, peak[policy], computed, len(inside), held[policy]))
names = ["at once, at most", "prompt tokens computed", "got a first token"]
table(["", *names, "% of the budget holds tokens, last step"], rows)
_, patient = replay_here(chats, block_size=MAX_LEN)
last = max(patient[i].metrics.ttft for i in inside)
say(f"""
    From blocks {len(inside)} had their first token within {CHAT_STEPS} steps. In strips the last
    of these {len(inside)} has it after {number(last)} steps, says the silent model.
""")
# %%
assert peak["strips"] == STRIPS < peak["blocks"] / 5 and held["strips"] < 20 < 95 < held["blocks"]
assert computed > 15_000 and last > 20 * CHAT_STEPS
by_step = {p: [replace(r, time=r.index) for r in llm.trace] for p, llm in llms.items()}
show(
    memory_over_time(by_step, BUDGET, x_label="step"),
    "KV memory of SmolLM2 serving real lengths: four strips reserve the whole budget at once and "
    "leave most of it empty; blocks fill it with tokens, chunk by chunk, until it is full.",
)
share = {
    policy: sum(r.used_bytes for r in llm.trace) / sum(r.reserved_bytes for r in llm.trace)
    for policy, llm in llms.items()
}
in_strips, in_blocks = share.values()
say(f"""
    Of what was reserved in these {CHAT_STEPS} steps, {100 * in_strips:.0f} % held tokens in strips,
    {100 * in_blocks:.1f} % in blocks.
""")
assert in_strips < 0.2 < 0.95 < in_blocks

# %% [markdown]
# ## In seconds

# %% tags=["nbval-ignore-output"]
rows, decode_seconds = [], 0.0
for policy, llm in llms.items():
    firsts = [r.metrics.first_token_time for r in asked[policy] if r.metrics.ttft is not None]
    ttft = [sum(step.duration for step in llm.trace if step.time < first) for first in firsts]
    seconds = sum(step.duration for step in llm.trace)
    only = [step for step in llm.trace if not step.prefill_tokens]
    decode_seconds = sum(step.duration for step in only)
    a_step = float(np.median([step.duration for step in only]))
    decoding = float(np.median([step.decode_tokens / step.duration for step in only]))
    rows.append((policy, seconds, decoding, 1e3 * a_step, float(np.mean(ttft)), max(ttft)))
speed = "tokens/s, steps that only decode"
names = ["seconds", speed, "ms of such a step", "TTFT, mean (s)", "TTFT, worst (s)"]
table(["", *names], rows)
strips_s = last * rows[0][3] / 1e3 + seconds * chats[inside, 0].sum() / computed
say(f"""
    With blocks, steps that only decode took {decode_seconds:.1f} s of {seconds:.1f} s; the rest
    went to steps that compute prompts. The last of the {len(inside)} had its first token after
    **{max(ttft):.0f} s**. In strips it would be about **{strips_s:.0f} s**, estimated from
    {number(last)} decode steps and the same prompts.
""")

# %% [markdown]
# On a CPU the gain in speed is smaller than the number of requests suggests, for two reasons. A prompt gains nothing from
# company: its tokens are multiplied together anyway, each has to be computed once under either policy, and on a CPU that
# is where the seconds go. And in a step that only decodes, a crowd shares the weights, but each of these long
# conversations reads its own keys. What blocks take away for certain is the wait before the first token.
#
# ## The same tokens
#
# The policy may change when a token is computed, never which. In 16 bits, rounding can tip a choice between two words,
# and it differs with the number of rows in a batch. So we compare in float32: six short requests, in a budget that holds
# two strips.

# %%
exact = load_model("smollm2-135m", dtype=torch.float32, device=device)
short = sorted(load_mix("instruct64"), key=lambda r: r.max_tokens)[:6]
two_strips = 2 * 128 * KVSpec.from_model(config, torch.float32).bytes_per_token
settings = {"kv_memory": two_strips, "max_model_len": 128, "max_num_batched_tokens": 2048}
settings |= {"device": device, "use_tqdm": False}
runs = [serve(name, exact, short, block_size=b, **settings) for name, b in (("s", 128), ("b", 16))]
print("at once:", [run.figures()["running_peak"] for run in runs])
print(f"same tokens: {equal_outputs(*runs)} of {len(short)}")
assert equal_outputs(*runs) == len(short)
assert runs[0].figures()["running_peak"] == 2 < runs[1].figures()["running_peak"]

# %% [markdown]
# ### Source
#
# - P. Patel et al., *Splitwise*, 2024, [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure trace (Azure
#   Public Dataset, AzureLLMInferenceTrace_conv, Microsoft, CC-BY 4.0).
