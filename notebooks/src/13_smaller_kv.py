# %% [markdown]
# # 13 · Smaller K and V
#
# Twelve lessons made better use of the memory. None made a token smaller. This one does: 8 bits for each number instead
# of 16, and it measures what that breaks.
#
# **You will be able to** say what an 8-bit cache saves and what it costs, which of two formats is more exact and why,
# and why its scales belong to tokens and not to blocks.
#
# About 25 minutes. Runs in under half a minute on two CPU cores; a GPU is used when there is one.

# %%
import torch

from minipaged import AttentionBatch, KVSpec, KVStorage, load_model
from minipaged.attention import get_backend
from minipaged.attention.quantize import LARGEST, dequantize_rows, quantize_rows
from coursekit.figures import show
from coursekit.figures.precision import error_against_magnitude
from coursekit.forked import samples_apart
from coursekit.lesson import compare, pick_device, say, show_source, table

# %% [markdown]
# ## The question
#
# The [bytes per token](../docs/glossary.md#bytes-per-token) are two vectors for each layer and KV head, times the size
# of a number (lesson 02). Only the last factor can be chosen: the others belong to the model. Two formats have 8 bits:
#
# - **int8**: the whole numbers from −127 to 127, evenly spaced;
# - **fp8** (e4m3): a sign, 4 bits of exponent, 3 bits of fraction. Its numbers lie close together near zero and far
#   apart near the largest, 448.
#
# Keys and values are not whole numbers, and may be larger than 448, so a [scale](../docs/glossary.md#quantisation) is
# stored beside them: divide by it when writing, multiply when reading. Here every token has one for each KV head.
#
# **How many more tokens fit, and how wrong do they become? Which of the two formats is more exact?**

# %% [markdown]
# ## Your prediction
#
# SmolLM2: 30 layers, 3 KV heads, 64 numbers each. A scale is a float32. The first can be worked out. The error of a
# vector is the length of the difference, divided by the length of the vector.

# %%
my_factor = None  # your guess: tokens in the same memory, 8 bits against 16, as a factor
my_int8_percent = None  # your guess: the error of a typical value vector in int8, in percent
my_fp8_percent = None  # your guess: the same in fp8

# %% [markdown]
# ## Measure
#
# First the arithmetic, with the class that the engine itself counts with.

# %%
device, _ = pick_device()
loaded = load_model("smollm2-135m", dtype=torch.float32, device=device)
EIGHT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, **EIGHT}
specs = {name: KVSpec.from_model(loaded.config, dtype) for name, dtype in FORMATS.items()}
factor = specs["bfloat16"].bytes_per_token / specs["int8"].bytes_per_token
table(["format", "bytes per token"], [(name, spec.bytes_per_token) for name, spec in specs.items()])
wrong_factor = {
    2.0: "half the bits would be half the memory, were it not for the scales",
    4.0: "that is 32 bits against 8; the cache had 16",
}
compare(my_factor, round(factor, 2), "times as many tokens", wrong_factor)
say(f"64 numbers of one byte and a scale of 4 bytes: **{100 * 4 / 64:.1f} % on top**. With a head "
    f"size of 128 it would be {100 * 4 / 128:.1f} %.")

# %% [markdown]
# ### What is stored
#
# Now the error. A paragraph of Darwin goes through the model once, in float32; what lands in the cache is kept.

# %%
TEXT = """When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the
distribution of the inhabitants of South America, and in the geological relations of the present to
the past inhabitants of that continent. These facts seemed to me to throw some light on the origin
of species, that mystery of mysteries, as it has been called by one of our greatest philosophers. On
my return home, it occurred to me, in 1837, that something might perhaps be made out on this
question by patiently accumulating and reflecting on all sorts of facts which could possibly have
any bearing on it. After five years' work I allowed myself to speculate on the subject."""
ids = loaded.tokenizer.encode(" ".join(TEXT.split()))
backend = get_backend("torch", device)  # reads every format; the kernels need sm_89 for fp8
num_blocks = len(ids) // 16 + 1


@torch.inference_mode()
def read_through(spec):
    """The text in one step: the cache it was read from, and log-probabilities [T, vocab]."""
    storage = KVStorage(spec, num_blocks, 16, device=device)
    batch = AttentionBatch.build([range(num_blocks)], [len(ids)], [len(ids)], 16, device)
    hidden = loaded.model(torch.tensor(ids, device=device), batch, storage, backend)
    return storage, loaded.model.compute_logits(hidden).log_softmax(dim=-1)

# %% [markdown]
# Store each value vector in 8 bits, read it back, compare. These are the functions that the engine writes and reads with.

# %%
def errors(x, dtype, scale=None):
    """Relative error of every vector of x [..., head_size] after a round trip through 8 bits."""
    stored, scale = quantize_rows(x, dtype, scale)
    return (dequantize_rows(stored, scale) - x).norm(dim=-1) / x.norm(dim=-1)


storage, exact = read_through(specs["float32"])
T = len(ids) // 16 * 16  # whole blocks only
values = storage.value.flatten(1, 2)[:, :T]  # [layers, tokens, KV heads, numbers]
own = {name: errors(values, dtype) for name, dtype in EIGHT.items()}
typical = {name: round(100 * float(found.median()), 1) for name, found in own.items()}
wrong_int8 = {0.4: "that is half a step, against the largest number; the others are smaller"}
wrong_fp8 = {
    6.25: "that is the worst case of one number, half of 1/8; typical numbers err by less",
    0.5: "floating point is not more exact as such: three bits of fraction are few",
}
compare(my_int8_percent, typical["int8"], "percent in int8", wrong_int8)
compare(my_fp8_percent, typical["fp8"], "percent in fp8", wrong_fp8)

# %% [markdown]
# **int8 is the more exact** of the two. Many expect the opposite of a floating-point format. We come to why.
#
# And what does the model make of it? Two measures, over all tokens of the text: how often its most likely next token stays the
# same, and the *KL divergence*, how far its probabilities are from those with a float32 cache, in thousandths of a nat (0 means no
# difference at all).

# %% tags=["nbval-ignore-output"]
rows = []
for name in ("bfloat16", "int8", "fp8"):
    logprobs = read_through(specs[name])[1]
    kl = 1000 * float((exact.exp() * (exact - logprobs)).sum(-1).mean())
    same = 100 * float((logprobs.argmax(-1) == exact.argmax(-1)).float().mean())
    rows.append((name, kl, same))
table(["format", "KL divergence, millinats", "same most likely token, %"], rows)
assert rows[0][1] < rows[1][1] < rows[2][1] < 20

# %% [markdown]
# The order is that of the errors: fp8 moves the probabilities several times as far as int8. Neither is *the same model*: a test that
# compares texts with those of a 16-bit cache will fail. (Perplexity, and where greedy texts part ways, are in a
# [study](extra/13_what_eight_bits_change.ipynb).)
#
# ## The picture
#
# Every value vector of the text is a dot. Left, each has a scale of its own. Right, the 16 tokens of a block share one
# for each head, as large as the largest of them needs. That would save nearly all of the scales' bytes.

# %%
size = values.abs().amax(-1)  # [layers, tokens, KV heads]
of_block = size.unflatten(1, (-1, 16)).amax(2, keepdim=True).expand(-1, -1, 16, -1).flatten(1, 2)
per_block = {name: errors(values, d, of_block / LARGEST[d]) for name, d in EIGHT.items()}
small = size < size.quantile(0.02)
rise = {name: float(per_block[name][small].mean() / own[name][small].mean()) for name in EIGHT}
print("with a scale for each block, the errors of the smallest vectors grow:")
print(", ".join(f"{name} {times:.1f} times" for name, times in rise.items()))
assert rise["int8"] > 4 and rise["fp8"] < 1.2

# %%
def dots(found):
    """Magnitude and error of the vectors of every third layer."""
    return {n: [x[::3].flatten().cpu().numpy() for x in (size, found[n])] for n in EIGHT}


panels = {
    "a scale for each token and head": dots(own),
    "a scale for each block and head": dots(per_block),
}
show(
    error_against_magnitude(panels),
    "Relative error against the largest number of a vector. With a scale for each token both "
    "formats stay below 4 percent, int8 below fp8. With a scale for each block, small vectors in "
    "int8 rise, some beyond ten percent; fp8 stays where it was.",
)

# %% [markdown]
# ## Why
#
# **Why is int8 more exact?** A vector has one scale, set by its largest number. int8 then rounds every number by at
# most half a step, that is 1/254 of the largest. fp8 has three bits of fraction: it rounds every number by up to 1/16
# *of itself*. Only numbers far below the largest do better in fp8, and these hardly count in a sum.

# %%
row = torch.tensor([10.0, 5.3, 0.2, 0.02])
print("exact", [f"{x:.3f}" for x in row.tolist()])
for name, dtype in EIGHT.items():
    print(f"{name:5}", [f"{x:.3f}" for x in dequantize_rows(*quantize_rows(row, dtype)).tolist()])

# %% [markdown]
# **Why does a scale for a block ruin int8 and not fp8?** See the last number: int8 made nothing of it. All 127 steps are laid out for
# the large one, and it is less than half a step. That happens to a whole *vector* when it shares its scale with one a thousand times
# larger. fp8 carries an exponent in every number: a scale only moves it along the exponents.
#
# **Does that happen in a real model?** Look at the first token of the text. Models put the attention there that they have no other
# use for, and its values are small, so that it does no harm:

# %%
first, others = float(size[:, 0].median()), float(size[:, 1:].median())
alone, block = (100 * float(x["int8"][:, 0].median()) for x in (own, per_block))
say(f"Largest number of a value vector, typically: **{first:.1f}** at the first token, "
    f"**{others:.1f}** at others. In int8 the first token's error is {alone:.1f} % with its own "
    f"scale, and **{block:.0f} %** with the block's.")

# %% [markdown]
# And the block's scale here was the *best* one, known in advance. A server writes tokens as they come. When a larger
# one arrives, it must either clip it, or change the scale, and with it the meaning of every token that is already
# stored. A scale that belongs to one stored vector never changes. That is worth its four bytes, and is what `minipaged`
# does.
#
# ## The code as it stands

# %%
show_source(quantize_rows, dequantize_rows)
show_source(KVSpec.bytes_per_token, KVStorage.tensors, KVStorage.copy_to)

# %% [markdown]
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a row of zeros has a scale that is not zero | 0/0: NaN, and everything that attends to it is NaN |
# | what does not fit is clipped, not wrapped around | a large positive number becomes a negative one |
# | keys and values have scales of their own | right whenever the two are alike, as in many a test |
# | the scale of a stored token never changes | the first tokens of a block fade, or explode |
# | the scales go wherever the block goes | see below |
#
# The first two:

# %%
for dtype in EIGHT.values():
    stored, scale = quantize_rows(torch.zeros(1, 64), dtype)
    assert torch.equal(dequantize_rows(stored, scale), torch.zeros(1, 64)) and float(scale) > 0
cut = dequantize_rows(*quantize_rows(torch.tensor([4.5]), torch.int8, torch.tensor(0.03)))
print(f"zeros come back as zeros; 4.5 with a scale of 0.03 is read as {float(cut):.2f}: clipped")

# %% [markdown]
# ## Find the bug
#
# A team gives its server an int8 cache. All tests of single answers pass. Parallel samples (lesson 09) were tested years ago, in 16
# bits, and have not been touched since. Now and then a user who asks for two samples reports that the *second one* makes no sense.
# Run again, it may be fine. Here is the code that copies a block on write:

# %%
def copy_as_before(storage, copies):
    for copy in copies:
        storage.key[:, copy.dst] = storage.key[:, copy.src]
        storage.value[:, copy.dst] = storage.value[:, copy.src]

# %% [markdown]
# `samples_apart` makes it happen: a prompt is forked, both samples get the same token, and so both must predict the same. The
# memory has been used before, as always on a server that has run for an hour.
#
# Sixteen prompts, of 17 to 32 tokens, that begin alike. **For how many of them is the second sample off? And why, do
# you think?**

# %%
my_odd_prompts = None  # your guess, 0 to 16

# %%
off = {n: samples_apart(loaded, specs["int8"], ids, n, copy_as_before) for n in range(17, 33)}
fine = [n for n, difference in off.items() if difference < 0.01]
print("fine:", fine)
wrong_odd = {
    16: "one is fine: a prompt of 32 tokens ends with its block, and nothing is copied",
    1: "it is the other way round: only the prompt that ends with its block is fine",
}
compare(my_odd_prompts, len(off) - len(fine), "of 16", wrong_odd)
assert fine == [32]

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# The block is copied without its scales. In the copy the numbers are right, but they are read with what an earlier
# owner of the block left in `key_scale` and `value_scale`. With 16 bits there is nothing to forget, a single answer
# never copies, and a prompt of 32 tokens ends with its block, so that there is no shared tail to copy.
#
# Whatever moves blocks can forget a part: a copy on write, a swap, a transfer to another machine. One cure is to have
# *one list* of what makes up a block, `KVStorage.tensors` above. vLLM's is to store each scale right after the numbers
# of its vector, so that code that moves the block moves the scale (FlashInfer issue 3617 describes that layout).
# </details>
#
# The proof: the same prompt with 16 bits, and with the engine's own copy.

# %%
before = samples_apart(loaded, specs["bfloat16"], ids, 20, copy_as_before)
mended = samples_apart(loaded, specs["int8"], ids, 20, KVStorage.copy_blocks)
print("bfloat16, copied as before, is fine:", before < 0.01)
print("int8, the engine's own copy, is fine:", mended < 0.01)
assert max(before, mended) < 0.01

# %% [markdown]
# ## Check yourself
#
# <details><summary>1. A model with a head size of 32 gets an int8 cache. How many times as many tokens as in 16 bits?</summary>
#
# 64 bytes against 32 + 4: 1.78 times. The smaller the head, the more its scale weighs.
# </details>
#
# <details><summary>2. vLLM's older fp8 cache has one scale for a whole tensor. Why does that work, and for int8 not?</summary>
#
# Every fp8 number has an exponent of its own, so that small vectors stay as exact as large ones. In int8 a vector far below the
# largest would get two or three of the 127 steps.
# </details>
#
# <details><summary>3. A block is shared through prefix caching. Must a reader copy its scales?</summary>
#
# No. It reads the block where it is, scales included. Nothing is copied until the block is written to.
# </details>

# %% [markdown]
# ## Summary
#
# - 8 bits with a scale for each token and head: 1.88 times as many tokens here, not 2.
# - int8 is the more exact of the two as long as each vector has its own scale; fp8 tolerates a coarse one.
# - A scale belongs to the vector that was stored with it, and moves with it. One list says what a block is made of.
#
# **Next:** [14 · vLLM today](14_vllm_today.ipynb): what became of all this.
#
# ### Sources
#
# - P. Micikevicius et al., *FP8 Formats for Deep Learning*, 2022,
#   [arXiv:2209.05433](https://arxiv.org/abs/2209.05433): e4m3.
# - G. Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023,
#   [arXiv:2309.17453](https://arxiv.org/abs/2309.17453): the first token.
# - vLLM pull request 38378: int8 and fp8 with a scale for each token and head.
# - C. Darwin, *On the Origin of Species*, 1859: the text, slightly shortened.
