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
# About 40 minutes. Runs in under half a minute on two CPU cores; a GPU is used when there is one.

# %%
from collections import deque

import torch

from minipaged import LLM, SamplingParams, load_model
from minipaged.cache import BlockPool, hash_block, hash_blocks, usable_hits
from minipaged.core.kv_cache_manager import KVCacheManager
from minipaged.engine.chat import Chat
from coursekit.figures import show
from coursekit.figures.sharing import eviction_queue, first_token_times, prefix_tree
from coursekit.followed_pool import FollowedPool, admit
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.library import QUESTIONS, SYSTEM
from coursekit.small_engine import small_llm
from coursekit.widgets import Stepper

# %% [markdown]
# ## The question
#
# A library has put an assistant on its web page. The same instructions stand before each question.

# %%
device, _ = pick_device()
print(SYSTEM.partition(" Be ")[0], "…", QUESTIONS[0])
# float32, because tokens are compared
loaded = load_model("smollm2-135m", dtype=torch.float32, device=device)


prompts = []
for question in QUESTIONS:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    prompts.append(loaded.tokenizer.encode(loaded.tokenizer.apply_chat_template(messages)))
lengths = [len(prompt) for prompt in prompts]
columns = enumerate(zip(*prompts, strict=False))  # the tokens at each position
common = next(i for i, column in columns if len(set(column)) > 1)
say(f"""
    The six prompts have {", ".join(map(str, lengths))} tokens, {sum(lengths)} together.
    The first **{common}** are the same in all of them.
""")
# %% [markdown]
# **How much has to be computed and stored, if equal beginnings are stored once? And how does the engine notice that
# they are equal?** This sharing is called [prefix caching](../docs/glossary.md#prefix-caching).
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
# Once without prefix caching, once with it. The first request runs for one step, then the others come.

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


# %%
settings = {"device": device, "num_blocks": 120, "max_model_len": 512}
settings["max_num_batched_tokens"] = 2048  # so many steps on every machine
engines = {
    "without": LLM(loaded, enable_prefix_caching=False, **settings),
    "sharing": LLM(loaded, **settings),
}
served = {name: serve_six(llm) for name, llm in engines.items()}
computed = {name: llm.stats.num_prefill_tokens for name, llm in engines.items()}
held = {name: max(record.blocks_held for record in llm.trace) for name, llm in engines.items()}
table(
    ["", "prompt tokens computed", "blocks held at most"],
    [(name, computed[name], held[name]) for name in engines],
)
answers = {name: [output.outputs[0].token_ids for output in served[name]] for name in engines}
assert answers["sharing"] == answers["without"]

# %% [markdown]
# The first request computes its whole prompt. Each of the others finds the whole blocks of the common beginning, and
# computes the rest.

# %%
shared_blocks = common // 16
predicted = sum(lengths) - 5 * shared_blocks * 16
wrong = {sum(lengths) - 5 * common: "only whole blocks are shared; the last one is not whole"}
compare(my_computed, computed["sharing"], "prompt tokens computed for six requests", wrong)
say(f"""
    Predicted: {sum(lengths)} − 5 × {shared_blocks} × 16 = {predicted}. The *hit rate*, in tokens:
    **{1 - predicted / sum(lengths):.0%}**. The {shared_blocks} shared blocks are stored once, not
    six times: {5 * shared_blocks} blocks fewer.
""")
assert computed["sharing"] == predicted
assert held["without"] - held["sharing"] == 5 * shared_blocks

# %% [markdown]
# The six answers are the same, token for token. Sharing is not an approximation.
#
# ### The first token
#
# The user notices the [time to first token](../docs/glossary.md#ttft). It is spent computing the prompt, so it should
# shrink with what is left to compute.

# %% tags=["nbval-ignore-output"]
ttft = {name: [output.metrics.ttft for output in outputs] for name, outputs in served.items()}
figure = first_token_times(ttft["without"], ttft["sharing"], ("without", "sharing"))
show(figure, "Time to first token of six requests; requests 2 to 6 wait less with sharing.")

# %% [markdown]
# ### All at once
#
# The first request gains nothing. And if there is no first one? Empty the cache, and let all six come at the same moment.

# %%
sharing = engines["sharing"]
sharing.reset_prefix_cache()
steps_before = len(sharing.trace)
burst = sharing.generate([{"prompt_token_ids": p} for p in prompts], TWELVE, use_tqdm=False)
found_in_burst = [output.num_cached_tokens for output in burst]
wrong_burst = {
    0: "the block it needs is not computed yet, true; but it will be by the time it is read"
}
compare(my_found_in_a_burst, found_in_burst[-1], "tokens found by the sixth", wrong_burst)
first_step = sharing.trace[steps_before]
print("found by the six:", found_in_burst, " computed in one step:", first_step.prefill_tokens)
assert first_step.prefill_tokens == computed["sharing"]
assert [output.outputs[0].token_ids for output in burst] == answers["without"]

# %% [markdown]
# As few computed as when one came before the others. And yet the blocks that the second request lists are still empty
# when it is admitted. That does no harm, because they are not read yet. A step is planned first and computed afterwards,
# layer by layer, and each layer writes the keys and values of *all* tokens of the step before any query reads (lesson
# 01). So a request may also list blocks that others fill *in the same step*: blocks **in flight**.
# vLLM does so too: it indexes a block when it is scheduled.
#
# ### A prompt that is found whole
#
# 32 tokens are two whole blocks. Both are in the cache when the same prompt comes again.

# %%
rows = []
for n in (31, 32, 33, 48):
    llm = small_llm(num_blocks=20, enable_prefix_caching=True)
    for _ in ("cold", "warm"):
        output = llm.generate({"prompt_token_ids": list(range(n))}, TWELVE, use_tqdm=False)[0]
    rows.append((str(n), n // 16 * 16, output.num_cached_tokens, n - output.num_cached_tokens))
table(["tokens of the prompt", "in whole blocks", "found", "computed"], rows)
wrong_found_of_32 = {
    32: "all of it is in the cache, but the last token must be computed, since its "
    "logits are needed; and only whole blocks are shared",
    31: "one token must be computed, yes; but only whole blocks can be shared, so it "
    "is the whole last block",
    0: "the first block is found; only the last one is computed again",
}
compare(my_found_of_32, rows[1][2], "tokens found of 32", wrong_found_of_32)

# %% [markdown]
# Not 32. The next token is chosen from the [logits](../docs/glossary.md#logits) of the last one, and logits are not
# in the cache: **at least one token must be computed**. Blocks are shared whole, so its whole block is computed
# again, into a block of its own. Of 33 tokens, one is enough.
#
# ### A chat
#
# The prompt of each turn is all that was said before, and a new question. No other request begins the same way; but the
# chat finds *itself*. `Chat` keeps the token ids that it has sent and received.

# %%
chat, rows = Chat(sharing, system=SYSTEM), []
for text in ("Are you open on Saturdays?", "And on Sunday?", "How long may I keep a film?"):
    turn = chat.send(text, SamplingParams(temperature=0, max_tokens=16))
    prompt, found = len(turn.prompt_token_ids), turn.num_cached_tokens
    rows.append((text, prompt, found, prompt - found))
table(["question", "tokens of the prompt", "found", "computed"], rows)
assert all(row[3] < 48 for row in rows)

# %% [markdown]
# The prompt grows, what is computed does not. Without sharing the work of a chat grows with the *square* of its length.
#
# ## The picture
#
# How the blocks lie. Four requests in blocks of four tokens. A full block is found by its **hash**, whose first
# letters stand in it. A block without one is not full yet.

# %%
A, B, C, D = list(range(4)), list(range(10, 14)), list(range(20, 24)), list(range(30, 34))
texts = {
    "A B C + 1 token": A + B + C + [40],
    "A B D + 2 tokens": A + B + D + [41, 42],
    "A B + 3 tokens": A + B + [43, 44, 45],
    "D B + 1 token": D + B + [46],
}
pool = BlockPool(16)
tables = {name: admit(pool, tokens, 4) for name, tokens in texts.items()}
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
print(entries, "entries in four block tables,", len(counts), "blocks; reference counts:", counts)

# %% [markdown]
# The shared blocks, blue, have a [reference count](../docs/glossary.md#reference-count) of three: they are free when
# the last of the three has ended. They are full, so they are never written again, and nothing is copied.
#
# Look at blocks 1 and 8. Both hold the four tokens of B, and they have different hashes. Why?
#
# ## Why
#
# ### A hash contains the past
#
# Suppose a block's hash were made of its own tokens alone. Blocks of two tokens; `1 2 7 8` and `3 4 5 6` have been
# served. Then comes `3 4 7 8`: a beginning that has been seen, and a second block that has been seen. Just not together.
# All four tokens would be found. Is that wrong? What matters is not the tokens, but the keys and values in the block.
# Compute tokens 7 and 8 twice, after 1, 2 and after 3, 4, and compare their keys in each layer. (A tiny model with
# random weights will do: which blocks are found does not depend on what a model says.)

# %%
llm = small_llm(block_size=2, num_blocks=20, enable_prefix_caching=True)
keys = []
for tokens in ([1, 2, 7, 8, 9], [3, 4, 7, 8, 9]):
    llm.generate({"prompt_token_ids": tokens}, TWELVE, use_tqdm=False)
    block = llm.engine.pool.lookup(hash_blocks(tokens, 2))[1]
    keys.append(llm.engine.storage.key[:, block].clone())  # [layers, 2 tokens, KV heads, head size]
same = [torch.allclose(one, other, atol=1e-5) for one, other in zip(*keys, strict=True)]
print(*(f"layer {i}: {'the same' if same[i] else 'different'}" for i in range(len(same))), sep="\n")
assert same[0] and not any(same[1:])

# %% [markdown]
# In the first layer a key depends on its token and position alone. From the second layer on it is computed from what
# attention has collected from *all tokens before*. A block that is put after another beginning raises no error: the
# model answers a text that was never sent.
#
# So the [prefix hash](../docs/glossary.md#prefix-hash) of a block is a digest of **the hash of the block before it** and
# its own tokens: a chain. One hash stands for everything from the first token on. The digest is `sha256`, because nothing
# in the engine compares the tokens afterwards: two texts with the same hash would share keys.

# %%
show_source(hash_block, hash_blocks)

# %% [markdown]
# A block is published when the step that fills it is planned, so the requests planned next find it, in flight. If that
# step fails, the engine withdraws all blocks that it had not filled: no hash stands for keys that were never written.
# The blocks that an *answer* fills are published too; the chat depended on it. (Step by step: in the
# [study](extra/10_shared_prefixes.ipynb#full-and-computed).)
#
# ### What is given up first
#
# When a request ends, its blocks are free, but their content is kept as long as the room is not needed. A free block is
# **blank** or **cached**. Giving up a cached block is called [eviction](../docs/glossary.md#eviction). Three rules say
# what the pool takes next:
#
# 1. blank ones first: they cost nothing;
# 2. then the cached one that was used longest ago ([LRU](../docs/glossary.md#lru));
# 3. of one request, the *last* block first. Without its first block the others could never be found.
#
# Follow a pool of eight blocks of four tokens. A needs 11 tokens, B needs 12, then comes C, which begins like A, and
# finally D, which needs 20. **At each step, say what is taken next, before you look at the lower row.**

# %%
followed = FollowedPool(8, 4)
followed.note("An empty pool.")
text_a, text_b, text_d = (list(range(first, first + 20)) for first in (0, 100, 200))
for name, tokens in (("A", text_a[:11]), ("B", text_b[:12]), ("C", [*text_a[:8], 9, 9, 9])):
    running = followed.run(name, tokens)
    followed.note(f"{name} runs: {len(tokens)} tokens.")
    running.free()
    followed.note(f"{name} has ended.")
followed.run("D", text_d)
followed.note("D runs: 20 tokens.")
left = {
    name: 4 * len(followed.pool.lookup(hash_blocks(text, 4)))
    for name, text in (("A", text_a[:11]), ("B", text_b[:12]))
}
print("tokens that can still be found:", left)
assert left == {"A": 8, "B": 4}


# %%
def draw(step):
    state = followed.history[step]
    upcoming = f"Taken next: block {state.order[0]}." if state.order else "Nothing is free."
    return eviction_queue(state.blocks, state.order), f"{state.title} {upcoming}"


shows = (
    "Above, eight blocks: held, cached with the letter of the request that filled them, or blank. "
    "Below, the order in which free blocks are taken."
)
Stepper(len(followed.history), draw, start=7, shows=shows)

# %% [markdown]
# D has taken its five blocks, and the surprise is what is left (printed above): of A everything, although A came first,
# because C has used it since; of B the *first* block. The other way round, B would keep a block that no lookup ever
# reaches.
#
# The order is that of a queue: a block joins its end when it becomes free, and leaves it when it is found.
#
# The time to first token tells whether the same was asked before. Between strangers that is a leak. A [cache
# salt](../docs/glossary.md#cache-salt) goes into the hash of the first block, and the chain carries it to all others
# ([study](extra/10_shared_prefixes.ipynb#salts)).
#
# Sharing saves storing the prefix and computing it, **not reading it**: each request's attention still reads all its
# keys. What that means for the PagedAttention paper's figures: [Shared prefixes](extra/10_shared_prefixes.ipynb).
#
# ## The code as it stands
#
# `lookup` stops at the first hash that is not known. `_take` is where eviction happens, and where a block loses its hash.
# The `KVCacheManager` stands between scheduler and pool: what a request finds, and what it publishes when it is planned.

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
# The first two are tried on two thousand random requests in the
# [study](extra/10_shared_prefixes.ipynb#two-thousand-requests).
#
# ## Find the bug
#
# A small engine hashes its blocks as it should, in chains. When a block is handed out again, its old entry stays in the
# index, but there is a guard: before a block is used, its *tokens* are compared with those that are wanted. If they
# differ, the entry does not count. Blocks have two tokens; the free list is first in, first out.


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
# Its test passes: a text is found again, until others have used its blocks.

# %%
tested = GuardedCache(3)
for text in ([1, 2, 7, 8], [3, 4, 5, 6, 0, 0]):
    tested.run_to_the_end(text)
    print("after", text, "found:", tested.num_found([1, 2, 7, 8, 9]))

# %% [markdown]
# In use, once in a while, an assistant answers as if it had been given other instructions. It never happens in a pool
# that is large enough. Three blocks, and two requests that end: `1 2 7 8`, then `3 4 7 8`. Then comes `1 2 7 8 9`. **How
# many of its tokens may be taken from the cache, and how many does the guard let through? Decide first.**

# %%
my_right_tokens = None  # your guess
my_guarded_tokens = None  # your guess

# %%
guarded, pool = GuardedCache(3), BlockPool(3)
for text in ([1, 2, 7, 8], [3, 4, 7, 8]):
    guarded.run_to_the_end(text)
    admit(pool, text, 2).free()
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
# entry still leads there. The guard compares tokens, and the tokens are equal. The keys are not, from the second layer
# on. With long texts it is not rare: the same question after two instructions of the same length is enough.
#
# Two cures: remove the hash when the block is handed out (`_remove_from_index`), or compare the block's *hash*.
# nano-vllm had this bug (issue 163), and vLLM one of its kind in an earlier engine (pull requests 4761 and 4764: a block
# that was evicted stayed in the index).
# </details>
#
# ## Check yourself
#
# <details><summary>1. The system prompt of a service begins with the time of day. What is shared?</summary>
#
# Only what stands before the time. Put what changes at the end.
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

# %% [markdown]
# ## Summary
#
# - A full block is published under a hash: a digest of the hash before it and its own tokens.
# - A request takes the longest run of hashes that are known, and computes the rest: at least one token.
# - Requests that enter in the same step share as well: the first computes, the others read what it has just written.
# - Ended requests leave their blocks in the cache. Blank blocks are taken first, then the least recently used, each
#   chain from its tail.
# - Saved: prompt tokens, time to first token, memory. Not saved: reading keys.
# - A block that is reused loses its hash. Comparing tokens is not enough.
#
# **Write it yourself:** [exercise 10](../exercises/10_prefix_cache/10_prefix_cache.ipynb), hashes that contain the
# past, and a cache with eviction.
#
# **Next:** [11 · The scheduler](11_scheduler.ipynb): who runs, who waits, and who gives way when the blocks run out.
#
# ### Sources
#
# - W. Kwon et al., *PagedAttention*, SOSP 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): sections 4.4 and
#   6.4.
# - L. Zheng et al., *SGLang: Efficient Execution of Structured Language Model Programs*, 2023,
#   [arXiv:2312.07104](https://arxiv.org/abs/2312.07104): prefixes kept in a tree.
# - vLLM, [*Automatic Prefix Caching*](https://docs.vllm.ai/en/latest/design/prefix_caching.html).
