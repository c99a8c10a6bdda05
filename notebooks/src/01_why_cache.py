# %% [markdown]
# # 01 · Why keep K and V
#
# A language model writes one token, appends it to the text, reads the text again, writes the next. Must it compute
# again what it computed a moment ago?
#
# **You will be able to** write attention in three lines, say which parts of a step can be kept, show that keeping them changes
# nothing in the answer, and count what it saves: in arithmetic, and on the clock.
#
# About 45 minutes. Runs in under a minute on two CPU cores; a GPU is used when there is one.

# %%
import time
from dataclasses import replace

import torch

from minipaged import AttentionBatch, KVSpec, KVStorage, load_model
from minipaged.attention import get_backend
from coursekit.figures import lines_against_length, show, work_per_step
from coursekit.lesson import compare, number, pick_device, say, show_source, table
from coursekit.widgets import Stepper

# %% [markdown]
# ## The question
#
# A text has 512 tokens; the model is to add the next one. It can
#
# - **read everything again**: run all 512 tokens through all layers, and look at what comes out for the last; or
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
# are positive and add up to one, and the result is the average of the values with these weights. ($d$ is the length of a key;
# without its root the scores of long vectors would be so far apart that one token took all the weight.)
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
# That is what comes out for the last token. Now look at what went in: of the last token its query, key and value; of the
# earlier ones only keys and values, `vectors @ W_key` and `vectors @ W_value`. Each row of these depends on its own token alone.
# So grow them by one row a step instead of computing all of them again:

# %%
keys = values = torch.empty(0, D)  # the cache
for n, vector in enumerate(vectors, start=1):
    keys = torch.cat([keys, (vector @ W_key)[None]])  # one new row
    values = torch.cat([values, (vector @ W_value)[None]])
    kept = attention_of(vector @ W_query, keys, values)
    text = vectors[:n]
    again = attention_of(text[-1] @ W_query, text @ W_key, text @ W_value)
    assert torch.allclose(kept, again, atol=1e-6)
    print(f"{n} tokens: cache {list(keys.shape)}, rows multiplied by W_key: 1 instead of {n}")

# %% [markdown]
# The same result, and only one new row a step. This is the whole idea of a [KV cache](../docs/glossary.md#kv-cache).
#
# One thing has to be checked. In a real model a second layer's vectors come out of the first layer's attention, so they depend on
# several tokens. Keeping is right only if they never depend on *later* ones. They do not: a token attends to itself and to what
# comes before it, which is the [causal mask](../docs/glossary.md#causal-mask). We come back to it below.
#
# A real model also has several attention *heads* in a layer, each with a query of its own; often a few of them share a key and a
# value (lesson 02). And it has an *output layer* at the end, which turns the last vector into one score for each token of the
# vocabulary: the [logits](../docs/glossary.md#logits).

# %% [markdown]
# ## Your prediction
#
# Now for SmolLM2, with its 30 layers. How many times as much arithmetic does the next token cost when everything is read again,
# for a text of 512 tokens? And how many times as much does *writing* a text of 256 tokens cost, starting from one token, all steps
# together?

# %%
my_times_more_at_512 = None  # your guess
my_times_more_for_256 = None  # your guess

# %% [markdown]
# ## Measure
#
# ### First: is the answer the same?
#
# The model, in 32 bits so that rounding errors stay small; a cache with room for 512 tokens and a few more; and one function that
# feeds some tokens of a text to the model. `start` says how many of them are in the cache already.
#
# Instead of `torch.cat` the engine has a cache of fixed size. Three of its names appear here, and each has a lesson of its own:
# `KVSpec` says how large a key and a value are (02), `KVStorage` holds the tensors, in blocks of 16 tokens (04), and
# `AttentionBatch` says which tokens a step computes and which blocks their keys are in (08). Here the blocks simply follow one
# another.

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
# Write sixteen tokens *greedily*, which means: always take the one with the highest logit. Once by reading everything again
# (`start=0`), once with what is kept (`start=len(tokens) - 1`).

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
again, logits_again = write(prompt, 16, keep=False)
kept, logits_kept = write(prompt, 16, keep=True)
largest = float((logits_again - logits_kept).abs().max())
print("the same sixteen tokens:", again == kept)
assert again == kept and largest < 1e-3

# %% tags=["nbval-ignore-output"]
print(tokenizer.decode(kept))
print(f"largest difference of any logit in {len(logits_kept)} steps: {largest:.1e}")

# %% [markdown]
# The same tokens. The logits differ only in their last digits: a product with one row and a product with many rows add their
# terms in a different order, and so round differently.

# %% [markdown]
# ### Second: how much arithmetic?
#
# Count it where it happens. Most of a model's arithmetic is in the matrix products of its `Linear` layers: two operations
# (one multiplication, one addition) for each weight and each token. A hook on each layer counts them. (Comparing queries with
# keys is left out; question 5 at the end comes back to it.)

# %%
from minipaged.model.llama import Linear

flops = {"count": 0}


def count_products(layer, inputs, output):
    flops["count"] += 2 * output.numel() * inputs[0].shape[-1]


linears = [module for module in model.modules() if isinstance(module, Linear)]
hooks = [module.register_forward_hook(count_products) for module in linears]

# %%
def flops_of(tokens, start):
    """Floating-point operations of one step."""
    flops["count"] = 0
    feed(tokens, start)
    return flops["count"]

# %% [markdown]
# How many should there be? In the layers, two for each weight and each token. In the output layer, two for each weight, once: only
# the last token needs logits. A GFLOP is a billion of these operations.

# %%
head = 2 * config.vocab_size * config.hidden_size
in_layers = sum(
    module.weight.numel() for module in model.layers.modules() if isinstance(module, Linear)
)
lengths = (1, 64, 128, 256, 384, 512)
predicted = {n: (2 * in_layers * n + head, 2 * in_layers + head) for n in lengths}

sentence = "What has been will be again, and there is nothing new under the sun. "
text = tokenizer.encode(sentence * 40)
counted = {n: (flops_of(text[:n], start=0), flops_of(text[:n], start=n - 1)) for n in predicted}
print("counted as predicted, at all lengths:", counted == predicted)
assert counted == predicted

# %%
table(
    ["tokens in the text", "read again, GFLOP", "kept, GFLOP"],
    [(str(n), f"{a / 1e9:.2f}", f"{k / 1e9:.2f}") for n, (a, k) in counted.items()],
)
for hook in hooks:
    hook.remove()

# %% [markdown]
# One column grows, the other is flat. In the layers, reading 512 tokens again costs exactly 512 times as much as one token. But the
# output layer is paid once either way, and it is large: the vocabulary has 49 152 entries. That pulls the ratio down.

# %%
def cost(n, keep):
    return predicted[512][1] if keep else 2 * in_layers * n + head


at_512 = counted[512][0] / counted[512][1]
for_256 = sum(cost(n, False) for n in range(1, 257)) / sum(cost(n, True) for n in range(1, 257))
wrong_times_more_at_512 = {
    512: "the layers alone would be 512 times as much; but the output layer is paid "
        "once in either case",
}
unit = "times as much arithmetic for token 512"
compare(my_times_more_at_512, round(at_512), unit, wrong_times_more_at_512)
wrong_times_more_for_256 = {
    128: "half of 256, the area of a triangle; but the output layer is paid at each "
        "step in either case",
    256: "that would be every step as dear as the last; the first ones are short",
}
unit = "times as much arithmetic for the whole text of 256"
compare(my_times_more_for_256, round(for_256), unit, wrong_times_more_for_256)

# %%
layers_alone = (counted[512][0] - head) / (counted[512][1] - head)
say(f"In the layers alone it is {layers_alone:.0f} times; the output layer is "
    f"{100 * head / counted[512][1]:.0f} % of the arithmetic of a cached step.")
assert layers_alone == 512 and config.vocab_size == 49_152
assert 300 < at_512 < 512 and 256 / 4 < for_256 < 256 / 2

# %% [markdown]
# ### Third: on the clock
#
# Arithmetic is not time, so measure the time too. Each time is the better of two tries, as other programs disturb.

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

# %% tags=["nbval-ignore-output"]
table(
    ["tokens in the text", "read again, ms", "kept, ms"],
    [(str(n), f"{1000 * a:.1f}", f"{1000 * k:.1f}") for n, (a, k) in timed.items()],
)

# %% [markdown]
# ## The picture
#
# What does each step compute? Rows are steps, columns are tokens: a prompt of four tokens, then eight more. (The positions
# are read from real batches.)

# %%
def positions_of(start, stop):
    batch = AttentionBatch.build([[0]], [stop - start], [stop], BLOCK_SIZE, device)
    return batch.positions.tolist()


steps = range(4, 13)  # tokens in the text after each step's input
ways = {
    "read again": [positions_of(0, n) for n in steps],
    "keep K and V": [positions_of(0 if n == 4 else n - 1, n) for n in steps],
}
work = {name: sum(map(len, computed)) for name, computed in ways.items()}
print("token positions computed:", work)
assert work == {"read again": sum(steps), "keep K and V": 12}

# %%
def draw(step):
    text = ", ".join(f"{name}: {sum(map(len, c[: step + 1]))}" for name, c in ways.items())
    return work_per_step(ways, shown=step + 1), f"tokens computed up to step {step}: {text}"


Stepper(
    len(steps),
    draw,
    start=len(steps) - 1,
    shows="Two grids, steps down and tokens across. Read again fills a triangle, keep K and V a "
    "diagonal.",
)

# %% [markdown]
# Reading again fills a triangle; keeping fills a diagonal, after the prompt. In time, on the machine that built this lesson:

# %%
lines = {
    "keep K and V": [(n, 1000 * k) for n, (_, k) in timed.items()],
    "read again": [(n, 1000 * a) for n, (a, _) in timed.items()],
}
show(
    lines_against_length(lines, y_label="time for the next token (ms)"),
    "Time for the next token against the length of the text, up to 512 tokens. Read again: a line "
    "that rises steeply. With keys and values kept: nearly flat, close to the axis.",
)

# %% [markdown]
# The upper line is not quite straight: the comparison of every token with every earlier one grows with the square of the length,
# and how well a large step fits the processor's caches changes too.
#
# ## Why
#
# **Why may we keep them?** Because of the causal mask: a token sees itself and what comes *before* it. Whatever is written later
# cannot change its key and value, in any layer. To see it, change one token and look at the cache.

# %%
def cache_of(tokens):
    """Keys and values of a text: [2, layers, tokens, kv heads, head size]."""
    fresh = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
    feed(tokens, 0, storage=fresh)
    pair = torch.stack((fresh.key, fresh.value))  # [2, layers, blocks, block size, ...]
    return pair.flatten(2, 3)[:, :, : len(tokens)]


def changed(one, other):
    """For each token, whether its keys or values differ by more than rounding errors."""
    return ((one - other).abs().amax(dim=(0, 1, 3, 4)) > 1e-3).tolist()

# %%
story = text[:12]
late, early = list(story), list(story)
late[8], early[2] = text[20], text[20]
kv = cache_of(story)
for position, other in ((8, late), (2, early)):
    moved = [i for i, is_changed in enumerate(changed(kv, cache_of(other))) if is_changed]
    print(f"token {position} replaced, changed: {moved}")
    assert moved == list(range(position, 12))

# %% [markdown]
# Only the token itself and those after it. The past is finished; that is what makes it worth keeping. (It also says what
# two *different* requests can share: the keys and values of a beginning that is the same, token for token. That is lesson 10.)
#
# **Why does a cached step cost anything?** The new token still goes through every weight of the model once. On the clock, that is
# mostly the time to *read* the weights from memory. A step with one token reads all weights to use each of them once; a step with many
# tokens reads them once and uses each many times. So there are two phases, with different limits:
#
# | | tokens per step | limited by |
# |:--|:--|:--|
# | [prefill](../docs/glossary.md#prefill) | the whole prompt | arithmetic |
# | [decode](../docs/glossary.md#decode) | one for each request | reading memory |
#
# That is why a server wants to decode for *many* requests in one step: they share the reading of the weights.

# %% tags=["nbval-ignore-output"]
alone, all_at_once = timed[1][1], timed[64][0] / 64
say(f"One token alone: {1000 * alone:.1f} ms. In a step of 64: {1000 * all_at_once:.2f} ms each.")

# %% [markdown]
# **What does it cost?** Memory. Before, the arithmetic grew; now the cache does. How fast is the subject of lesson 02.

# %%
for n in (64, 512):
    assert cache_of(text[:n]).nbytes == n * spec.bytes_per_token
say(f"512 tokens keep {number(512 * spec.bytes_per_token / 2**20)} MiB, in 32 bits.")

# %% [markdown]
# ## The code as it stands
#
# The model has no path "with cache" and another "without". There is one: it writes its new keys and values to the cache, then
# attends through the cache. The batch says whether that is a whole prompt or a single token.

# %%
from minipaged.model.llama import Attention

show_source(Attention.forward)

# %% [markdown]
# *Write before read*: the new token attends to itself too, and finds its own key in the cache like any other. `rotate` turns each
# query and key by an angle that depends on the token's position in the text. This is *rotary embedding* (RoPE), and it is how
# attention knows the order of the tokens: the average above has none.

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
# A reimplementation of a small engine was tested with greedy decoding. The first token of each answer is right, every
# time. From the second on, the text goes astray: these are words, but not those that the model would have said. No error is
# raised, all shapes are right, keys and values are stored and read. Here is its step.

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

# %%
n = len(prompt)
assert theirs[: n + 1] == ours[: n + 1] and theirs[n:] != ours[n:]
first_step = AttentionBatch.build([[0]], [4], [4], BLOCK_SIZE).positions.tolist()
second_step = AttentionBatch.build([[0]], [1], [5], BLOCK_SIZE).positions.tolist()
print("positions of the first step:", first_step, " of the second:", second_step)

# %% tags=["nbval-ignore-output"]
print("ours:  ", tokenizer.decode(ours[n:]))
print("theirs:", tokenizer.decode(theirs[n:]))

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# Positions. They are counted from 0 in every step, so each new token is taken for the first of the text, and its query and key
# are turned by the wrong angle. In the first step the count happens to be right, and so is the first token.
# The same mistake is made where a cached beginning is skipped and the rest of the prompt is numbered from 0 again. A test that asks
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
# <details><summary>4. The arithmetic shrank hundreds of times, the time much less. Why?</summary>
#
# A step with one token is not limited by arithmetic. It still has to read all the weights from memory, and that takes most of
# its time.
# </details>
#
# <details><summary>5. Does the cost of a cached step really not grow at all?</summary>
#
# Its matrix products do not. But attention compares the new query with all keys, so it reads the whole cache at every
# step: a small term that grows with the text. For long texts it is not small any more; lesson 07 is about that.
# </details>

# %% [markdown]
# ## Summary
#
# - Keys and values of past tokens never change, because no token sees what comes after it.
# - Keeping them gives the same logits, up to rounding, and makes the cost of a token nearly flat instead of growing.
# - What is left is reading the weights, which many requests can share.
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
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019,
#   [arXiv:1911.02150](https://arxiv.org/abs/1911.02150): incremental decoding, and that memory is what limits it.
# - R. Pope et al., *Efficiently Scaling Transformer Inference*, 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102):
#   prefill and decode as two phases with different limits.
# - J. Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021,
#   [arXiv:2104.09864](https://arxiv.org/abs/2104.09864): the rotation that the bug gets wrong.
