# %% [markdown]
# # 02 · How the cache grows
#
# Lesson 01 kept the keys and values of past tokens, because they never change. The time per token stopped growing;
# the memory began to. This lesson says by how much, exactly, and what that means for a server.
#
# **You will be able to** predict the KV memory of any model of this family from four numbers, say how many conversations a
# card holds before you rent it, and see an engine run out of memory without falling over.
#
# About 40 minutes. Runs in under a minute on two CPU cores; a GPU is used when there is one.

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
# The model is SmolLM2-135M, small enough for any laptop. Its keys and values are stored with 16 bits for each number.

# %% [markdown]
# ## Your prediction
#
# One token of English text is about four letters. Guess how many bytes of keys and values the model keeps for it.
# Write the number down before you read on: you learn more from a guess that is ten times off than from none.

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
for name in (
    "num_layers",
    "num_query_heads",
    "num_kv_heads",
    "head_size",
    "hidden_size",
    "vocab_size",
):
    print(f"{name:16} {getattr(config, name):>7}")

# %% [markdown]
# Attention is done by several *heads* side by side, each with queries, keys and values of its own, `head_size` numbers long. Here
# nine query heads share three *KV heads*; why, we will see below. So for each token, each layer keeps `num_kv_heads` keys and as
# many values, and each number in them takes two bytes:
#
# $$\text{bytes per token} = \underbrace{2}_{\text{key and value}} \times\ \text{layers} \times \text{KV heads} \times
# \text{head size} \times \text{bytes per number}$$

# %%
bytes_per_number = half.itemsize
predicted = 2 * config.num_layers * config.num_kv_heads * config.head_size * bytes_per_number
say(f"Predicted: **{number(predicted)} bytes** for each token.")
assert predicted == 23_040

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


print("written so far:", bytes_written(), "bytes")
assert bytes_written() == 0

# %% [markdown]
# For the count it does not matter which tokens the model reads. `AttentionBatch` says where each token's key and value go; as in
# lesson 01, all blocks simply follow one another.

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
table(["tokens", "bytes written", "bytes / tokens"], [(n, b, b / n) for n, b in measured])
assert all(written == length * predicted for length, written in measured)
wrong_bytes_per_token = {
    11520: "that is the keys alone; a token also keeps a value, which is as long",
    69120: "that counts all nine query heads; only the three KV heads are kept",
    768: "that is one layer; each of the thirty keeps its own",
    384: "that is one layer's keys; there are thirty layers, and values too",
}
compare(my_bytes_per_token, measured[0][1], "bytes per token", wrong_bytes_per_token)

# %% [markdown]
# Every length gives the same quotient, to the byte. How much is that, compared with the text itself?

# %%
text = "Each token you type or the model answers leaves a key and a value in every layer."
token_ids = loaded.tokenizer.encode(text)
letters = len(text.encode()) / len(token_ids)
ratio = round(predicted / letters, -2)
assert 3 < letters < 6 and 500 * predicted > 10 * 10**6
say(f"""
    A token of this sentence is {letters:.1f} bytes of text and {number(predicted)} bytes of keys
    and values: **{number(ratio)} times** as much. A page of five hundred tokens takes more than
    10 MB, as much as a large photograph.
""")

# %% [markdown]
# ## The picture
#
# The line is the formula. The dots are what the model wrote.

# %%
line = [(0, 0), (1000, spec.bytes_per_token * 1000)]
show(
    memory_against_length(
        {"predicted": line}, points=measured, points_label="measured on SmolLM2-135M"
    ),
    "KV memory against sequence length, up to 1000 tokens and 22 MiB: a straight line from zero. "
    "The eight measured points lie on it.",
)

# %% [markdown]
# ## Why
#
# **Why a straight line?** A token's keys and values depend on nothing that comes later. So a new token adds its own
# and changes none of the others. There is no setup cost (the line starts at zero) and no discount for length.
#
# **What is not in the formula?** The number of *query* heads: queries are used once, in the step that makes them, and
# thrown away. The size of the vocabulary and `hidden_size`, the length of the vectors between the layers: they make the weights
# larger, and all chats share the weights.
#
# **What is in it, then?** Only what is stored per token. Three of the factors are choices that somebody made: the number format,
# the number of KV heads, and the number of layers. With half the bits the cache takes half the memory; how far one can go, and what
# it costs in accuracy, is lesson 13.

# %% [markdown]
# ### Heads: MHA, GQA, MQA
#
# The model has more query heads than KV heads: several queries share one key and value. Its designers chose that, and
# the cache is the reason.
#
# | | KV heads | |
# |:--|:--|:--|
# | [MHA](../docs/glossary.md#mha), multi-head attention | one for each query head | the Transformer of 2017 |
# | [GQA](../docs/glossary.md#gqa), grouped-query attention | one for a group of query heads | most models today |
# | [MQA](../docs/glossary.md#mqa), multi-query attention | a single one | smallest, and costs quality |
#
# What would SmolLM2 keep for a token with each of them? And an older model, OPT-13B, of which the PagedAttention paper says
# (section 3) that a token takes 800 KB?

# %%
heads = {"GQA": config.num_kv_heads, "MHA": config.num_query_heads, "MQA": 1}
kinds = {
    kind: KVSpec.from_model(replace(config, num_kv_heads=n), half) for kind, n in heads.items()
}
opt_13b = KVSpec(num_layers=40, num_kv_heads=40, head_size=128, dtype=torch.float16)
rows = [(f"SmolLM2 with {kind}", heads[kind], each.bytes_per_token) for kind, each in kinds.items()]
rows.append(("OPT-13B, which has MHA", 40, opt_13b.bytes_per_token))
table(["", "KV heads", "bytes per token"], rows)
say(f"The paper is right: {opt_13b.bytes_per_token // 1024} KiB.")
assert kinds["MHA"].bytes_per_token == config.queries_per_kv * predicted
assert opt_13b.bytes_per_token == 800 * 1024

# %% [markdown]
# ## A big model on a big card
#
# Now the question that a server has to answer. A model has 70 billion parameters, its weights rounded to 4 bits each. Small
# groups of weights share a *scale* that brings them back to size, and with the scales they take some 40 GB. The card has
# 80 GB. **How many conversations of 4096 tokens fit in the other half?** Keys and values stay in 16 bits, as they usually do.
#
# The shape is that of Llama 2 and 3 at 70B: 80 layers, 64 query heads, head size 128. Guess twice: once as if
# it used MHA (64 KV heads), once with the GQA that it really has (8 KV heads).

# %%
my_conversations_mha = None  # your guess
my_conversations_gqa = None  # your guess

# %%
from minipaged.memory import MemoryPlan

GB = 10**9
CARD, WEIGHTS, LENGTH = 80 * GB, 40 * GB, 4096
big = {
    "MHA": KVSpec(num_layers=80, num_kv_heads=64, head_size=128, dtype=torch.float16),
    "GQA": KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype=torch.float16),
}
for kind, big_spec in big.items():
    gigabytes = big_spec.bytes_per_token * LENGTH / GB
    print(f"{kind}: {big_spec.bytes_per_token:>9} bytes per token, {gigabytes:5.2f} GB each")

# %% [markdown]
# With MHA a *single* conversation takes more memory than all the weights of a model of five billion parameters
# in 16 bits. How many fit? `MemoryPlan` does the division, in whole blocks.

# %%
assert big["MHA"].bytes_per_token * LENGTH > 5 * GB * torch.float16.itemsize
bits = 8 * WEIGHTS / (70 * GB)  # 4 bits and the scales that belong to them
plans = {kind: MemoryPlan(CARD, 70 * GB, bits, reserve_bytes=0, spec=big[kind]) for kind in big}
assert 4.5 < bits < 4.6 and all(abs(plan.weight_bytes - WEIGHTS) <= 1 for plan in plans.values())
fits = {kind: plan.requests(LENGTH) for kind, plan in plans.items()}
assert fits == {"MHA": 3, "GQA": 29}
wrong_conversations_mha = {
    29: "that is with 8 KV heads; with 64 each conversation takes eight times as much",
}
compare(my_conversations_mha, fits["MHA"], "conversations with MHA", wrong_conversations_mha)
wrong_conversations_gqa = {
    3: "that is with 64 KV heads; eight query heads share one here",
    59: "that is the keys alone; the values are as large",
}
compare(my_conversations_gqa, fits["GQA"], "conversations with GQA", wrong_conversations_gqa)

# %% [markdown]
# An eighth of the KV heads, and a little more than eight times as many conversations, because less is left over. This is why
# large models moved away from MHA. And still: a large card, and only a few dozen people can talk to it at once, *if* not one byte
# is wasted. Lesson 03 measures how many bytes are.

# %% [markdown]
# Move the sliders. **Can you find a setting with room for a hundred conversations of 4096 tokens? Which slider gets you there, and
# which ones hardly help?**

# %%
import ipywidgets

from coursekit.figures import card_filled
from coursekit.widgets import Explorable


def what_fits(card, weights, kv_heads, tokens):
    spec_70b = KVSpec(num_layers=80, num_kv_heads=kv_heads, head_size=128, dtype=torch.float16)
    each = spec_70b.bytes_for(tokens, BLOCK_SIZE)
    count = max(0, (card - weights) * GB // each)
    text = f"{count} conversations of {tokens} tokens beside {weights} GB of weights on {card} GB"
    return card_filled(card * GB, weights * GB, each, count), text

# %%
controls = {
    "card": ipywidgets.SelectionSlider(
        options=[24, 48, 80, 141, 192], value=80, description="card, GB"
    ),
    "weights": ipywidgets.IntSlider(value=40, min=20, max=140, step=5, description="weights, GB"),
    "kv_heads": ipywidgets.SelectionSlider(
        options=[1, 2, 4, 8, 16, 32, 64], value=8, description="KV heads"
    ),
    "tokens": ipywidgets.SelectionSlider(
        options=[512, 1024, 4096, 32768], value=4096, description="tokens"
    ),
}
Explorable(
    controls,
    what_fits,
    shows="A bar as long as the memory of the card: the weights, then one piece per conversation.",
)

# %% [markdown]
# ## A chat, turn by turn
#
# So far we fed the model by hand. Now a real chat through the whole engine, on a small [budget](../docs/glossary.md#budget) of KV
# memory: 8 MiB and not a byte more.

# %%
BUDGET = 8 * 2**20
llm = LLM(loaded, device=device, kv_memory=BUDGET, max_model_len=2048, enable_prefix_caching=False)
num_blocks = llm.engine.pool.num_blocks
assert num_blocks == BUDGET // spec.bytes_per_block(BLOCK_SIZE)
say(f"The budget holds {num_blocks} blocks: {num_blocks * BLOCK_SIZE} tokens in all.")

# %% [markdown]
# A chat model has no memory of its own: at every turn it is given the *whole* conversation again. Each answer here is
# cut at 30 tokens.

# %%
messages, turns = [], []


def ask(question):
    """One turn of the chat; returns what the engine gives back."""
    asked = [*messages, {"role": "user", "content": question}]
    [output] = llm.chat(asked, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    messages[:] = [*asked, {"role": "assistant", "content": output.outputs[0].text}]
    turns.append((output, llm.trace[-1]))
    return output

# %% tags=["nbval-ignore-output"]
for question in (
    "What is a library?",
    "Who works there?",
    "What do they do all day?",
    "Is it quiet?",
):
    reply = ask(question)
    print(f"you    {question}\nmodel  {reply.outputs[0].text.strip()}\n")

# %% [markdown]
# How many tokens are in the cache at the end of each turn? All of the prompt and all of the answer, one would think.

# %%
for output, last_step in turns:
    stored = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    assert last_step.used_bytes == stored * spec.bytes_per_token
    print("prompt + answer - 1 tokens are in the cache")

# %% [markdown]
# It is one less. The last token of an answer is *chosen* at the end of a step; its key and value would be computed in
# the next step, when it is fed to the model. There is no next step. A small thing, but a count to the byte has to get it right.
#
# ## Out of memory, on purpose
#
# Keep talking. What happens when the budget is used up: a crash, a wrong answer, a plain "no"?

# %% tags=["nbval-ignore-output"]
refusal = None
for _ in range(20):
    try:
        output = ask("Tell me more.")
    except ValueError as error:
        refusal = error
        break
assert refusal is not None
chat_steps = [replace(record, time=record.index) for record in llm.trace]
print(f"the last answer had {len(output.outputs[0].token_ids)} tokens; then: {refusal}")

# %% [markdown]
# A sentence with two numbers, at the moment when the request was *added*. Nothing was computed for it and nothing was taken.
# The engine is as it was, all its blocks are free, and somebody else can be served:

# %%
assert llm.engine.pool.num_free == num_blocks
assert "needs" in str(refusal) and str(num_blocks) in str(refusal)
[short] = llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
assert short.finished and len(short.outputs[0].token_ids) == 5

most = max(record.reserved_bytes for record in llm.trace)
print("served afterwards:", len(short.outputs[0].token_ids), "tokens; over budget:", most > BUDGET)
assert most <= BUDGET == llm.engine.storage.nbytes + BUDGET % spec.bytes_per_block(BLOCK_SIZE)

# %% [markdown]
# Only the prompt is compared with the budget, since nobody knows how long the answer will be. And if the prompt fits and the
# answer does not? A request that has the engine to itself then ends where the memory ends, and says so: its `finish_reason` is
# "length". If others are running, one of them gives its blocks back, which is the subject of lesson 11.
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
# 16 tokens. Between turns the blocks are given back; but the text of a chat only grows, and each turn needs more than the last.
#
# The engine cannot hold more than the budget: its cache is allocated once, at the start, and never again. Compare a server that lets
# the tensors of each chat grow as they like. It finds out that memory is short in the middle of a step, inside a matrix product,
# with everybody's answers half written.

# %% [markdown]
# ## The code as it stands
#
# Every byte count in the package comes from these few lines of `minipaged/memory.py`. (`scale` is for the small number formats of
# lesson 13.)

# %%
show_source(KVSpec.bytes_per_token, KVSpec.bytes_per_block, KVSpec.bytes_for)
show_source(MemoryPlan.kv_bytes, MemoryPlan.num_blocks, MemoryPlan.requests)

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
# Why *equals*, and not "about"? A test that only asks whether a result lies in a plausible range lets a factor of two or four
# through. A number that can be exact should be tested exactly, here for every number format, those with scales included:

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
# conversations fit; the server starts, admits the second one, and dies: out of memory. The model is correct, and no
# other program runs on the card.

# %%
from minipaged.model.tiny import TINY, random_llama


def planned_bytes_per_token(config, dtype):
    head_size = config.hidden_size // config.num_query_heads
    return 2 * config.num_layers * config.num_kv_heads * head_size * dtype.itemsize


print("on SmolLM2:", planned_bytes_per_token(config, half), "bytes per token, as measured")
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
assert really == 2 * planned == KVSpec.from_model(other.config, torch.float32).bytes_per_token
say(f"Planned: {planned} bytes a token. Written: **{really}**.")

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The planner *derives* the head size from `hidden_size / num_query_heads`. For many models that is right, and for
# some it is not: they state a head size of their own. Here the true size is twice the derived one, so only half as many
# conversations fit as the plan says. This happened: vLLM sized its cache that way until models with
# an explicit `head_dim` came along (vLLM pull request 2622). In `minipaged` the head size is a field that is read,
# never computed.
# </details>

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A conversation becomes twice as long. What happens to its KV memory, and to that of the others?</summary>
#
# It doubles; the line goes through zero. The others keep what they have, but there is less left for new ones.
# </details>
#
# <details><summary>2. A model is trained again with twice the query heads, the KV heads stay. What happens to the cache?</summary>
#
# Nothing. Queries are not kept. (The weights grow a little.)
# </details>
#
# <details><summary>3. You store keys and values in int8 instead of 16 bits. Do exactly twice as many tokens fit?</summary>
#
# Not quite. Eight bits only reach from −128 to 127, so each vector brings a scale, the number that its integers are multiplied by.
# Here that is four bytes for each vector: the smaller the head, the more they weigh (lesson 13).
# </details>
#
# <details><summary>4. Two users send the same system prompt of five hundred tokens. What does the formula say, and what could be saved?</summary>
#
# Twice the memory of one. But their keys and values are equal: the same tokens at the same positions, with nothing
# different before them. They could be stored once. That is lesson 10.
# </details>
#
# <details><summary>5. Why does the last token of an answer have no key and value in the cache?</summary>
#
# They are computed when the token is fed to the model as input. The last one is only ever an output.
# </details>
#
# <details><summary>6. The card has 80 GB, the weights take 40. Can the cache have the other 40?</summary>
#
# Not all of it. A step needs room for its *activations*, the vectors on their way through the layers, and the framework needs some
# for itself. `MemoryPlan` has
# `reserve_bytes` for that; the lesson left it at zero, so its answers are upper bounds.
# </details>

# %% [markdown]
# ## Summary
#
# - A token leaves 2 × layers × KV heads × head size numbers in the cache, in every model of this family. The prediction and
#   the measurement agree to the byte.
# - Memory grows in a straight line with length, and the text of a chat only grows.
# - KV heads decide how many conversations fit. That is what grouped-query attention is for.
# - An engine with a fixed budget answers "no" with two numbers. One without a budget dies.
#
# **Write it yourself:** [exercise 02](../exercises/02_kv_bytes/02_kv_bytes.ipynb), bytes of the cache, and what fits.
#
# **Next:** [03 · What contiguous preallocation wastes](03_contiguous_waste.ipynb). Each of these conversations has to lie
# somewhere. Where, and how much room do you keep for words that have not been said yet?
#
# ### Sources
#
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019,
#   [arXiv:1911.02150](https://arxiv.org/abs/1911.02150): the cost of reading keys and values, and MQA.
# - J. Ainslie et al., *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*, 2023,
#   [arXiv:2305.13245](https://arxiv.org/abs/2305.13245).
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180), section 3: the 800 KB of OPT-13B.
# - H. Touvron et al., *Llama 2: Open Foundation and Fine-Tuned Chat Models*, 2023,
#   [arXiv:2307.09288](https://arxiv.org/abs/2307.09288): the 70B model with GQA.
