# %% [markdown]
# # 13 · Study: what a model makes of eight bits
#
# A study to [lesson 13](../13_smaller_kv.ipynb) on [quantised](../../docs/glossary.md#quantisation) keys and values. The lesson
# measures the error of the vectors. Here: whether a few vectors spoil the average, how many more requests the engine then runs, what
# happens to the [perplexity](../../docs/glossary.md#perplexity), and where greedy texts part ways.
#
# About 15 minutes. Runs in under half a minute on two CPU cores.

# %%
import math

import torch

from minipaged import LLM, AttentionBatch, KVSpec, KVStorage, SamplingParams, load_model
from minipaged.attention import get_backend
from minipaged.attention.quantize import LARGEST, dequantize_rows, quantize_rows
from coursekit.figures import show
from coursekit.figures.precision import FormatCost, format_costs
from coursekit.lesson import pick_device, say, table

# %%
device, _ = pick_device()
loaded = load_model("smollm2-135m", dtype=torch.float32, device=device)
FORMATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
EIGHT = {name: FORMATS[name] for name in ("fp8", "int8")}
specs = {name: KVSpec.from_model(loaded.config, dtype) for name, dtype in FORMATS.items()}

# %% [markdown]
# ## Requests in the same memory
#
# Fifty prompts of 20 tokens, 8 MiB of memory, one step of the engine; how many are running after it?

# %%
rows = []
for name in ("float32", "bfloat16", "int8"):
    options = {"kv_cache_dtype": name, "attention_backend": "torch", "max_model_len": 64}
    options |= {"enable_prefix_caching": False, "watermark": 0}
    llm = LLM(loaded, device=device, kv_memory="8MiB", **options)
    for n in range(50):
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        llm.engine.add_request(str(n), [n] * 20, params)
    llm.engine.step()
    rows.append((name, llm.engine.pool.num_blocks, llm.trace[-1].running))
table(["format", "blocks in 8 MiB", "requests running"], rows)
assert all(running == blocks // 2 for _, blocks, running in rows)

# %% [markdown]
# ## Every vector
#
# A page of Darwin goes through the model once, in float32.

# %%
TEXT = """
When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the
distribution of the inhabitants of South America, and in the geological relations of the present
to the past inhabitants of that continent. These facts seemed to me to throw some light on the
origin of species, that mystery of mysteries, as it has been called by one of our greatest
philosophers. On my return home, it occurred to me, in 1837, that something might perhaps be made
out on this question by patiently accumulating and reflecting on all sorts of facts which could
possibly have any bearing on it. After five years' work I allowed myself to speculate on the
subject, and drew up some short notes; these I enlarged in 1844 into a sketch of the conclusions,
which then seemed to me probable: from that period to the present day I have steadily pursued the
same object.
"""
ids = loaded.tokenizer.encode(" ".join(TEXT.split()))
backend = get_backend("torch", device)  # reads every format; the kernels need sm_89 for fp8
num_blocks = -(-len(ids) // 16)
print(len(ids), "tokens,", num_blocks, "blocks")


# %%
@torch.inference_mode()
def read_through(spec):
    """The text in one step: the cache it was read from, and log-probabilities [T, vocab]."""
    storage = KVStorage(spec, num_blocks, 16, device=device)
    batch = AttentionBatch.build([range(num_blocks)], [len(ids)], [len(ids)], 16, device)
    hidden = loaded.model(torch.tensor(ids, device=device), batch, storage, backend)
    return storage, loaded.model.compute_logits(hidden).log_softmax(dim=-1)


def errors(x, dtype, scale=None):
    """Relative error of every vector of x [..., head_size] after a round trip through 8 bits."""
    stored, scale = quantize_rows(x, dtype, scale)
    return (dequantize_rows(stored, scale) - x).norm(dim=-1) / x.norm(dim=-1)

# %%
storage, exact = read_through(specs["float32"])
T = len(ids) // 16 * 16  # whole blocks only
keys, values = (x.flatten(1, 2)[:, :T] for x in (storage.key, storage.value))
found = {
    f"{kind}, {name}": 100 * errors(x, dtype)  # [layers, tokens, KV heads]
    for name, dtype in EIGHT.items()
    for kind, x in {"keys": keys, "values": values}.items()
}
table(
    ["", "typical, %", "99 of 100 are below, %", "worst, %"],
    [
        (name, *(f"{float(x.flatten().quantile(q)):.1f}" for q in (0.5, 0.99, 1)))
        for name, x in found.items()
    ],
)
assert all(float(x.max()) < 4 for x in found.values())
for kind in ("keys", "values"):
    assert 1.5 < found[f"{kind}, fp8"].median() / found[f"{kind}, int8"].median() < 5

# %% [markdown]
# No vector errs by much more than the typical one, and int8 is the more exact of the two for keys as for values.
#
# Two tokens in one block, the first small, the second a thousand times larger: with a scale for both, nothing is left of the first in
# int8. fp8 has an exponent in every number and keeps it.

# %%
tokens = torch.tensor([[0.01, -0.004], [10.0, 3.0]])
shared = torch.full((2,), float(tokens.abs().max()))
for name, dtype in EIGHT.items():
    pair = errors(tokens, dtype)[0], errors(tokens, dtype, shared / LARGEST[dtype])[0]
    print(
        f"{name:5} first token: {100 * pair[0]:5.1f} % with its own scale, "
        f"{100 * pair[1]:5.1f} % with one for both"
    )
    assert pair[1] == 1 if name == "int8" else pair[1] < 0.07

# %% [markdown]
# ## Perplexity
#
# The same page, read from a cache in each format. Three measures of what the model predicts at each token: the perplexity, roughly
# the number of tokens that it hesitates between; the *KL divergence*, how far the probabilities of all tokens are from those with a
# float32 cache, in thousandths of a nat; and how often the most likely token stays the same.

# %% tags=["nbval-ignore-output"]
following = torch.tensor(ids[1:], device=device)[:, None]
read = {name: read_through(spec)[1] for name, spec in specs.items()}
perplexity, moved, same = {}, {}, {}
for name, logprobs in read.items():
    perplexity[name] = math.exp(-float(logprobs[:-1].gather(1, following).mean()))
    moved[name] = float((exact.exp() * (exact - logprobs)).sum(-1).mean())  # KL divergence, nats
    same[name] = 100 * float((logprobs.argmax(-1) == exact.argmax(-1)).float().mean())
more = {name: 100 * (p / perplexity["float32"] - 1) for name, p in perplexity.items()}
table(
    [
        "format",
        "perplexity",
        "more, %",
        "KL divergence, millinats",
        "same most likely token, %",
    ],
    [
        (name, perplexity[name], more[name], 1000 * moved[name], f"{same[name]:.1f}")
        for name in specs
    ],
)

# %%
assert torch.equal(read["float32"], exact)
assert moved["bfloat16"] < moved["int8"] < moved["fp8"] < 0.02
assert abs(more["bfloat16"]) < 0.3 and abs(more["int8"]) < 1.5 and abs(more["fp8"]) < 3
assert min(same.values()) > 93 and 4 < moved["fp8"] / moved["int8"] < 25
say("""
    All formats stay within three percent of the perplexity. bfloat16 moves the model's
    probabilities least, int8 more, and fp8 several times as much as int8: the order of the errors.
""")

# %%
costs = {}
for name, spec in specs.items():
    bare = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    costs[name] = FormatCost(bare, spec.bytes_per_token - bare, more[name])
show(
    format_costs(costs),
    "Bytes per token of the four formats. The 8-bit formats take about half of bfloat16.",
)

# %% [markdown]
# One page is not a benchmark: a perplexity over so few tokens is noisy, and may even fall. So the order of the formats is read from the
# KL divergence, which looks at all tokens of the vocabulary.
#
# ## Greedy text
#
# It follows the most likely token, so it parts ways at the first place where that is another one.

# %% tags=["nbval-ignore-output"]
prompt, answers = "The three most important things about memory are", {}
for name in FORMATS:
    options = {"kv_cache_dtype": name, "attention_backend": "torch", "max_model_len": 512}
    llm = LLM(loaded, device=device, kv_memory="8MiB", **options)
    params = SamplingParams(temperature=0, max_tokens=24)
    answers[name] = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
for name, answer in answers.items():
    pairs = zip(answer.token_ids, answers["float32"].token_ids, strict=False)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids))
    print(f"{name:9} {alike:2} tokens as in float32: {' '.join(answer.text.split())[:70]}")

# %% [markdown]
# A text that parts ways is not a worse text. But a test that compares texts with those of a 16-bit cache will fail.
#
# ### Sources
#
# - C. Darwin, *On the Origin of Species*, 1859: the page, slightly shortened.
