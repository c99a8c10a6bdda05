# %% [markdown]
# # 12 · Study: real lengths
#
# A study beside [lesson 12](../12_engine.ipynb): the real model serves conversations of real lengths, under both
# policies, until the whole budget is filled. To keep it short, the budget is half of the lesson's: four strips of 4096.

# %%
from dataclasses import replace
from functools import partial

import numpy as np

from minipaged import LLM, KVSpec, load_model
from minipaged.attention import get_backend
from minipaged.cpu.accelerate import accelerate
from coursekit.figures import memory_over_time, show
from coursekit.lesson import number, pick_device, say, table
from coursekit.silent import add_all, exactly, replay
from coursekit.workloads import azure_lengths

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


def make_llm(block_size):
    sizes = {"kv_memory": BUDGET, "block_size": block_size, "max_model_len": MAX_LEN}
    limits = {"max_num_seqs": SLOTS // 16, "max_num_batched_tokens": CHUNK}
    llm = LLM(loaded, device=device, enable_prefix_caching=False, **sizes, **limits)
    llm.generate({"prompt_token_ids": [0]}, exactly(2), use_tqdm=False)  # warm up
    llm.engine.reset_stats()
    return llm


# %%
llms = {policy: make_llm(size) for policy, size in POLICIES.items()}
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
say(f"""
    Of what was reserved in these {CHAT_STEPS} steps, {100 * share["strips"]:.0f} % held tokens in
    strips, {100 * share["blocks"]:.1f} % in blocks.
""")
assert share["strips"] < 0.2 < 0.95 < share["blocks"]

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
# ### Source
#
# - P. Patel et al., *Splitwise*, 2024, [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure trace (Azure
#   Public Dataset, AzureLLMInferenceTrace_conv, Microsoft, CC-BY 4.0).
