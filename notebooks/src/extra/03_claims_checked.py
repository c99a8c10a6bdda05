# %% [markdown]
# # 03 · Study: three claims about wasted memory
#
# A study to [lesson 03](../03_contiguous_waste.ipynb) on [reservation](../../docs/glossary.md#reservation). Servers before paging
# "wasted 60 to 80 %" of their KV memory; a longer maximum makes it worse; and moving strips together is "impractical". The same
# simulation as in the lesson, once for each claim.
#
# About 10 minutes. No model is needed; runs in seconds.

# %%
import numpy as np

from coursekit.figures import lines_against_length, show
from coursekit.lesson import say, table
from coursekit.replay import replay_contiguous
from coursekit.traffic import contiguous_traffic
from coursekit.workloads import azure_lengths, lognormal_lengths

# %%
KB_PER_TOKEN, MAX_LEN = 800, 2048  # OPT-13B; the longest request allowed
BUDGET = 12 * 10**9 // (KB_PER_TOKEN * 1024)  # slots in 12 GB
RULES = {
    "maximum": "reserve the maximum",
    "power_of_two": "a power of two",
    "oracle": "the true length",
}
lengths = lognormal_lengths("sharegpt", 2000, seed=0)  # int64 [2000, 2]: prompt, answer
prompt, steps = lengths[:, 0], lengths[:, 1]
tokens_held = (steps * prompt + steps * (steps - 1) // 2).sum() / steps.sum()
print(f"a request holds {tokens_held:.0f} tokens on average over its steps")

# %% [markdown]
# ## "Up to 60 %": a claim checked
#
# One reads that servers before paging wasted "60 to 80 %" of their KV memory (the announcement of vLLM, June 2023), or "up to
# 60 %". Is that so? It depends on three things that are rarely stated with it: the rule, the traffic, and the maximum. Here are
# our figures, with recorded traffic as well: the conversations and the code completions of two Azure services. Each budget has
# room for seven of the longest requests and a little more, as above.

# %%
traffic = {  # lengths, longest request allowed, slots
    "ShareGPT-like": (lengths, MAX_LEN, BUDGET),
    "Azure conversations": (azure_lengths("conv")[:3000], 16384, 7 * 16384 + 2048),
    "Azure code": (azure_lengths("code")[:3000], 8192, 7 * 8192 + 1024),
}
wasted = {}
for name, (pairs, max_len, budget) in traffic.items():
    outcome = [contiguous_traffic(pairs, budget, max_len, rule) for rule in RULES]
    wasted[name] = [100 * (1 - result.waste.shares["used"]) for result in outcome]
table(
    ["wasted, %", *RULES.values()],
    [(name, *(round(w) for w in row)) for name, row in wasted.items()],
)

# %%
everywhere = [waste for row in wasted.values() for waste in row]
print(f"from {min(everywhere):.0f} % to {max(everywhere):.0f} % wasted, over all rules and traffic")
assert all(60 <= round(waste) <= 80 for waste in wasted["ShareGPT-like"][:2])
assert max(everywhere) > 90 and min(everywhere) < 40

# %% [markdown]
# On chats like those of the paper, the two rules that a real server could use waste between 60 and 80 percent: there, the
# claim holds. "Up to 60" is too low: with a long maximum it is above ninety. And on code, where prompts are long and answers
# short, a good guess would have wasted less than forty. A percentage means little unless its traffic is named.

# %% [markdown]
# ## The longer the maximum, the worse
#
# Under the rule of the maximum the number of requests at once does not depend on the requests at all. Allow them to be twice as long, and
# all reservations double, although the requests stay as they were. On average a request holds a certain number of tokens,
# whatever was reserved; so the share that holds tokens should be that number divided by the longest length allowed. The line is
# this prediction, the dots are measured:

# %%
longer = {}
for max_len in range(2048, 16385, 1024):
    waste = contiguous_traffic(lengths, 7 * 16384, max_len, "maximum").waste
    longer[max_len] = waste.used / (waste.used + waste.to_come + waste.never)
largest = max(abs(share * n / tokens_held - 1) for n, share in longer.items())
print(f"the prediction is off by {100 * largest:.1f} % at most")
assert all(abs(share * n / tokens_held - 1) < 0.03 for n, share in longer.items())

# %%
show(
    lines_against_length(
        {
            "predicted\n(dots: measured)": [
                (n, 100 * tokens_held / n) for n in range(2048, 16385, 128)
            ]
        },
        points=[(n, 100 * share) for n, share in longer.items()],
        points_label="",
        x_label="longest request allowed (tokens)",
        y_label="reserved memory that holds tokens (%)",
    ),
    "The share of reserved memory that holds tokens, against the longest length allowed: it "
    "falls as one over that length, and the measured dots lie on the predicted line.",
)

# %% [markdown]
# ## "Impractical": what compaction costs
#
# The paper (section 3.1) calls [compaction](../../docs/glossary.md#compaction) impractical because the cache is so large. Count the
# slots that have to be copied when the oracle's strips are moved together whenever the next request would fit if all holes were one.

# %%
packed = list(replay_contiguous(lengths[:600], BUDGET, MAX_LEN, "oracle", compact=True))
moves = [step.moved for step in packed if step.moved]
bytes_moved = np.mean(moves) * KB_PER_TOKEN * 1024
say(f"{len(moves)} compactions in {len(packed)} steps, of {bytes_moved / 1e9:.1f} GB on average.")
assert 2e9 < bytes_moved < 8e9

# %% [markdown]
# What does moving cost? Each byte is read once and written once. The paper's card, an A100 with 40 GB, moves at most 1 555 GB a
# second, and everybody waits meanwhile.

# %%
A100 = 1555e9  # bytes per second, from its data sheet
pause = 2 * bytes_moved / A100
per_step = sum(moves) * KB_PER_TOKEN * 1024 * 2 / A100 / len(packed)
say(f"One pause: {1000 * pause:.1f} ms. Spread over all steps: {1000 * per_step:.2f} ms each.")
assert pause < 0.01 and per_step < 0.001

# %% [markdown]
# So on this card, with this traffic, compaction is *not* ruinous. We expected worse. What speaks against it is that it only closes
# holes: the room kept for tokens to come stays.
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 3.1 on compaction.
# - P. Patel et al., *Splitwise: Efficient Generative LLM Inference Using Phase Splitting*, ISCA 2024,
#   [arXiv:2311.18677](https://arxiv.org/abs/2311.18677): the Azure traces (Azure Public Dataset, Microsoft, CC-BY 4.0).
