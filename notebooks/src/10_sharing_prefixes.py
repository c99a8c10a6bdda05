# %% [markdown]
# # 10 · Sharing prefixes
#
# Every request to a chat service begins with the same page of instructions, the system prompt. Every turn of a chat
# begins with all turns before it. Their keys and values are computed and stored again and again. With
# [blocks](../docs/glossary.md#block) that need not be: a [block table](../docs/glossary.md#block-table) may list a
# block that another request has filled.
#
# **You will be able to** say which tokens of a prompt need not be computed; make the hash by which a block is found
# again, and say why a simpler one gives wrong answers; and predict which block a full pool gives up next.
#
# About 50 minutes. Runs in under half a minute on two CPU cores; a GPU is used when there is one.

# %%
import copy
from collections import deque

import numpy as np
import torch

from minipaged import LLM, SamplingParams, load_model
from minipaged.cache import BlockPool, BlockTable
from minipaged.cache import hash_block, hash_blocks, usable_hits
from coursekit.figures import show
from coursekit.figures.sharing import eviction_queue, first_token_times
from coursekit.figures.sharing import prefix_tree
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.widgets import Stepper
from minipaged.engine.chat import Chat
from minipaged.core.kv_cache_manager import KVCacheManager
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

# %% [markdown]
# ## The question
#
# A library has put an assistant on its web page. These instructions stand before each question:

# %%
SYSTEM = (
    "You are the assistant of a small public library. Answer in one or two short sentences. Be "
    "friendly, and never invent a book. The library is open from nine to six on weekdays, from ten "
    "to four on Saturdays, and closed on Sundays and public holidays. A card is free for everybody "
    "who lives in the town. Books may be kept for four weeks, films for one week, and both can be "
    "renewed twice unless somebody waits for them. A book that comes back late costs ten cents a "
    "day. Children under twelve need a parent's signature. There are six computers, to be used for "
    "one hour at a time. The reading room on the first floor is quiet; groups meet in the cellar."
)
QUESTIONS = [
    "When do you open on Saturday?",
    "May I keep a film for two weeks?",
    "My son is nine. Can he get a card?",
    "What does it cost when a book is late?",
    "Where can our reading group meet?",
    "How long may I use a computer?",
]

# %%
device, _ = pick_device()
# float32, because tokens are compared
loaded = load_model("smollm2-135m", dtype=torch.float32, device=device)


def prompt_of(question):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return loaded.tokenizer.encode(loaded.tokenizer.apply_chat_template(messages))


prompts = [prompt_of(question) for question in QUESTIONS]
lengths = [len(prompt) for prompt in prompts]
columns = list(zip(*prompts, strict=False))  # the tokens at each position, as far as all have one
common = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
say(f"""
    The six prompts have {", ".join(map(str, lengths))} tokens, {sum(lengths)} together.
    The first **{common}** are the same in all of them.
""")
assert 100 < common < min(lengths)

# %% [markdown]
# **How much has to be computed and stored, if equal beginnings are stored once? And how does the engine notice that
# they are equal?** Sharing the beginnings of requests is called [prefix
# caching](../docs/glossary.md#prefix-caching).
#
# ## Your prediction
#
# Blocks of 16 tokens. Only whole blocks can be shared.
#
# 1. The first request is being answered when the other five arrive. How many prompt tokens are computed for all six?
# 2. The same six, but all arrive *at the same moment*, and the cache is empty. How many tokens does the sixth find?
# 3. A prompt of exactly 32 tokens has been answered. It comes a second time. How many of its tokens are found?

# %%
my_computed = None  # your guess
my_found_in_a_burst = None  # your guess
my_found_of_32 = None  # your guess

# %% [markdown]
# ## Measure
#
# ### Six requests with one system prompt
#
# Once without prefix caching, once with it. All else is equal: the first request runs for one step, then the others
# come.

# %%
TWELVE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def serve_six(llm):
    """All six: their outputs, in order."""
    outputs = {}
    for name, prompt in enumerate(prompts):
        llm.engine.add_request(str(name), prompt, TWELVE)
        if name == 0:
            llm.engine.step()
    while llm.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.engine.step()}
    return [outputs[str(name)] for name in range(len(prompts))]


settings = {"device": device, "num_blocks": 120, "max_model_len": 512}
settings["max_num_batched_tokens"] = 2048  # so many steps on every machine
without = LLM(loaded, enable_prefix_caching=False, **settings)
sharing = LLM(loaded, **settings)
served = {"without": serve_six(without), "sharing": serve_six(sharing)}
print("served:", {name: len(outputs) for name, outputs in served.items()})

# %% [markdown]
# The result can be worked out in advance. The first request computes its whole prompt. Each of the others finds the
# whole blocks of the common beginning, and computes the rest.

# %%
shared_blocks = common // 16
predicted = sum(lengths) - 5 * shared_blocks * 16
computed = {
    "without": without.stats.num_prefill_tokens,
    "sharing": sharing.stats.num_prefill_tokens,
}
not_in_blocks = sum(lengths) - 5 * common
wrong = {not_in_blocks: "only whole blocks are shared, and the common beginning ends inside one"}
compare(my_computed, computed["sharing"], "prompt tokens computed for six requests", wrong)
hit_rate = 1 - computed["sharing"] / computed["without"]
say(f"""
    Predicted: {sum(lengths)} − 5 × {shared_blocks} × 16 = {predicted}. Without sharing:
    {computed["without"]}, **{computed["without"] / computed["sharing"]:.1f} times** as many.

    The *hit rate* counts tokens, since tokens are what is computed: **{hit_rate:.0%}**. Counted in
    requests it would flatter: five of six found something, {5 / 6:.0%}.
""")
assert computed == {"without": sum(lengths), "sharing": predicted}
assert [o.num_cached_tokens for o in served["sharing"]] == [0] + 5 * [shared_blocks * 16]

# %% [markdown]
# The memory, at its fullest, and the answers:

# %%
held = {
    name: max(record.blocks_held for record in llm.trace)
    for name, llm in (("without", without), ("sharing", sharing))
}
say(f"""
    Blocks held: **{held["without"]}** without, **{held["sharing"]}** with sharing.
    The {shared_blocks} shared blocks are stored once instead of six times.
""")
assert held["without"] - held["sharing"] == 5 * shared_blocks
for one, other in zip(served["without"], served["sharing"], strict=True):
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
assert sharing.engine.pool.num_free == without.engine.pool.num_free == 120

# %% [markdown]
# The same tokens, all six times. Sharing is not an approximation.
#
# ### The first token
#
# What the user notices is the [time to first token](../docs/glossary.md#ttft). It is spent computing the prompt, so it
# should shrink with what is left to compute. (Times differ from machine to machine and from run to run; yours are in
# the figure.)

# %% tags=["nbval-ignore-output"]
ttft = {name: [output.metrics.ttft for output in outputs] for name, outputs in served.items()}
mean = {name: 1e3 * sum(times[1:]) / 5 for name, times in ttft.items()}
print(f"requests 2 to 6: {mean['without']:.0f} ms without, {mean['sharing']:.0f} ms with sharing")
figure = first_token_times(ttft["without"], ttft["sharing"], ("without", "sharing"))
show(figure, "Time to first token of six requests; requests 2 to 6 wait less with sharing.")
print(sharing.get_tokenizer().decode(served["sharing"][1].outputs[0].token_ids))

# %% [markdown]
# The first request gains nothing: for it nothing was in the cache.
#
# ### All at once
#
# And if there is no first one? Empty the cache, and let all six come at the same moment.

# %%
assert sharing.reset_prefix_cache()
steps_before = len(sharing.trace)
burst = sharing.generate([{"prompt_token_ids": p} for p in prompts], TWELVE, use_tqdm=False)
found_in_burst = [output.num_cached_tokens for output in burst]
wrong_burst = {
    0: "the block it needs is not computed yet, true; but it will be by the time it is read"
}
unit = "tokens found by the sixth of a burst"
compare(my_found_in_a_burst, found_in_burst[-1], unit, wrong_burst)
first_step = sharing.trace[steps_before]
say(f"""
    Found by the six: {", ".join(map(str, found_in_burst))}. They entered in one step, which
    computed **{first_step.prefill_tokens}** prompt tokens for all of them.
""")
assert first_step.running == 6 and first_step.prefill_tokens == computed["sharing"]
assert found_in_burst == [0] + 5 * [shared_blocks * 16]
for one, other in zip(served["without"], burst, strict=True):
    assert one.outputs[0].token_ids == other.outputs[0].token_ids

# %% [markdown]
# As few computed as when one came before the others. And yet the blocks that the second request lists are still empty
# when it is admitted. That does no harm, because they are not read yet. A step is planned first and computed afterwards,
# layer by layer, and each layer writes the keys and values of *all* tokens of the step before any query reads (*write
# before read*, lesson 01). When the second request's queries read in layer 7, the first one's keys of layer 7 are
# there. So a request may also list blocks that others fill *in the same step*: blocks **in flight**.
#
# This is vLLM's way too: it indexes a block when it is scheduled. The alternative is to hold the five back for one
# step. That step would compute less than it could, and it takes rules: is a single shared block worth waiting for? What
# if the request that computes it is aborted?
#
# ### A prompt that is found whole
#
# 32 tokens are two whole blocks. Both are in the cache when the same prompt comes again. A tiny model with random
# weights is enough for this, and for much of what follows: which blocks are found does not depend on what the model
# says.

# %%
tiny = LoadedModel(random_llama(device=device), None, TINY, "tiny")


def tiny_llm(block_size, num_blocks, **more):
    plain = {"device": device, "max_model_len": 480, "max_num_batched_tokens": 2048}
    return LLM(tiny, block_size=block_size, num_blocks=num_blocks, **(plain | more))


def found(llm, prompts, max_tokens=1):
    """Serve the prompts; how many tokens of each were found."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output.num_cached_tokens for output in llm.generate(prompts, params, use_tqdm=False)]


# %%
once = {n: {"prompt_token_ids": list(range(n, 2 * n))} for n in (31, 32, 33, 48)}
rows = []
for n, prompt in once.items():
    llm = tiny_llm(16, 20)
    cold, warm = (llm.generate(prompt, TWELVE, use_tqdm=False)[0] for _ in range(2))
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    rows.append((str(n), n // 16 * 16, warm.num_cached_tokens, n - warm.num_cached_tokens))
table(["tokens of the prompt", "in whole blocks", "found", "computed"], rows)
wrong_found_of_32 = {
    32: "all of it is in the cache, but the last token must be computed, since its "
    "logits are needed; and only whole blocks are shared",
    31: "one token must be computed, yes; but only whole blocks can be shared, so it "
    "is the whole last block",
    0: "the first block is found; only the last one is computed again",
}
compare(my_found_of_32, rows[1][2], "tokens found of 32", wrong_found_of_32)
assert [row[2] for row in rows] == [16, 16, 32, 32]

# %% [markdown]
# Not 32. The next token is chosen from the [logits](../docs/glossary.md#logits) of the last one, and logits are not
# in the cache: **at least one token must be computed**. Blocks are shared whole, so its whole block is computed
# again, into a block of its own. Of 33 tokens, one is enough.
#
# ### A chat
#
# The prompt of each turn is all that was said before, and a new question. Apart from the instructions no other request
# begins the same way; but the chat finds *itself*. `Chat` keeps the token ids that it has sent and received.

# %%
chat = Chat(sharing, system=SYSTEM)
TURNS = ["Are you open on Saturdays?", "And on Sunday?", "How long may I keep a film?"]
answers = [chat.send(text, SamplingParams(temperature=0, max_tokens=16)) for text in TURNS]
rows, expected = [], shared_blocks * 16
for number_of_turn, turn in enumerate(answers, start=1):
    prompt = len(turn.prompt_token_ids)
    rows.append(
        (f"turn {number_of_turn}", prompt, turn.num_cached_tokens, prompt - turn.num_cached_tokens)
    )
    assert turn.num_cached_tokens >= expected
    stored = prompt + len(turn.outputs[0].token_ids) - 1  # the last token was sampled, never stored
    expected = stored // 16 * 16
table(["", "tokens of the prompt", "found", "computed"], rows)
assert all(row[3] < 48 for row in rows) and rows[2][1] > rows[0][1] + 48
assert [turn.num_cached_tokens for turn in answers[1:]] == [
    (len(t.prompt_token_ids) + len(t.outputs[0].token_ids) - 1) // 16 * 16 for t in answers[:-1]
]

# %% [markdown]
# The prompt grows, what is computed does not. Without sharing the work of a chat grows with the *square* of its
# length, as in lesson 01 the work of an answer did before it had a cache.
#
# ## The picture
#
# How the blocks lie. Four requests in blocks of four tokens. A full block is found by its **hash**, of which more in a
# moment; the letters in a block are the beginning of it. A block without one is not full yet.

# %%
A, B, C, D = list(range(4)), list(range(10, 14)), list(range(20, 24)), list(range(30, 34))
texts = {
    "A B C + 1 token": A + B + C + [40],
    "A B D + 2 tokens": A + B + D + [41, 42],
    "A B + 3 tokens": A + B + [43, 44, 45],
    "D B + 1 token": D + B + [46],
}


def admit(pool, tokens, block_size=4):
    """What the engine does with a prompt: look up, adopt, take the rest, compute, publish."""
    hashes = hash_blocks(tokens, block_size)
    hits = pool.lookup(hashes[: usable_hits(len(tokens), block_size)])
    one = BlockTable(pool, block_size)
    assert one.begin(hits, len(tokens))
    one.publish(hashes, len(tokens))
    return one


# %%
pool = BlockPool(16)
tables = {name: admit(pool, tokens) for name, tokens in texts.items()}
chains = {}
for name, tokens in texts.items():
    letters = [digest.hex()[:6] for digest in hash_blocks(tokens, 4)] + [""]
    chains[name] = list(zip(tables[name].blocks, letters, strict=True))
counts = {block: pool.ref_count(block) for one in tables.values() for block in one.blocks}
show(
    prefix_tree(chains),
    "A tree of blocks. Three requests share the blocks of A and B; the fourth, which begins "
    "with D, shares nothing.",
)
entries = sum(len(one.blocks) for one in tables.values())
say(
    f"{entries} entries in four block tables, **{len(counts)} blocks**. The reference counts of "
    f"the first two are {counts[0]} and {counts[1]}."
)
assert (entries, len(counts), counts[0], counts[1]) == (14, 10, 3, 3)
assert tables["D B + 1 token"].blocks[1] not in tables["A B + 3 tokens"].blocks

# %% [markdown]
# The shared blocks, blue, have a [reference count](../docs/glossary.md#reference-count) of three: they are free when
# the last of the three has ended. They are full, so they are never written again, and unlike in lesson 09 nothing is
# copied.
#
# Look at blocks 1 and 8. Both hold the four tokens of B, and they have different hashes. Why?
#
# ## Why
#
# ### A hash contains the past
#
# Suppose a block's hash were made of its own tokens alone. Two requests are served: `A A'` and `B B'`. Then comes
# `B A'`: a beginning that has been seen, and a second block that has been seen. Just not together.

# %%
TWOS = [[1, 2, 7, 8], [3, 4, 5, 6]]
new = [3, 4, 7, 8, 9]


def hashes_of_tokens(tokens):
    """Each block by its own tokens: no parent."""
    return [hash_block(None, tokens[i : i + 2]) for i in range(0, len(tokens) - 1, 2)]


tokens_found = {}
for words, hashing in (("own tokens", hashes_of_tokens), ("chain", lambda t: hash_blocks(t, 2))):
    pool = BlockPool(8)
    for tokens in TWOS:
        one = BlockTable(pool, 2)
        one.append(4)
        one.publish(hashing(tokens), 4)
    tokens_found[words] = 2 * len(pool.lookup(hashing(new)))
print("tokens found, by the kind of hash:", tokens_found)
assert tokens_found == {"own tokens": 4, "chain": 2}

# %% [markdown]
# Is four wrong? What matters is not the tokens, but the keys and values in the block. Compute tokens 7 and 8 twice,
# after 1, 2 and after 3, 4, and compare their keys in each layer.

# %%
llm = tiny_llm(2, 20)
keys = []
for before in ([1, 2], [3, 4]):
    tokens = [*before, 7, 8, 9]
    found(llm, [{"prompt_token_ids": tokens}])
    block = llm.engine.pool.lookup(hash_blocks(tokens, 2))[1]
    keys.append(llm.engine.storage.key[:, block].clone())  # [layers, 2 tokens, KV heads, head size]
for layer, (one, other) in enumerate(zip(*keys, strict=True)):
    print(f"layer {layer}: {'the same' if torch.allclose(one, other, atol=1e-5) else 'different'}")
assert torch.allclose(keys[0][0], keys[1][0], atol=1e-5)
assert not torch.allclose(keys[0][1], keys[1][1], atol=1e-2)

# %% [markdown]
# In the first layer a key depends on its token and position alone. From the second layer on it is computed from what
# attention has collected from *all tokens before*. A block that is put after another beginning raises no error: the
# model answers a text that was never sent.
#
# So the [prefix hash](../docs/glossary.md#prefix-hash) of a block is a digest of **the hash of the block before it** and
# its own tokens: a chain. One hash stands for everything from the first token on. Change the first token, and all
# hashes change.
#
# `sha256` is not the fastest digest. But two texts with the same hash would share keys, and nothing in the engine
# compares the tokens afterwards. With Python's own `hash`, such texts are easily found.

# %%
show_source(hash_block, hash_blocks)
changed = hash_blocks([99, *texts["A B C + 1 token"][1:]], 4)
assert not set(changed) & set(hash_blocks(texts["A B C + 1 token"], 4))
print("Python's hash of (-1,) and (-2,): equal?", hash((-1,)) == hash((-2,)))
assert hash((-1,)) == hash((-2,)) and hash(1) == hash(True) == hash(1.0)
assert hash_block(None, [-1]) != hash_block(None, [-2])

# %% [markdown]
# ### Full, and computed
#
# A prompt of 10 tokens, blocks of 4, and only 6 tokens are computed in a step. After each step we ask what another
# request with the same text would find.

# %%
llm = tiny_llm(4, 20, max_num_batched_tokens=6, max_num_seqs=4)
prompt = list(range(50, 60))
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
llm.engine.add_request("slow", prompt, params)
rows = []
for step in range(1, 5):
    llm.engine.step()
    (request,) = llm.engine.scheduler.running
    published = llm.engine.pool.lookup(hash_blocks(request.tokens, 4))
    rows.append(
        (f"step {step}", request.num_computed, len(request.table.blocks), 4 * len(published))
    )
table(["after", "tokens computed", "blocks taken", "tokens published"], rows)
assert [row[1] for row in rows] == [6, 10, 11, 12]
assert [row[3] for row in rows] == [4, 8, 8, 12]
assert llm.engine.abort_request("slow")

# %% [markdown]
# In step 1 the request has two blocks, and publishes one: the other has slots that nothing has been written to. In step
# 4 the *answer* fills a block, and that is published too. A chat depends on this.
#
# A block is published when the step that fills it is planned, so the requests planned next find it, in flight. If that
# step fails, the engine withdraws all blocks that it had not filled: no hash stands for keys that were never written.
#
# ### What is given up first
#
# When a request ends, its blocks are free, but their content is kept as long as the room is not needed. A free block is
# **blank** or **cached**. Which one does the pool take next? Giving up a cached block is called
# [eviction](../docs/glossary.md#eviction). Three rules:
#
# 1. blank ones first: they cost nothing;
# 2. then the cached one that was used longest ago ([LRU](../docs/glossary.md#lru));
# 3. of one request, the *last* block first. Without its first block the others could never be found.
#
# Follow a pool of eight blocks of four tokens. A needs 11 tokens, B needs 12, then comes C, which begins like A, and
# finally D, which needs 20. **At each step, say what is taken next, before you look at the lower row.**

# %%
pool, labels, contents, history = BlockPool(8), {}, {}, []
text_a, text_b, text_d = (list(range(first, first + 20)) for first in (0, 100, 200))


def note(words):
    """Keep a picture of the pool: the state of every block, and the order of taking."""
    states = []
    for block in range(8):
        free = "cached" if pool.is_published(block) else "blank"
        state = "held" if pool.ref_count(block) else free
        states.append((state, "" if state == "blank" else contents[block]))
    order = copy.deepcopy(pool).allocate(pool.num_free)  # ask a copy for all that is free
    history.append((words, states, order))


def run(name, tokens):
    """Admit a request and label its blocks: by the request that filled them."""
    one = admit(pool, tokens)
    keys = [*hash_blocks(tokens, 4), name]  # a tail has no hash
    for place, block in enumerate(one.blocks):
        contents[block] = labels.setdefault(keys[place], f"{name}{place}")
    note(f"{name} runs: {len(tokens)} tokens.")
    return one


# %%
note("An empty pool.")
for name, tokens in (("A", text_a[:11]), ("B", text_b[:12]), ("C", [*text_a[:8], 9, 9, 9])):
    run(name, tokens).free()
    note(f"{name} has ended.")
run("D", text_d)
orders = [order for _, _, order in history]
# A's unfilled tail is blank; its chain goes tail first
assert orders[2] == [2, 3, 4, 5, 6, 7, 1, 0]
assert orders[4][-5:] == [1, 0, 4, 3, 2]  # A is older than B
assert orders[6][-5:] == [4, 3, 2, 1, 0]  # C has found A's blocks: now B is older
left = {
    name: 4 * len(pool.lookup(hash_blocks(t, 4)))
    for name, t in (("A", text_a[:8]), ("B", text_b[:12]))
}
print("tokens that can still be found:", left)
assert left == {"A": 8, "B": 4}


# %%
def draw(step):
    words, states, order = history[step]
    figure = eviction_queue(states, order)
    upcoming = f"Taken next: block {order[0]}." if order else "Nothing is free."
    return figure, f"{words} {upcoming}"


shows = (
    "Above, eight blocks: held, cached with the letter of the request that filled them, or blank. "
    "Below, the order in which free blocks are taken."
)
Stepper(len(history), draw, start=7, shows=shows)

# %% [markdown]
# D has taken its five blocks, and the surprise is what is left (printed above): of A everything, although A came first,
# because C has used it since; of B the *first* block, so that four of its tokens can still be found. The other way
# round, B would keep a block in memory that no lookup ever reaches.
#
# The order needs no clock and no sorting. A block is appended to a queue when it becomes free, and removed from
# wherever it is when it is found; a request frees its blocks tail first. That is all.
#
# ### Salts
#
# The time to first token tells whether the same was asked before. Between strangers that is a leak. A [cache
# salt](../docs/glossary.md#cache-salt) goes into the hash of the first block, and the chain carries it to all others:

# %%
llm = tiny_llm(4, 20)
salted = [
    {"prompt_token_ids": list(range(9))} | ({"cache_salt": salt} if salt else {})
    for salt in ("clinic", "clinic", "school", None)
]
by_salt = [found(llm, [prompt])[0] for prompt in salted]
print("clinic, clinic, school, no salt:", by_salt)
assert by_salt == [0, 8, 0, 0]

# %% [markdown]
# More requests at once are not yet more tokens per second: sharing saves storing the prefix and computing it, **not
# reading it**. Each request's attention still reads all its keys. What that means for the figures of the PagedAttention
# paper is worked out in the study [Shared prefixes, beside the paper](extra/10_shared_prefixes.ipynb).
#
# ## The code as it stands
#
# Looking up and publishing, in the pool (`share` and `free` are lesson 09's). `lookup` stops at the first hash that is
# not known. `_take` is where eviction happens, and where a block loses its hash. The rest is the `KVCacheManager`, which
# stands between scheduler and pool: what a request finds, and what it publishes as soon as it is planned.

# %%
show_source(BlockPool.lookup, BlockPool.publish)
show_source(BlockPool._take, BlockPool._remove_from_index)
show_source(usable_hits)
show_source(KVCacheManager.find_hits, KVCacheManager.index)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a hash stands for all tokens from the first on | keys of another text, no error |
# | a block that is handed out again loses its hash | the same, and only in a pool that has been full |
# | only full blocks are published, and none that a failed step was to fill | keys that were never written |
# | in each layer a step writes all its keys before it reads any | the same, for requests that share within a step |
# | at least one token is computed | no logits, or a crash for just those prompts that fit exactly |
# | what is found is held before a new block is taken | a request evicts what it has just found |
# | a chain is given up from its tail | blocks in memory that no lookup reaches |
#
# The first two, over two thousand random requests in a pool that is always too small. We note for each block the *text*
# it was filled for.

# %%
rng = np.random.default_rng(1)
pool, text_of, running, hit_tokens = BlockPool(12), {}, deque(), 0
for _ in range(2000):
    # only two kinds of tokens, so that many texts begin alike
    tokens = rng.integers(0, 2, rng.integers(4, 14)).tolist()
    if len(running) == 2:
        running.popleft().free()
    hits = pool.lookup(hash_blocks(tokens, 2)[: usable_hits(len(tokens), 2)])
    for place, block in enumerate(hits):
        assert text_of[block] == tokens[: 2 * place + 2]
    one = BlockTable(pool, 2)
    if one.begin(hits, len(tokens)):
        for place in range(len(hits), len(tokens) // 2):
            text_of[one.blocks[place]] = tokens[: 2 * place + 2]
        one.publish(hash_blocks(tokens, 2), len(tokens))
        running.append(one)
        hit_tokens += 2 * len(hits)
    pool.check_invariants(running)
print(hit_tokens, "tokens found, each in a block filled for the very same text")
assert hit_tokens > 1000

# %% [markdown]
# ## Find the bug
#
# A small engine hashes its blocks as it should, in chains. When a block is handed out again, its old entry stays in the
# index: cleaning up would cost time, and there is a guard. Before a block is used, its *tokens* are compared with those
# that are wanted. If they differ, the entry is old and does not count. The free list is first in, first out; blocks have
# two tokens.


# %%
class GuardedCache:
    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.tokens, self.index = {}, {}

    def run_to_the_end(self, text):
        hashes = hash_blocks(text, 2)
        blocks = [self.free.popleft() for _ in hashes]
        for place, (block_hash, block) in enumerate(zip(hashes, blocks, strict=True)):
            self.index[block_hash] = block
            self.tokens[block] = text[2 * place : 2 * place + 2]
        self.free.extend(reversed(blocks))  # tail first

    def num_found(self, text):
        for place, block_hash in enumerate(hash_blocks(text, 2)):
            block = self.index.get(block_hash)
            if block is None or self.tokens[block] != text[2 * place : 2 * place + 2]:
                return 2 * place
        return len(text) // 2 * 2


# %% [markdown]
# Its test: a text is found again, and after others have used its blocks it is not.

# %%
tested = GuardedCache(3)
tested.run_to_the_end([1, 2, 7, 8])
assert tested.num_found([1, 2, 7, 8, 9]) == 4
tested.run_to_the_end([3, 4, 5, 6, 0, 0])
assert tested.num_found([1, 2, 7, 8, 9]) == 0
print("the test passes")

# %% [markdown]
# In use, the answers are right for hours. Then, once in a while, an assistant answers as if it had been given other
# instructions. It never happens in a pool that is large enough. Three blocks, and two requests that end: `1 2 7 8`, then
# `3 4 7 8`. Then comes `1 2 7 8 9`. **How many of its tokens may be taken from the cache, and how many does the guard
# let through? Decide first.**

# %%
my_right_tokens = None  # your guess
my_guarded_tokens = None  # your guess

# %%
guarded, pool = GuardedCache(3), BlockPool(3)
for text in ([1, 2, 7, 8], [3, 4, 7, 8]):
    guarded.run_to_the_end(text)
    admit(pool, text, block_size=2).free()
wanted = [1, 2, 7, 8, 9]
right = 2 * len(pool.lookup(hash_blocks(wanted, 2)))
let_through = guarded.num_found(wanted)
wrong_right = {4: "the block with 7 8 has been filled again, after 3 4 instead of 1 2"}
wrong_guarded = {
    2: "the old entry leads to a block whose tokens are 7 8 again: the guard sees no difference"
}
compare(my_right_tokens, right, "tokens that may be taken", wrong_right)
compare(my_guarded_tokens, let_through, "tokens that the guard lets through", wrong_guarded)
assert (right, let_through) == (2, 4)

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The second request got the block that had held `7 8` after `1 2`, and filled it with `7 8` after `3 4`. The old
# entry still leads there. The guard compares tokens, and the tokens are equal. The keys are not: you have seen above
# that from the second layer on they depend on what stands before. With long texts it is not rare: the same question
# after two instructions of the same length is enough.
#
# There are two cures: remove the hash when the block is handed out (`_remove_from_index`), or keep the block's *hash*
# with it and compare that. nano-vllm had this bug (issue 163), and vLLM one of its kind in an earlier engine (pull
# requests 4761 and 4764: a block that was evicted stayed in the index).
# </details>
#
# The proof: two hashes lead to the block, and without the old one the right number is found.

# %%
stale = guarded.index[hash_blocks(wanted, 2)[1]]
owners = [block_hash for block_hash, block in guarded.index.items() if block == stale]
assert owners == [hash_blocks([1, 2, 7, 8], 2)[1], hash_blocks([3, 4, 7, 8], 2)[1]]
print(f"block {stale} stands in the index under {len(owners)} hashes; only the last is true")
guarded.index = {h: b for h, b in guarded.index.items() if h != owners[0]}
assert guarded.num_found(wanted) == right

# %% [markdown]
# `check_invariants` would have found it in the first test: the index and the blocks' own hashes disagree.
#
# ## Check yourself
#
# <details><summary>1. The system prompt of a service begins with the time of day. What is shared?</summary>
#
# Only what stands before the time: a hash contains everything before it. Put what changes at the end.
# </details>
#
# <details><summary>2. A request wants the log-probabilities of its prompt. May it use the cache?</summary>
#
# No: it needs the logits of every token, and those are not stored. But its blocks can be found by others.
# </details>
#
# <details><summary>3. Why does <code>Chat</code> keep token ids, and not the text?</summary>
#
# The model may have written a word in two tokens that a tokenizer reads back as one. The text is the same, the tokens
# are not, and from there on no hash is found.
# </details>
#
# <details><summary>4. A request finds two cached blocks and needs two new ones; there are only three free blocks, the two it found among them. Does it fit?</summary>
#
# No. The two it found are free, and taking them makes them held: one is left. Counting them as free *and* as found is a
# classic mistake; `BlockTable.begin` counts them once.
# </details>
#
# <details><summary>5. Does sharing make decoding faster?</summary>
#
# No. Every key is still read, by each request. It saves memory, so more requests run at once, and it saves computing
# prompts.
# </details>

# %% [markdown]
# ## Summary
#
# - A full block is published under a hash: a digest of the hash before it and its own tokens.
# - A request takes the longest run of hashes that are known, and computes the rest: at least one token.
# - Requests that enter in the same step share as well: the first computes, the others read what it has just written.
# - Ended requests leave their blocks in the cache. Blank blocks are taken first, then the least recently used, each
#   chain from its tail.
# - Saved: prompt tokens, time to first token, memory. Not saved: reading.
# - A block that is reused loses its hash. Comparing tokens is not enough.
#
# **Write it yourself:** [exercise 10](../exercises/10_prefix_cache/10_prefix_cache.ipynb), hashes that contain the
# past, and a cache with eviction.
#
# **Next:** [11 · The scheduler](11_scheduler.ipynb): who runs, who waits, and who gives way when the blocks run out.
# To go back: [04 · Blocks and block tables](04_block_tables.ipynb).
#
# ### Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): sections 4.4 (shared prefix) and 6.4.
# - L. Zheng et al., *SGLang: Efficient Execution of Structured Language Model Programs*, 2023,
#   [arXiv:2312.07104](https://arxiv.org/abs/2312.07104): prefixes kept in a tree, found without being announced.
# - vLLM, [*Automatic Prefix Caching*](https://docs.vllm.ai/en/latest/design/prefix_caching.html): chained hashes, the
#   order of eviction, salts.
# - The bug: nano-vllm issue 163; vLLM pull requests 4761 and 4764.
