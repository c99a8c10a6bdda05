# %% [markdown]
# # 02 · How the cache grows
#
# Lesson 01 kept the keys and values of past tokens. The time per token stopped growing; the memory began to. This lesson says by how
# much, exactly, and what that means for a server.
#
# **You will be able to** predict the KV memory of any model of this family from four numbers, say how many conversations a
# card holds before you rent it, and see an engine run out of memory without falling over.
#
# About 30 minutes. Runs in under a minute on two CPU cores; a GPU is used when there is one.

# %%
from dataclasses import replace

import torch

from minipaged import LLM, AttentionBatch, KVSpec, KVStorage, SamplingParams, load_model
from minipaged.attention import get_backend
from coursekit.figures import memory_against_length, memory_over_time, show
from coursekit.lesson import compare, number, pick_device, say, show_source, table

# %% [markdown]
# ## The question
#
# You chat with a model. Each [token](../docs/glossary.md#token) that you type or it writes, a word or a piece of one,
# leaves a [key and a value](../docs/glossary.md#key-value) in every layer: its share of the [KV cache](../docs/glossary.md#kv-cache).
# They are needed until the chat ends.
#
# **How many bytes does one token leave in the cache?** And so: how many chats does a card hold?
#
# The model is SmolLM2-135M. Its keys and values are stored with 16 bits for each number.

# %% [markdown]
# ## Your prediction
#
# One token of English text is about four letters. How many bytes of keys and values does the model keep for it? Write the number
# down before you read on: you learn more from a guess that is ten times off than from none.

# %%
my_bytes_per_token = None  # your guess, for example 500

# %% [markdown]
# ### Now by arithmetic
#
# Four numbers of the model's configuration settle the matter.

# %%
device, half = pick_device()  # a GPU when there is one, and a 16-bit number format it can multiply
loaded = load_model("smollm2-135m", dtype=half, device=device)
config = loaded.config
names = ("num_layers", "num_query_heads", "num_kv_heads", "head_size", "hidden_size")
table(["in its configuration", ""], [(f"`{name}`", getattr(config, name)) for name in names])

# %% [markdown]
# Attention is done by several *heads* side by side, each with queries, keys and values of its own, `head_size` numbers long. Here
# nine query heads share three *KV heads*; why, we will see below. So for each token, each layer keeps `num_kv_heads` keys and as
# many values, and each number in them takes two bytes:
#
# $$\text{bytes per token} = \underbrace{2}_{\text{key and value}} \times\ \text{layers} \times \text{KV heads} \times
# \text{head size} \times \text{bytes per number}$$

# %%
predicted = 2 * config.num_layers * config.num_kv_heads * config.head_size * half.itemsize
say(f"Predicted: **{number(predicted)} bytes** for each token.")
spec = KVSpec.from_model(config, half)  # where the engine keeps this formula
assert spec.bytes_per_token == predicted

# %% [markdown]
# ## Measure
#
# A formula can be wrong. So fill the cache with something that the model never writes, NaN ("not a number"); let the model
# read a text; and count the bytes that are no longer NaN.

# %%
BLOCK_SIZE, NUM_BLOCKS = 16, 64
storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
for tensor in storage.tensors:
    tensor.fill_(torch.nan)


def bytes_written():
    """Bytes of the cache that hold a number."""
    return sum(int((~t.isnan()).sum()) * t.element_size() for t in storage.tensors)
# %% [markdown]
# Which tokens the model reads does not matter for the count. `AttentionBatch` says where each token's key and value go.

# %%
backend = get_backend("auto", device)


def read_up_to(stop, start):
    """Let the model read tokens start to stop of one sequence."""
    batch = AttentionBatch.build([range(NUM_BLOCKS)], [stop - start], [stop], BLOCK_SIZE, device)
    token_ids = torch.arange(start, stop, device=device) + 1000  # [T]
    loaded.model(token_ids, batch, storage, backend)

# %%
measured, read = [], 0
for length in (1, 16, 17, 128, 256, 512, 768, 1000):
    read_up_to(length, start=read)
    measured.append((length, bytes_written()))
    read = length
table(["tokens read", "bytes written", "bytes / tokens"], [(n, b, b / n) for n, b in measured])
assert all(written == length * predicted for length, written in measured)
wrong_bytes_per_token = {
    11520: "that is the keys alone; a token also keeps a value, which is as long",
    69120: "that counts all nine query heads; only the three KV heads are kept",
    768: "that is one layer; each of the thirty keeps its own",
}
compare(my_bytes_per_token, measured[0][1], "bytes per token", wrong_bytes_per_token)

# %% [markdown]
# Every length gives the same quotient, to the byte. The text itself is much smaller:

# %%
text = "Each token you type or the model answers leaves a key and a value in every layer."
letters = len(text.encode()) / len(loaded.tokenizer.encode(text))
say(f"A token of that sentence is {letters:.1f} bytes of text, and a page of 500 tokens keeps "
    f"{500 * predicted / 1e6:.0f} MB, as much as a large photograph.")

# %% [markdown]
# ## The picture
#
# The line is the formula. The dots are what the model wrote.

# %%
line = [(0, 0), (1000, spec.bytes_per_token * 1000)]
show(
    memory_against_length({"predicted": line}, points=measured, points_label="measured on SmolLM2"),
    "KV memory against sequence length, up to 1000 tokens and 22 MiB: a straight line from zero. "
    "The eight measured points lie on it.",
)

# %% [markdown]
# ## Why
#
# **Why a straight line?** A new token adds its own keys and values and changes none of the others. There is no setup cost (the line
# starts at zero) and no discount for length.
#
# **What is not in the formula?** The number of *query* heads: queries are used once and thrown away. The size of the vocabulary and
# `hidden_size`, the length of the vectors between the layers: they make the weights larger, which all chats share.
#
# **What is in it?** Only what is stored per token. With half the bits the cache takes half the memory; what that costs in accuracy
# is lesson 13. And the number of KV heads, because of the cache: in *multi-head attention*
# ([MHA](../docs/glossary.md#mha), 2017) each query head has a KV head of its own, in *multi-query attention*
# ([MQA](../docs/glossary.md#mqa)) all share one, at a loss of quality. Most models today have *grouped-query attention*
# ([GQA](../docs/glossary.md#gqa)), one KV head for a group, and so has SmolLM2.

# %%
choices = {"MHA": config.num_query_heads, "GQA": config.num_kv_heads, "MQA": 1}
each = {n: KVSpec.from_model(replace(config, num_kv_heads=n), half) for n in choices.values()}
rows = [(name, n, each[n].bytes_per_token) for name, n in choices.items()]
table(["", "KV heads", "bytes per token"], rows)

# %% [markdown]
# ## A big model on a big card
#
# A model has 70 billion parameters, its weights rounded to 4 bits each; they take some 40 GB. The card has 80 GB. **How many
# conversations of 4096 tokens fit in the other half?** Keys and values stay in 16 bits, as they usually do.
#
# The shape is that of Llama 2 and 3 at 70B: 80 layers, 64 query heads, head size 128. Guess twice: once as if
# it used MHA (64 KV heads), once with the GQA that it really has (8 KV heads).

# %%
my_conversations_mha = None  # your guess
my_conversations_gqa = None  # your guess

# %%
GB, LENGTH = 10**9, 4096
shape = KVSpec(num_layers=80, num_kv_heads=64, head_size=128, dtype=torch.float16)
big = {"MHA": shape, "GQA": replace(shape, num_kv_heads=8)}
fits = {kind: 40 * GB // each.bytes_for(LENGTH, BLOCK_SIZE) for kind, each in big.items()}
for kind, each in big.items():
    of_each = each.bytes_per_token * LENGTH / GB
    print(f"{kind}: {each.bytes_per_token} bytes a token, {of_each:.2f} GB a conversation")
wrong_mha = {29: "that is with 8 KV heads; with 64 each takes eight times as much"}
compare(my_conversations_mha, fits["MHA"], "conversations with MHA", wrong_mha)
wrong_gqa = {
    3: "that is with 64 KV heads; eight query heads share one here",
    59: "that is the keys alone; the values are as large",
}
compare(my_conversations_gqa, fits["GQA"], "conversations with GQA", wrong_gqa)

# %% [markdown]
# This is why large models moved away from MHA. And still: a large card, and only a few dozen people can talk to it at once, *if* not
# one byte is wasted. Lesson 03 measures how many bytes are.
#
# Move the sliders. **Can you find a setting with room for a hundred conversations of 4096 tokens? Which slider gets you there, and
# which ones hardly help?**

# %%
import ipywidgets

from coursekit.figures import card_filled
from coursekit.widgets import Explorable


def what_fits(card, weights, kv_heads, tokens):
    each = replace(shape, num_kv_heads=kv_heads).bytes_for(tokens, BLOCK_SIZE)
    count = max(0, (card - weights) * GB // each)
    text = f"{count} conversations of {tokens} tokens beside {weights} GB of weights on {card} GB"
    return card_filled(card * GB, weights * GB, each, count), text

# %%
pick = ipywidgets.SelectionSlider
controls = {
    "card": pick(options=[24, 48, 80, 141, 192], value=80, description="card, GB"),
    "weights": ipywidgets.IntSlider(40, min=20, max=140, step=5, description="weights, GB"),
    "kv_heads": pick(options=[1, 2, 4, 8, 16, 32, 64], value=8, description="KV heads"),
    "tokens": pick(options=[512, 1024, 4096, 32768], value=4096, description="tokens"),
}
Explorable(controls, what_fits, shows="A bar, the card: weights, then one piece per conversation.")

# %% [markdown]
# ## A chat, turn by turn
#
# So far we fed the model by hand. Now a real chat through the whole engine, on a small [budget](../docs/glossary.md#budget) of KV
# memory: 8 MiB and not a byte more.

# %%
BUDGET = 8 * 2**20
llm = LLM(loaded, device=device, kv_memory=BUDGET, max_model_len=2048, enable_prefix_caching=False)
num_blocks = llm.engine.pool.num_blocks
say(f"The budget holds {num_blocks} blocks: {num_blocks * BLOCK_SIZE} tokens in all.")

# %% [markdown]
# A chat model has no memory of its own: at every turn it is given the *whole* conversation again. Each answer here is
# cut at 30 tokens.

# %%
messages = []


def ask(question):
    """One turn of the chat; returns the answer."""
    asked = [*messages, {"role": "user", "content": question}]
    [output] = llm.chat(asked, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    messages[:] = [*asked, {"role": "assistant", "content": output.outputs[0].text}]
    return output.outputs[0].text.strip()

# %% tags=["nbval-ignore-output"]
for question in ("What is a library?", "Who works there?", "Is it quiet?"):
    print(f"you    {question}\nmodel  {ask(question)}\n")

# %% [markdown]
# ## Out of memory, on purpose
#
# Keep talking. What happens when the budget is used up: a crash, a wrong answer, a plain "no"?

# %% tags=["nbval-ignore-output"]
try:
    for _ in range(20):
        ask("Tell me more.")
except ValueError as error:
    refusal = str(error)
chat_steps = [replace(record, time=record.index) for record in llm.trace]
print(refusal)

# %% [markdown]
# A sentence with two numbers, at the moment when the request was *added*. Nothing was computed for it and nothing was taken.
# The engine is as it was, all its blocks are free, and somebody else can be served:

# %%
assert llm.engine.pool.num_free == num_blocks
[short] = llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
most = max(record.reserved_bytes for record in llm.trace)
print("served afterwards:", len(short.outputs[0].token_ids), "tokens; over budget:", most > BUDGET)

# %% [markdown]
# Only the prompt is compared with the budget, since nobody knows how long the answer will be. If the answer does not fit, a request
# that has the engine to itself ends where the memory ends; if others are running, one of them gives its blocks back (lesson 11).
#
# Here is the whole chat, step by step, up to the refusal:

# %%
show(
    memory_over_time({"one chat, to the refusal": chat_steps}, BUDGET, x_label="engine step"),
    "KV memory of a chat, step by step. Each turn begins with a jump, to the size of the whole "
    "chat so far, and climbs with each token of the answer. The turns rise until they reach the "
    "budget.",
)

# %% [markdown]
# Each turn begins with a jump: the engine keeps nothing between turns here, so it reads the whole chat again in one step
# ([prefill](../docs/glossary.md#prefill)). Each answer is a slope, one token a step
# ([decode](../docs/glossary.md#decode)). The grey is the empty end of the last block, as memory is handed out in blocks of
# 16 tokens. The text of a chat only grows, and each turn needs more than the last.
#
# The engine cannot hold more than the budget: its cache is allocated once, at the start. A server that lets the tensors of each chat
# grow finds out that memory is short in the middle of a step, with everybody's answers half written.

# %% [markdown]
# ## The code as it stands
#
# Every byte count in the package comes from these few lines. (`scale` is for the small number formats of lesson 13.)

# %%
show_source(KVSpec.bytes_per_token, KVSpec.bytes_per_block, KVSpec.bytes_for)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | the formula equals the bytes that were really written | the budget is wrong from the first request on |
# | all requests together never hold more than the budget | the process dies, with all requests in it |
# | what cannot fit is refused before anything is changed | one long chat takes the others with it |
# | a byte count asks the *model* for its head size | see below |
#
# Why *equals*, and not "about"? A test that only asks for a plausible range lets a factor of two through. What can be exact should
# be tested exactly, here for every number format:

# %%
for dtype in (torch.float32, half, torch.int8, torch.float8_e4m3fn):
    each = KVSpec.from_model(config, dtype)
    allocated = KVStorage(each, num_blocks=3, block_size=4).nbytes
    print(f"{dtype!s:20} {allocated:>8} bytes allocated for 12 tokens, as computed")
    assert allocated == each.bytes_for(12, block_size=4) == 12 * each.bytes_per_token

# %% [markdown]
# ## Find the bug
#
# A colleague writes a planner of her own. On SmolLM2 it is right to the byte. On another model it says that two
# conversations fit; the server starts, admits the second one, and dies: out of memory.

# %%
from minipaged.model.tiny import TINY, random_llama


def planned_bytes_per_token(config, dtype):
    head_size = config.hidden_size // config.num_query_heads
    return 2 * config.num_layers * config.num_kv_heads * head_size * dtype.itemsize


assert planned_bytes_per_token(config, half) == predicted

# %% [markdown]
# The other model: hidden size 64, 4 query heads, 2 KV heads, head size 32. **What is wrong? Decide before you go on.**

# %%
other = random_llama(replace(TINY, hidden_size=64, num_query_heads=4, num_kv_heads=2, head_size=32))
small = KVStorage(KVSpec.from_model(other.config, torch.float32), num_blocks=2, block_size=8)
for tensor in small.tensors:
    tensor.fill_(torch.nan)
batch = AttentionBatch.build([[0, 1]], query_lens=[10], context_lens=[10], block_size=8)
other(torch.arange(10), batch, small, get_backend("torch"))
really = sum(int((~t.isnan()).sum()) * t.element_size() for t in small.tensors) // 10

planned = planned_bytes_per_token(other.config, torch.float32)
say(f"Planned: {planned} bytes a token. Written: **{really}**.")

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The planner *derives* the head size from `hidden_size / num_query_heads`. Many models state a head size of their own. Here it is
# twice the derived one, so only half as many conversations fit as the plan says. This happened: vLLM sized its cache that way until
# models with an explicit `head_dim` came along (vLLM pull request 2622).
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A model is trained again with twice the query heads, the KV heads stay. What happens to the cache?</summary>
#
# Nothing. Queries are not kept. (The weights grow a little.)
# </details>
#
# <details><summary>2. You store keys and values in int8 instead of 16 bits. Do exactly twice as many tokens fit?</summary>
#
# Not quite. Each vector brings a scale, the number that its integers are multiplied by. Here that is four bytes for each vector
# (lesson 13).
# </details>
#
# <details><summary>3. After an answer, the cache holds one token less than prompt and answer have. Which one, and why?</summary>
#
# The last one. A token's key and value are computed when it is fed to the model as input; the last is only ever an output.
# </details>
#
# <details><summary>4. The card has 80 GB, the weights take 40. Can the cache have the other 40?</summary>
#
# Not all of it. A step needs room for its *activations*, the vectors on their way through the layers, and the framework needs some
# for itself. The answers above are upper bounds.
# </details>

# %% [markdown]
# ## Summary
#
# - A token leaves 2 × layers × KV heads × head size numbers in the cache. The formula and the measurement agree to the byte.
# - KV heads decide how many conversations fit. That is what grouped-query attention is for.
# - An engine with a fixed budget answers "no" with two numbers. One without a budget dies.
#
# **Write it yourself:** [exercise 02](../exercises/02_kv_bytes/02_kv_bytes.ipynb), bytes of the cache, and what fits.
#
# **Next:** [03 · What contiguous preallocation wastes](03_contiguous_waste.ipynb). Each of these conversations has to lie
# somewhere. Where?
#
# ### Sources
#
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019,
#   [arXiv:1911.02150](https://arxiv.org/abs/1911.02150): the cost of reading keys and values, and MQA.
# - J. Ainslie et al., *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*, 2023,
#   [arXiv:2305.13245](https://arxiv.org/abs/2305.13245).
# - H. Touvron et al., *Llama 2: Open Foundation and Fine-Tuned Chat Models*, 2023,
#   [arXiv:2307.09288](https://arxiv.org/abs/2307.09288): the 70B model with GQA.
