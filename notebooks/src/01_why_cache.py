# %% [markdown]
# # 01 · Why keep K and V
#
# A language model writes one token, appends it to the text, reads the text again, writes the next. Must it compute
# again what it computed a moment ago?
#
# **You will be able to** write attention in three lines, say which parts of a step can be kept, show that keeping them changes
# nothing in the answer, and count what it saves.
#
# About 30 minutes. Runs in under a minute on two CPU cores; a GPU is used when there is one.

# %%
import time
from dataclasses import replace

import torch

from minipaged import AttentionBatch, KVSpec, KVStorage, load_model
from minipaged.attention import get_backend
from minipaged.model.llama import Attention, Linear
from coursekit.figures import lines_against_length, show, work_per_step
from coursekit.lesson import compare, pick_device, say, show_source, table


# %% [markdown]
# ## The question
#
# A text has 512 tokens; the model is to add the next one. It can
#
# - **read everything again**: run all 512 tokens through all layers; or
# - **keep** something of the first 511, and run only the last token.
#
# **What can be kept? How much arithmetic does that save? And is the answer really the same?**

# %% [markdown]
# ## Attention, in three lines
#
# A model turns each token into a vector, and sends the vectors through a stack of *layers*. In a layer tokens meet in one
# place only, which is attention. There each token's vector is multiplied by three matrices and becomes three vectors:
#
# - its [query](../docs/glossary.md#query): what this token is looking for;
# - its [key](../docs/glossary.md#key-value): what it can be found by;
# - its [value](../docs/glossary.md#key-value): what it has to say.
#
# A query $q$ is compared with the key $k_i$ of each token so far by a dot product. Softmax turns these scores into weights that
# are positive and add up to one, and the result is the average of the values with these weights. (The root of $d$, the length of
# a key, keeps long vectors from giving one token all the weight.)
#
# $$\text{out} = \sum_i w_i v_i, \qquad w = \text{softmax}\left(\frac{q \cdot k_i}{\sqrt{d}}\right)$$

# %%
def attention_of(query, keys, values):
    """One query [d] against keys and values [n, d]: a weighted average of the values, [d]."""
    scores = keys @ query / len(query) ** 0.5  # [n]: how well each key answers the query
    weights = scores.softmax(dim=0)  # [n]: positive, sum 1
    return weights @ values  # [d]


D = 8  # numbers in a vector
generator = torch.Generator().manual_seed(1)
W_query, W_key, W_value = torch.randn(3, D, D, generator=generator) / D**0.5
vectors = torch.randn(6, D, generator=generator)  # a text of six tokens
print(attention_of(vectors[-1] @ W_query, vectors @ W_key, vectors @ W_value))

# %% [markdown]
# That is what comes out for the last token. What went in? Its query, and the keys and values of all tokens, `vectors @ W_key` and
# `vectors @ W_value`. Each row of these depends on its own token alone. So grow them by one row a step instead of computing all of
# them again:

# %%
keys = values = torch.empty(0, D)  # the cache
for n, vector in enumerate(vectors, start=1):
    keys = torch.cat([keys, (vector @ W_key)[None]])  # one new row
    values = torch.cat([values, (vector @ W_value)[None]])
    kept = attention_of(vector @ W_query, keys, values)
    again = attention_of(vector @ W_query, vectors[:n] @ W_key, vectors[:n] @ W_value)
    assert torch.allclose(kept, again, atol=1e-6)
    print(f"{n} tokens: cache {list(keys.shape)}, rows multiplied by W_key: 1 instead of {n}")

# %% [markdown]
# The same result, and only one new row a step. This is a [KV cache](../docs/glossary.md#kv-cache).
#
# In a real model a second layer's vectors come out of the first layer's attention, so they depend on several tokens. Keeping is
# right only if they never depend on *later* ones. They do not: a token attends to itself and to what comes before it, which is the
# [causal mask](../docs/glossary.md#causal-mask).
#
# A real model also has several attention *heads* in a layer (lesson 02), and an *output layer* at the end, which turns the last
# vector into one score for each token of the vocabulary: the [logits](../docs/glossary.md#logits).

# %% [markdown]
# ## Your prediction
#
# Now for SmolLM2, with its 30 layers. How many times as much arithmetic does the next token cost when a text of 512 tokens is read
# again? And how many times as much does *writing* 256 tokens cost, starting from one, all steps together?

# %%
my_times_more_at_512 = None  # your guess
my_times_more_for_256 = None  # your guess

# %% [markdown]
# ## Measure
#
# ### First: is the answer the same?
#
# The model, in 32 bits so that rounding errors stay small; a cache; and a function that feeds tokens to the model. The first
# `start` of them are in the cache already.
#
# Instead of `torch.cat` the engine has a cache of fixed size. Three of its names appear here, and each has a lesson of its own:
# `KVSpec` says how large a key and a value are (02), `KVStorage` holds the tensors, in blocks of 16 tokens (04), and
# `AttentionBatch` says which tokens a step computes and which blocks their keys are in (08).

# %%
device, _ = pick_device()
loaded = load_model("smollm2-135m", dtype=torch.float32, device=device)
model, tokenizer, config = loaded.model, loaded.tokenizer, loaded.config
backend = get_backend("auto", device)
BLOCK_SIZE, NUM_BLOCKS = 16, 33
spec = KVSpec.from_model(config, torch.float32)
storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)

# %%
def feed(tokens, start, storage=storage):
    """Compute tokens[start:], reading the keys and values before them; the logits of the last."""
    new = len(tokens) - start
    blocks = [list(range(NUM_BLOCKS))]
    batch = AttentionBatch.build(blocks, [new], [len(tokens)], BLOCK_SIZE, device)
    token_ids = torch.tensor(tokens[start:], device=device)  # [new]
    hidden = model(token_ids, batch, storage, backend)  # [new, hidden]
    return model.compute_logits(hidden[-1:])[0]  # [vocab]

# %% [markdown]
# Write sixteen tokens *greedily*: always take the one with the highest logit. Once by reading everything again, once with what is
# kept.

# %%
def write(prompt, count, keep):
    """Add `count` tokens greedily; returns all tokens and the logits of each step."""
    tokens, logits = list(prompt), []
    for step in range(count):
        first = step == 0 or not keep
        logits.append(feed(tokens, start=0 if first else len(tokens) - 1))
        tokens.append(int(logits[-1].argmax()))
    return tokens, torch.stack(logits)  # [count, vocab]

# %%
prompt = tokenizer.encode("The reason why people keep a diary is")
(again, logits_again), (kept, logits_kept) = (write(prompt, 16, keep) for keep in (False, True))
largest = float((logits_again - logits_kept).abs().max())
print("the same sixteen tokens:", again == kept, " logits to a thousandth:", largest < 1e-3)
assert again == kept and largest < 1e-3

# %% tags=["nbval-ignore-output"]
print(f"{tokenizer.decode(kept)}\nlargest difference of any logit: {largest:.1e}")

# %% [markdown]
# The same tokens. The logits differ only in their last digits, because products of different sizes add their terms in a different
# order.

# %% [markdown]
# ### Second: how much arithmetic?
#
# Most of a model's arithmetic is in the matrix products of its `Linear` layers: two operations (one multiplication, one addition)
# for each weight and each token. In the output layer only the last token is computed. A hook on each layer counts, in
# GFLOP, billions of operations. (Comparing queries with keys is left out; see question 4 at the end.)

# %%
linears = [module for module in model.modules() if isinstance(module, Linear)]
counts = []  # floating-point operations, layer by layer


def count(layer, inputs, output):
    counts.append(2 * output.numel() * inputs[0].shape[-1])


def flops_of(tokens, start):
    """Floating-point operations of one step."""
    counts.clear()
    hooks = [linear.register_forward_hook(count) for linear in linears]
    feed(tokens, start)
    for hook in hooks:
        hook.remove()
    return sum(counts)

# %%
head = 2 * config.vocab_size * config.hidden_size
layers = 2 * sum(linear.weight.numel() for linear in linears) - head  # for one token
lengths = (1, 64, 128, 256, 384, 512)
predicted = {n: (layers * n + head, layers + head) for n in lengths}
sentence = "What has been will be again, and there is nothing new under the sun. "
text = tokenizer.encode(sentence * 40)
counted = {n: (flops_of(text[:n], start=0), flops_of(text[:n], start=n - 1)) for n in lengths}
assert counted == predicted
table(
    ["tokens in the text", "read again, GFLOP", "kept, GFLOP"],
    [(str(n), f"{a / 1e9:.2f}", f"{k / 1e9:.2f}") for n, (a, k) in counted.items()],
)

# %% [markdown]
# One column grows, the other is flat. In the layers, reading 512 tokens again costs exactly 512 times as much as one. But the output
# layer is paid once either way, and it is large: it has a row for each token of the vocabulary.

# %%
at_512 = counted[512][0] / counted[512][1]
for_256 = sum(layers * n + head for n in range(1, 257)) / (256 * (layers + head))
wrong = {512: "that is the layers alone; the output layer is paid once in either case"}
compare(my_times_more_at_512, round(at_512), "times as much arithmetic for token 512", wrong)
wrong = {
    128: "that is the area of a triangle; but each step also pays the output layer, either way",
    256: "that would be every step as dear as the last; the first ones are short",
}
compare(my_times_more_for_256, round(for_256), "times as much for the text of 256", wrong)
say(f"The output layer is {100 * head / counted[512][1]:.0f} % of a cached step's arithmetic.")

# %% [markdown]
# ### Third: on the clock
#
# Now the time, the better of two tries.

# %%
def seconds(tokens, start, tries=2):
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        feed(tokens, start).cpu()
        best = min(best, time.perf_counter() - begin)
    return best


feed(text[:512], start=0)  # the cache now holds the whole text, and with it all its beginnings
timed = {n: (seconds(text[:n], 0), seconds(text[:n], n - 1)) for n in lengths}



# %% [markdown]
# ## The picture
#
# What does each step compute? Rows are steps, columns are tokens: a prompt of four tokens, then eight more.

# %%
steps = range(4, 13)  # tokens in the text after each step's input
ways = {
    "read again": [range(n) for n in steps],
    "keep K and V": [range(4), *([n - 1] for n in steps[1:])],
}
show(
    work_per_step(ways),
    "Two grids, steps down, tokens across. Read again fills a triangle, keep K and V a diagonal.",
)


# %% [markdown]
# A triangle, and a diagonal after the prompt. In time, on the machine that built this lesson:

# %%
lines = {name: [(n, 1000 * both[i]) for n, both in timed.items()]
         for i, name in ((1, "keep K and V"), (0, "read again"))}
show(
    lines_against_length(lines, y_label="time for the next token (ms)"),
    "Time for the next token against the length of the text, up to 512 tokens. Read again rises "
    "steeply; keep K and V is nearly flat, close to the axis.",
)

# %% [markdown]
# ## Why
#
# **Why may we keep them?** Because of the causal mask: a token sees itself and what comes *before* it. Whatever is written later
# cannot change its key and value, in any layer. Change one token and look at the cache:

# %%
def cache_of(tokens):
    """Keys and values of a text: [2, layers, tokens, kv heads, head size]."""
    fresh = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
    feed(tokens, 0, storage=fresh)
    pair = torch.stack((fresh.key, fresh.value))  # [2, layers, blocks, block size, ...]
    return pair.flatten(2, 3)[:, :, : len(tokens)]


for position in (8, 2):
    other = text[:12]
    other[position] = text[20]
    moved = (cache_of(text[:12]) - cache_of(other)).abs().amax(dim=(0, 1, 3, 4)) > 1e-3  # [tokens]
    print(f"token {position} replaced, changed: {moved.nonzero().flatten().tolist()}")
    assert moved[position:].all() and not moved[:position].any()

# %% [markdown]
# Only the token itself and those after it. The past is finished; that is what makes it worth keeping.
#
# **Why does a cached step cost anything?** The new token still goes through every weight of the model once. On the clock, that is
# mostly the time to *read* the weights from memory. A step with one token uses each of them once, a step with many tokens many
# times. So there are two phases, with different limits:
#
# | | tokens per step | limited by |
# |:--|:--|:--|
# | [prefill](../docs/glossary.md#prefill) | the whole prompt | arithmetic |
# | [decode](../docs/glossary.md#decode) | one for each request | reading memory |
#
# That is why a server wants to decode for *many* requests in one step.

# %% tags=["nbval-ignore-output"]
alone, all_at_once = timed[1][1], timed[64][0] / 64
say(f"One token alone: {1000 * alone:.1f} ms. In a step of 64: {1000 * all_at_once:.2f} ms each.")

# %% [markdown]
# ## The code as it stands
#
# The model has one path: it writes its new keys and values to the cache, then attends through the cache. The batch says whether
# that is a whole prompt or a single token.

# %%
show_source(Attention.forward)

# %% [markdown]
# *Write before read*: the new token attends to itself too, and finds its own key in the cache. `rotate` turns each query and key by
# an angle that depends on the token's position in the text. This is *rotary embedding* (RoPE). It is how attention knows the order
# of the tokens: the average above has none.

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | cached and recomputed logits agree up to rounding | the text drifts, slowly or at once |
# | a token's position is its place in the *text*, not in the step | keys are turned by the wrong angle |
# | keys and values are written before they are read | each token misses itself |
# | the cached prefix is the prefix of *this* text | fluent nonsense about somebody else's question |
#
# The first row: however the text is cut into steps, the last logits are the same.

# %%
whole = feed(text[:100], 0)
for cuts in ((50, 100), (1, 2, 99, 100), (16, 32, 48, 64, 80, 100)):
    start = 0
    for stop in cuts:
        logits, start = feed(text[:stop], start), stop
    assert torch.allclose(logits, whole, atol=1e-3)
    print(f"in {len(cuts)} steps: logits as in one step")

# %% [markdown]
# ## Find the bug
#
# A small engine writes greedily. The first token of each answer is always right. From the second on, the text goes astray: these are
# words, but not those that the model would have said. No error is raised, all shapes are right. Here is its step.

# %%
def feed_theirs(tokens, start):
    new = len(tokens) - start
    blocks = [list(range(NUM_BLOCKS))]
    batch = AttentionBatch.build(blocks, [new], [len(tokens)], BLOCK_SIZE, device)
    batch = replace(batch, positions=torch.arange(new, device=device))
    hidden = model(torch.tensor(tokens[start:], device=device), batch, storage, backend)
    return model.compute_logits(hidden[-1:])[0]

# %%
theirs, ours = list(prompt), list(prompt)
for step in range(8):
    for tokens, step_of in ((theirs, feed_theirs), (ours, feed)):
        feed(tokens[:-1], 0)  # both start from the same, right cache
        tokens.append(int(step_of(tokens, 0 if step == 0 else len(tokens) - 1).argmax()))

# %% [markdown]
# **What is wrong? Decide before you run the next cell.**

# %% tags=["nbval-ignore-output"]
n = len(prompt)
print(f"ours:   {tokenizer.decode(ours[n:])}\ntheirs: {tokenizer.decode(theirs[n:])}")

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Positions. They are counted from 0 in every step, so each new token is taken for the first of the text, and its query and key
# are turned by the wrong angle. In the first step the count happens to be right, and so is the first token. A test that asks
# "does it return tokens?" cannot see it; a comparison of logits sees it at once.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. Why are keys and values kept, but not queries?</summary>
#
# A query is used once, in the step of its own token. Keys and values are used again by every later token.
# </details>
#
# <details><summary>2. Someone edits the third word of a long chat. What of the cache can stay?</summary>
#
# The keys and values of what stands before that word. All later ones depend on it, from the second layer on.
# </details>
#
# <details><summary>3. A model without a causal mask (it sees the whole text, in both directions): can it keep K and V?</summary>
#
# No. Each new token changes the keys and values of all the others, in every layer but the first.
# </details>
#
# <details><summary>4. Does the cost of a cached step really not grow at all?</summary>
#
# Its matrix products do not. But attention compares the new query with all keys, so it reads the whole cache at every
# step. For long texts that is much; lesson 07 is about it.
# </details>

# %% [markdown]
# ## Summary
#
# - Keys and values of past tokens never change, because no token sees what comes after it.
# - Keeping them gives the same logits, up to rounding, and makes the cost of a token nearly flat.
# - The price is memory that grows with every token.
#
# **Write it yourself:** [exercise 01](../exercises/01_kv_cache/01_kv_cache.ipynb), attention with a cache.
#
# **Next:** [02 · How the cache grows](02_kv_growth.ipynb), to the byte.
#
# ### Sources
#
# - A. Vaswani et al., *Attention Is All You Need*, 2017, [arXiv:1706.03762](https://arxiv.org/abs/1706.03762), section 3.2.3:
#   the causal mask in the decoder.
# - R. Pope et al., *Efficiently Scaling Transformer Inference*, 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102):
#   prefill and decode as two phases with different limits.
# - J. Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021,
#   [arXiv:2104.09864](https://arxiv.org/abs/2104.09864): the rotation that the bug gets wrong.
