# %% [markdown]
# # 08 · Prefill and chunks
#
# So far a step did one kind of work: the next token of every conversation, or one prompt. A server has both at once:
# some conversations are answering while new prompts arrive, some of them long. This lesson puts it all into one step,
# without padding, and cuts a long prompt into pieces so that nobody has to wait for it.
#
# **You will be able to** lay out the tokens of a mixed step by hand, say which keys each of its queries may see,
# prove that a prompt computed in pieces gives the same answer, and say what a token budget buys and what it costs.
#
# About 40 minutes. Runs in half a minute on two CPU cores; no GPU is used.

# %%
import math

import ipywidgets
import numpy as np
import torch
import torch.nn.functional as F

from minipaged import LLM, AttentionBatch, KVSpec, KVStorage, SamplingParams, load_model
from minipaged.attention import get_backend
from coursekit.figures import show
from coursekit.figures.chunks import mask_corners, prompt_in_chunks, tokens_per_step
from coursekit.interruption import serve_and_interrupt
from coursekit.lesson import compare, say, show_source, table
from coursekit.widgets import Explorable
from coursekit.workloads import load_mix

# %% [markdown]
# ## The question
#
# Two words first. [Prefill](../docs/glossary.md#prefill) computes the keys and values of a prompt, many tokens in one
# step. [Decode](../docs/glossary.md#decode) computes one token per sequence and step.
#
# **How do sequences with 1, 40 and 400 new tokens go through the model in one step? And when somebody sends a prompt of
# 400 tokens, what happens to the eight people who are reading their answers as they appear?**
#
# ## Your prediction
#
# 1. The 48 prompts of our request mix `chat48` are computed in one step, as a rectangle: each is padded to the length
#    of the longest. What percentage of the rectangle is padding?
# 2. A sequence has five keys, whose values are 1, 2, 3, 4, 5. Two of its tokens are new. All scores are 0, so a query
#    gets the plain average of the values it sees. What does the *first* of the two queries get?
# 3. A step may compute 64 tokens. Eight conversations are answering, and a prompt of 400 tokens arrives. How many steps
#    does it take, if none of the eight is to miss a step?

# %%
my_padding_percent = None  # your guess
my_first_query = None  # your guess
my_chunks = None  # your guess

# %% [markdown]
# ## Measure
#
# ### What padding costs
#
# A tensor is a rectangle; prompts differ in length.

# %%
prompts = [len(request.prompt_token_ids) for request in load_mix("chat48")]
mixed = [max(prompts)] + [1] * (len(prompts) - 1)
rows = []
for name, lengths in (("48 prompts", prompts), ("the longest prompt beside 47 decodes", mixed)):
    rectangle = len(lengths) * max(lengths)
    rows.append((name, sum(lengths), rectangle, round(100 * (1 - sum(lengths) / rectangle))))
table(["one step", "tokens", "as a rectangle", "% padding"], rows)
wrong_padding = {
    50: "that would be lengths spread evenly between nothing and the longest; but a few long "
    "prompts stretch the rectangle for all the others"
}
compare(my_padding_percent, rows[0][3], "percent padding", wrong_padding)
assert 50 < rows[0][3] < rows[1][3]

# %% [markdown]
# Padding is computed through every layer like anything else, and then thrown away. It is worst for the very step we are
# after: one long prompt beside many decodes.
#
# ### End to end
#
# The cure is to have no rectangle. All new tokens of a step lie end to end, a [ragged
# batch](../docs/glossary.md#ragged-batch): one row for each token. A list of prefix sums, `query_start`, says where each
# sequence begins. Three sequences, blocks of four: A decodes its sixth token, B brings a whole prompt of three, C the
# last two of nine tokens.

# %%
BLOCK_SIZE, block_lists = 4, [[7, 2], [5], [0, 9, 4]]
batch = AttentionBatch.build(block_lists, [1, 3, 2], [6, 3, 9], BLOCK_SIZE)
print("query_start:", batch.query_start.tolist())
rows = [
    (f"{row}: {'ABBBCC'[row]}", position, slot, position + 1)
    for row, (position, slot) in enumerate(zip(batch.positions, batch.slot_mapping, strict=True))
]
table(["row", "position", "slot of its key", "keys it sees"], rows)
assert batch.slot_mapping.tolist() == [9, 20, 21, 22, 39, 16]

# %% [markdown]
# **Try one by hand**: C's first new token is at position 7, the last place of C's second block. That is block 9, so
# its slot is … (row 4 of the table has it).
#
# Most of a model does not care whose token a row is: norms, projections and the MLP treat each row alone. Only
# attention does, and it has `query_start`, the context lengths and the block tables. So a ragged step gives each
# sequence what it would get alone. Three prompts on the real model, first together, then one by one:

# %%
loaded = load_model("smollm2-135m", dtype=torch.float32, device="cpu")
model, tokenizer, backend = loaded.model, loaded.tokenizer, get_backend("torch", "cpu")
spec = KVSpec.from_model(loaded.config, torch.float32)


def run(storage, sequences):
    """One step; sequences: (blocks, tokens so far, how many are new) -> hidden [T, H]."""
    blocks, tokens, new = zip(*sequences, strict=True)
    step = AttentionBatch.build(blocks, new, [len(t) for t in tokens], BLOCK_SIZE)
    rows = [token for t, n in zip(tokens, new, strict=True) for token in t[len(t) - n :]]
    return model(torch.tensor(rows), step, storage, backend)


texts = ["The capital of France is", "One, two, three, four,", "Water boils at"]
ids = [tokenizer.encode(text) for text in texts]
places = [[8 * i + b for b in (3, 0, 6, 1, 4)] for i in range(3)]  # scattered blocks of each
together = [(blocks, t, len(t)) for blocks, t in zip(places, ids, strict=True)]
hidden = run(KVStorage(spec, 24, BLOCK_SIZE), together)
for one, rows in zip(together, hidden.split([len(t) for t in ids]), strict=True):
    assert torch.allclose(rows, run(KVStorage(spec, 24, BLOCK_SIZE), [one]), rtol=1e-3, atol=1e-3)
print(len(hidden), "tokens in a step; each of the three as if alone, up to rounding")

# %% [markdown]
# ### The corner of the mask
#
# C is new: it has *more keys than queries*, nine keys and two queries. Which keys may each query see? Torch has a mask
# ready, `is_causal=True`. Ask it, with five keys of which two are new, values 1 to 5, and all scores 0. Beside it, a
# mask made from where each query stands in the text:

# %%
values = torch.arange(1.0, 6.0).reshape(1, 1, 5, 1)  # [batch, heads, keys, size]
keys, query = torch.zeros(1, 1, 5, 1), torch.zeros(1, 1, 2, 1)
mask = torch.ones(2, 5, dtype=torch.bool).tril(5 - 2)  # query i stands at position 5 - 2 + i
first = F.scaled_dot_product_attention(query, keys, values, is_causal=True).flatten().tolist()
last = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).flatten().tolist()
show(
    mask_corners(2, 5, {"first": first, "last": last}),
    "Two masks of two queries by five keys. Left, is_causal: aligned to the first key, queries see "
    "one and two. Right, by position: aligned to the last, four and five.",
)
wrong_first_query = {
    1.0: "that is a mask whose first query stands at position 0; but three tokens were"
    " there before it",
    1.5: "that is a query at position 1; it is the fourth token, and sees keys 1 to 4",
    3.0: "that is all five keys; the last of them comes after this query",
}
compare(my_first_query, last[0], "for the first query", wrong_first_query)
assert first == [1.0, 1.5] and last == [2.5, 3.0]

# %% [markdown]
# A token sees itself and what stands before it: the [causal mask](../docs/glossary.md#causal-mask). The last of $q$
# queries stands at the last of $k$ keys, so query $i$ is at position
#
# $$k - q + i$$
#
# and sees the keys up to there. `is_causal`, on the left, counts both queries and keys from their first. The three newest
# keys, the queries' own among them, are not seen at all. Nothing fails, and no shape is wrong.
#
# **Why do so many get this wrong?** Because the two masks are the same when a whole prompt is computed at once, and
# decode, with one query, needs no mask at all. A test of prefill and a test of decode both pass:

# %%
for length in (2, 5, 17):
    q, k, v = torch.randn(3, 1, 1, length, 8, generator=torch.Generator().manual_seed(length))
    mask = torch.ones(length, length, dtype=torch.bool).tril(0)  # k - q = 0
    by_causal, by_mask = (
        F.scaled_dot_product_attention(q, k, v, **way)
        for way in ({"is_causal": True}, {"attn_mask": mask})
    )
    print(f"{length} of {length} queries: equal", torch.allclose(by_causal, by_mask, atol=1e-6))

# %% [markdown]
# ### A prompt in pieces
#
# With the right corner, a prompt can be computed in chunks: each chunk writes its keys and values, and reads those of
# the chunks before it. This is [chunked prefill](../docs/glossary.md#chunked-prefill). Ten tokens on the real model,
# three ways.

# %%
sentence = tokenizer.encode("A library keeps its books wherever there is room on the shelves")[:10]


def in_chunks(chunk_lens):
    """Logits after each chunk; all keys and values [2, layers, tokens, heads, size]."""
    storage, logits, stop = KVStorage(spec, 4, BLOCK_SIZE), [], 0
    for n in chunk_lens:
        stop += n
        hidden = run(storage, [([2, 0, 3], sentence[:stop], n)])
        logits.append(model.compute_logits(hidden[-1:])[0])
    slots = AttentionBatch.build([[2, 0, 3]], [stop], [stop], BLOCK_SIZE).slot_mapping
    return logits, torch.stack([c.flatten(1, 2)[:, slots] for c in (storage.key, storage.value)])


def same(one, other):
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3)


(whole_logits,), whole_stored = in_chunks([10])
for chunks in ([10], [4, 4, 2], [1] * 10):
    logits, stored = in_chunks(chunks)
    assert same(stored, whole_stored) and same(logits[-1], whole_logits)
    print(chunks, "the next token:", repr(tokenizer.decode([int(logits[-1].argmax())])))

# %% [markdown]
# Keys, values and logits are the same too, up to rounding, because other shapes add the same numbers in another order.
# Nothing here is new: decode *is* a chunk of one token. And when the beginning of a prompt is found in a prefix cache, a
# *prefix hit* (lesson 10), only its last chunk is left to compute. So the engine has one Triton kernel for all of these:
# the study [One kernel for every step](extra/08_one_kernel.ipynb) opens it.
#
# Note one thing for later. Every chunk has a last row, and the logits there are those of a prompt that *ends* there.
# After the first four tokens the model predicts something too:

# %%
early = int(in_chunks([4])[0][0].argmax())
print(repr(tokenizer.decode(sentence[:4])), "->", repr(tokenizer.decode([early])))
print("the prompt goes on with:     ", repr(tokenizer.decode(sentence[4:5])))

# %% [markdown]
# That prediction must not become a token of the answer. Only the row of a prompt's *last* token may be sampled.
#
# ### Why a server cuts prompts
#
# Now the engine, with a tiny random model, since we count tokens. Eight conversations are answering. After six steps a
# prompt of 400 tokens arrives ([serve_and_interrupt](../coursekit/interruption.py)). Once without chunks, once with a
# [token budget](../docs/glossary.md#token-budget) of 64: no step computes more.

# %%
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

tiny = LoadedModel(random_llama(), None, TINY, "tiny")
CHATS, LONG, BUDGET = 8, 400, 64
rng = np.random.default_rng(0)
chats = [rng.integers(3, TINY.vocab_size, 7).tolist() for _ in range(CHATS)]
long_prompt = rng.integers(3, TINY.vocab_size, LONG).tolist()
SETTINGS = {
    "whole prompts": {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
    f"chunks, {BUDGET} tokens a step": {"max_num_batched_tokens": BUDGET},
}
runs = [serve_and_interrupt(tiny, chats, long_prompt, **options) for options in SETTINGS.values()]
(answers, _), (chunked_answers, _) = runs
whole, chunked = ([(s.prefill_tokens, s.decode_tokens) for s in trace] for _, trace in runs)
rows = [(f"{i}", *whole[i], *chunked[i]) for i in range(5, 15)]
table(["step", "whole: prompt", "whole: decodes", "chunks: prompt", "chunks: decodes"], rows)

# %%
with_prompt = [prefill for prefill, _ in chunked[6:] if prefill]
wrong_chunks = {
    7: "400 / 64, rounded up; but the eight conversations take eight of the 64 in every step",
    6.25: "a step is whole, and eight of its 64 tokens belong to the conversations",
}
compare(my_chunks, len(with_prompt), "steps", wrong_chunks)
print("answers that differ:", sum(answers[k] != chunked_answers[k] for k in answers))
assert with_prompt[0] == BUDGET - CHATS and sum(with_prompt) == LONG
assert answers == chunked_answers and len(answers) == CHATS + 1

# %% [markdown]
# Decodes come first: eight of the 64 tokens. The prompt gets the other 56. None of the eight misses a step, no step is
# long, and every answer is the same, token for token. (The ninth decode, later on, is the newcomer's own answer.)
#
# What do the eight notice? While a step of 408 tokens is computed, all of them stand still. SmolLM2 on this machine,
# with a prompt of 256 tokens. (Times differ, so this output is not compared when the lesson is tested.)

# %% tags=["nbval-ignore-output"]
real_chats = [tokenizer.encode(text) for text in texts * 3][:CHATS]
real_long = (tokenizer.encode("A library keeps its books wherever there is room. ") * 30)[:256]
rows = []
for name, options in SETTINGS.items():
    _, trace = serve_and_interrupt(loaded, real_chats, real_long, tokens=16, **options)
    durations = [1000 * step.duration for step in trace[6:] if step.prefill_tokens]
    rows.append((name, round(max(durations)), round(sum(durations))))
table(["", "longest pause of the chats, ms", "the long prompt takes, ms"], rows)

# %% [markdown]
# The second column is the other side: the pause is shorter, and the newcomer waits longer for its first token
# ([TTFT](../docs/glossary.md#ttft)), because its prompt takes more steps, and each carries the others along. The budget
# chooses between the two.
#
# ## The picture
#
# Chunks of a prompt. All the blue rows begin at the first key and end at the diagonal: that is the corner.

# %%
show(
    prompt_in_chunks([4, 4, 2], 1),
    "A triangle of scores for ten queries, in three chunks. The four rows of the second are blue: "
    "they begin at the first key, of which four come from the cache, and end at the diagonal.",
)

# %% [markdown]
# And what the server did, step by step (step 0 computes the eight short prompts). Move the budget, and see what it
# trades: the longest step, which is the pause of the chats, against the steps that the long prompt waits for.


# %%
def draw_budget(budget):
    _, trace = serve_and_interrupt(tiny, chats, long_prompt, max_num_batched_tokens=budget)
    steps = [(step.prefill_tokens, step.decode_tokens) for step in trace]
    prompt_steps = sum(prefill > 0 for prefill, _ in steps[6:])
    panels = {"whole prompts": whole[:30], f"at most {budget} tokens a step": steps[:30]}
    return tokens_per_step(panels), (
        f"With a budget of {budget} the longest step has {max(map(sum, steps))} tokens instead of "
        f"{LONG + CHATS}, and the long prompt takes {prompt_steps} steps instead of one."
    )


slider = ipywidgets.SelectionSlider(
    options=[24, 32, 64, 128, 256], value=BUDGET, description="budget"
)
Explorable({"budget": slider}, draw_budget)

# %% [markdown]
# ## Why
#
# **Why is a prompt cheap to carry along?** [Lesson 07](07_fast_decode.ipynb) counted operations per byte, the
# [arithmetic intensity](../docs/glossary.md#arithmetic-intensity). Do it for the weights: a step reads each once, two
# bytes in 16 bits, and does a multiplication and an addition with it for every token of the step. The quotient is the
# number of tokens.

# %%
ridge = 989e12 / 3350e9  # operations per byte of an H100 in 16 bits, from its data sheet
busy = {tokens: round(100 * min(1, tokens / ridge)) for tokens in (1, 32, 256, 512, 2048)}
rows = [(str(tokens), percent) for tokens, percent in busy.items()]
table(["tokens in a step", "% of an H100's arithmetic at most"], rows)
say(f"""
    With 32 decodes the arithmetic of an H100 is {busy[32]} % busy. Until a step has
    {math.ceil(ridge)} tokens, prompt tokens ride along on weights that are read anyway: room for
    **{math.floor(ridge) - 32} of them**.
""")

# %% [markdown]
# Below that number, more tokens take hardly more time; above it, time grows with the tokens. So a much smaller budget
# wastes arithmetic, and a much larger one makes pauses. (A chunk also reads the keys before it again, which is little
# beside the weights: the study [counts it](extra/08_one_kernel.ipynb).)
#
# ## The code as it stands
#
# The positions and slots of a ragged step, without a loop over tokens; and how a request is put into a step's plan.
# `num_tokens` is what it still misses, or what the budget has left. It is sampled only if it misses no more than that.
# (Who is put there, the scheduler decides: lesson 11.)

# %%
from minipaged.attention.batch import new_token_slots
from minipaged.core.request import StepPlan

show_source(new_token_slots, StepPlan.add)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | query i of q stands at position k − q + i | chunks and prefix hits go wrong, whole prompts do not |
# | chunks and whole give the same keys, values and logits | answers depend on who else was there |
# | a sequence's rows do not depend on its neighbours | the same, and one user's text in another's answer |
# | only the last token of a prompt is sampled | a guess from the middle of a question is taken for an answer |
# | a step never computes more than its budget, and every token exactly once | pauses; holes in the cache |
#
# The second for every cut into two chunks, and the last for budgets that have room for the decodes:

# %%
for cut in range(1, 10):
    logits, stored = in_chunks([cut, 10 - cut])
    assert same(stored, whole_stored) and same(logits[-1], whole_logits)
for budget in (16, 17, 33, 64, 100, 512):
    others, trace = serve_and_interrupt(tiny, chats, long_prompt, max_num_batched_tokens=budget)
    assert max(step.prefill_tokens + step.decode_tokens for step in trace) <= budget
    assert sum(step.prefill_tokens for step in trace) == LONG + sum(map(len, chats))
    assert others == answers
print("nine cuts: the same; six budgets: none exceeded, every token once, the same answers")

# %% [markdown]
# ## Find the bug
#
# A server computes ragged steps in chunks. Which rows are sampled? The last of each sequence, and prefix sums say where
# it is. The author tested that with decodes, with prompts, and with both.


# %%
def rows_to_sample(query_lens):
    """The last row of each sequence."""
    return np.cumsum(query_lens) - 1


for lens in ([5], [1, 1, 1], [5, 1, 3]):
    print(lens, "->", rows_to_sample(lens).tolist())

# %% [markdown]
# It ran well. Only in the busiest hours, when the token budget was used up before every request had a share, users
# reported *one word from another conversation* in the middle of an answer. In the log of such a step the query lengths
# were `[5, 0, 3]`. **From which row does the second sequence get its token? Decide first.**

# %%
my_row = None  # your guess: a row number, counted from 0

# %% [markdown]
# The step of the report on the real model: a prompt; a request that is running and gets nothing in this step; another
# prompt.

# %%
compare(my_row, int(rows_to_sample([5, 0, 3])[1]), "as the row, the last of its neighbour")
waits = tokenizer.encode("She plays the old")
storage = KVStorage(spec, 24, BLOCK_SIZE)
run(storage, [(places[1], waits, len(waits))])  # it has keys and values from an earlier step
busy_step = [together[0], (places[1], waits, 0), together[2]]
hidden = run(storage, busy_step)
sampled_rows = rows_to_sample([n for _, _, n in busy_step])
tokens = model.compute_logits(hidden[sampled_rows]).argmax(dim=-1).tolist()
for text, token in zip((texts[0], "She plays the old", texts[2]), tokens, strict=True):
    print(f"{text!r:28} -> {tokenizer.decode([token])!r}")
assert tokens[1] == tokens[0] and sampled_rows[1] == sampled_rows[0] == len(ids[0]) - 1

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# A sequence without tokens has no last row. The formula gives the row before its place, which is the last row of its
# *neighbour*: it gets the neighbour's next word, appends it, and goes on as if it had said so itself. Where the
# sequence stands first, the row is −1, and Python takes the last row of the whole step. tt-xla had the same in a
# padded layout (issue 5830): there row −1 was padding, all zeros, and each step without tokens appended token 0, an
# exclamation mark.
#
# The cure is not a special case in the formula. In `minipaged` a sequence that gets nothing is not in the step, and
# the plan lists what is sampled (`sampled`, `sampled_from` in `StepPlan.add` above): only requests whose last token is
# computed now. That also rules out the predictions in the middle of a prompt.
# </details>
#
# The engine's own plans, query lengths and how many are sampled, with a budget so small that one request always goes
# without:

# %%
limits = {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 4}
llm, plans = LLM(tiny, device="cpu", **limits), []
llm.engine.on_step = lambda plan: plans.append((list(plan.query_lens), len(plan.sampled)))
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
llm.generate([chats[0], long_prompt[:10], chats[1]], params, use_tqdm=False)
print(plans)
assert all(min(lens) > 0 and sum(lens) <= 4 for lens, _ in plans)
assert sum(sampled for _, sampled in plans) == 3 * 5 and plans[0] == ([4], 0)

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A prompt of 100 tokens, of which 64 are found in the prefix cache. How many queries, how many keys, where does the first query stand?</summary>
#
# 36 queries, 100 keys; at position 100 − 36 + 0 = 64. It sees 65 keys.
# </details>
#
# <details><summary>2. Why does decode need no mask?</summary>
#
# Its only query stands at the last key and sees all of them. (The keys past the sequence's end, in its last block,
# are another matter: those are masked by the context length.)
# </details>
#
# <details><summary>3. May a chunk end in the middle of a block?</summary>
#
# Yes. The next chunk goes on in the same block: a slot follows from a position alone. A block is shared with others
# only when it is full (lesson 10).
# </details>
#
# <details><summary>4. An operator wants shorter pauses and sets the budget to 16, with eight decodes. What is the price?</summary>
#
# Prompts advance by eight tokens a step, a long one reads its own keys again and again, and every step reads all
# weights for 16 tokens only: fewer tokens per second for all.
# </details>

# %% [markdown]
# ## Summary
#
# - All tokens of a step lie end to end. `query_start` says whose they are, and only attention needs to know.
# - Query i of q over k keys stands at position k − q + i. Masks are aligned to the last key.
# - Whole prompts, chunks, what follows a prefix hit and decodes are one case.
# - Chunks bound the longest step, so no conversation stands still for another's prompt. The price is a later first token
#   for that prompt.
# - Only the row of a prompt's last token is sampled, and a sequence that gets nothing is not in the step.
#
# **Write it yourself:** [exercise 08](../exercises/08_causal_chunks/08_causal_chunks.ipynb), the corner of the mask,
# and a prompt in pieces.
#
# **Next:** [09 · Copy-on-write](09_copy_on_write.ipynb): many answers to one question, for the price of one prompt.
# To go back: [07 · A fast decode kernel](07_fast_decode.ipynb).
#
# ### Sources
#
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: ragged
#   steps, in which only attention knows sequences.
# - A. Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, OSDI 2024,
#   [arXiv:2403.02310](https://arxiv.org/abs/2403.02310): decodes first, prompts in chunks, a token budget.
# - The corner: flash-attention pull request 436, where the mask was moved to the last key. The row −1: tt-xla issue
#   5830.
