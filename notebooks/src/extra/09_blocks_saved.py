# %% [markdown]
# # 09 · Study: blocks saved, beside the paper
#
# A study beside [lesson 09](../09_copy_on_write.ipynb), which predicts how many blocks forking saves. The PagedAttention
# paper (section 6.3) measured that for parallel samples and for [beam search](../../docs/glossary.md#beam-search), with
# other models and the real lengths. How far do its figures agree, and where they do not, why?

# %%
from dataclasses import replace

import numpy as np
import torch

from minipaged import LLM, BeamSearchParams, KVSpec, KVStorage, SamplingParams
from minipaged.attention import get_backend
from minipaged.cache import BlockCopy, BlockPool, BlockTable, append_all
from minipaged.cache.accounting import Sharing
from minipaged.engine.beam import BeamSearch
from coursekit.figures import show
from coursekit.figures.forks import blocks_saved_by_n
from coursekit.lesson import pick_device, say, table
from coursekit.workloads import lognormal_lengths

NAMES = {"chats": "sharegpt", "instructions": "alpaca"}
lengths = {name: lognormal_lengths(key, 2000, seed=0) for name, key in NAMES.items()}
COUNTS = (2, 4, 6)

# %% [markdown]
# ## Sharing changes no token
#
# First, what the lesson takes for granted. SmolLM2, in float32, because we want to compare tokens. One request with four
# samples, against four requests with one sample each, which share nothing. Both must draw the same random numbers. In
# the engine these depend on the request's seed and the number of the sample, its `key`; so each private request gets the
# key of one of the four samples.

# %%
device, _ = pick_device()
llm = LLM(
    "smollm2-135m", dtype="float32", device=device,
    num_blocks=200, max_model_len=600, enable_prefix_caching=False,
)  # fmt: skip
tokenizer = llm.get_tokenizer()
TASK = tokenizer.encode(
    "Instruction: Write a short sentence about the sea and the people who live beside it."
    "\nResponse:"
)


def sampling(n):
    return SamplingParams(n=n, temperature=1.0, seed=9, max_tokens=32, ignore_eos=True)


def run_all(requests):
    """Serve them together. The outputs in order, and the most blocks held at once."""
    llm.engine.reset_stats()
    llm.engine.add(requests)
    done = {}
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return list(done.values()), max(record.blocks_held for record in llm.trace)


# %%
shared = llm.engine.make_request("shared", TASK, sampling(4))
private = [llm.engine.make_request(f"private {i}", TASK, sampling(1)) for i in range(4)]
for lender, parent in zip(shared.samples, private, strict=True):
    (own,) = parent.samples
    own.sampling = replace(own.sampling, key=lender.sampling.key)

[together], held_together = run_all([shared])
apart, held_apart = run_all(private)
answers = [sample.token_ids for sample in together.outputs]
assert answers == [output.outputs[0].token_ids for output in apart]
assert len(set(map(tuple, answers))) == 4  # they do differ from one another
print("the same four answers;", held_together, "blocks together,", held_apart, "apart")
assert held_apart - held_together == 3 * (len(TASK) // 16)

# %% [markdown]
# Three blocks fewer: the prompt has one full block, kept once instead of four times.
#
# ## Parallel samples
#
# The formula of the lesson, and first a check that real block tables agree with it:


# %%
def predicted(prompt, output, n, block_size=16):
    """Entries of all tables over the steps of an answer, and those of them that cost nothing."""
    tokens = np.arange(prompt + 1, prompt + output)  # the last token is never stored
    entries = n * int((-(-tokens // block_size)).sum())
    return entries, (n - 1) * (prompt // block_size) * len(tokens)


def sample_tables(prompt, output, n):
    """Fork and append as the engine does, without a model."""
    pool = BlockPool(n * (prompt + output), enable_prefix_caching=False)
    first, sharing = BlockTable(pool, 16), Sharing()
    first.append(prompt)
    tables = [first, *(first.fork() for _ in range(n - 1))]
    for _ in range(output - 1):
        append_all(tables, [1] * n)
        sharing.count(tables)
    return sharing.entries, sharing.entries - sharing.blocks


# %%
for some in lengths.values():
    for prompt, output in some[:10].tolist():
        for n in COUNTS:
            assert sample_tables(prompt, output, n) == predicted(prompt, output, n)
print("the formula and real block tables agree, entry by entry")

# %% [markdown]
# An average can be taken in two ways. Over all blocks in memory at all steps, long answers count more, because they are
# there for longer. Or each request counts once. The paper's figures are in the last column. (For ShareGPT it prints only
# a range; we take its ends for $n$ = 2 and 6.)


# %%
PAPER_SAMPLES = {
    "chats": {2: 16.2, 6: 30.5},
    "instructions": {2: 6.09, 4: 8.53, 6: 9.79},
}


def averages(pairs):
    """Percent saved: over all steps, and as the mean of requests that have any."""
    counts = np.array([pair for pair in pairs if pair[0]], dtype=float)  # [requests, 2]
    all_steps, each = counts[:, 1].sum() / counts[:, 0].sum(), counts[:, 1] / counts[:, 0]
    return float(100 * all_steps), float(100 * each.mean())


by_samples = {
    (name, n): averages(predicted(*pair, n) for pair in some.tolist())
    for name, some in lengths.items()
    for n in COUNTS
}
table(
    ["blocks saved, %", "n", "over all steps", "mean of requests", "the paper"],
    [
        (name, n, *found, str(PAPER_SAMPLES[name].get(n, "–")))
        for (name, n), found in by_samples.items()
    ],
)

# %%
for name, figures in PAPER_SAMPLES.items():
    for n, percent in figures.items():
        over_steps, mean = by_samples[name, n]
        assert over_steps < percent < mean
share = [n / (n - 1) * percent for n, percent in PAPER_SAMPLES["instructions"].items()]
say(f"""
    Divide the paper's three figures for Alpaca by (n − 1)/n, and what is left should be one and the
    same share of prompts: **{share[0]:.1f}, {share[1]:.1f}, {share[2]:.1f} %**.
""")
assert max(share) / min(share) < 1.08
no_spread = {"chats": predicted(161, 338, 6), "instructions": predicted(19, 58, 6)}
flat_saved = {name: 100 * saved / entries for name, (entries, saved) in no_spread.items()}
table(
    ["blocks saved, n = 6, %", "lengths spread", "all lengths the mean"],
    [(name, by_samples[name, 6][0], flat_saved[name]) for name in NAMES],
)
assert flat_saved["instructions"] > 2 * by_samples["instructions", 6][0]
assert np.median(lengths["instructions"][:, 0]) < 16 < 19

# %% [markdown]
# Every figure of the paper lies between our two averages, and its figures for different $n$ agree with $(n-1)/n$ to
# within 8 %. So how the average is taken explains a difference as large as the one we see. Another cause is how widely
# lengths are spread, which is our choice (the paper prints their means). The last table takes the spread away. For
# instructions that matters a great deal: their mean prompt just fills a block, and most prompts do not.
#
# ## Beam search
#
# For hundreds of requests with real lengths SmolLM2 is too slow here, so we replace it by dice: at each step every
# hypothesis gets, for its next token, the probabilities that SmolLM2 had at *some* step of six real searches, drawn at
# random. The search, the tables and the pool are the engine's own. First the real searches:

# %%
CHAT = tokenizer.encode("""Question: I am planning a trip of two weeks through the north of Italy
with my parents, who are both over seventy and do not like to walk far. We arrive in Milan on a
Saturday morning and fly home from Venice. We would like to see lakes, some old towns, and at least
one good museum, and we prefer trains to buses. My father is interested in old cars and my mother in
gardens and in opera. We eat early, and we do not want to change hotels more than four times. The
budget is not large, but we can afford a nice dinner now and then. Please suggest a plan.
Answer:""")


# %% tags=["nbval-ignore-output"]
def search(prompt, width, length, kind=BeamSearch):
    """The percentage saved, how sure the model was at every step, and the hypotheses."""
    engine, rows = llm.engine, []
    parts = engine.runner.model, engine.pool, engine.storage, engine.runner.backend
    beams = kind(*parts, BeamSearchParams(width, length, ignore_eos=True), (), length)
    beams.start(prompt)
    while not beams.is_done:
        beams.step()
        rows.append(beams.logits.log_softmax(dim=-1).topk(50).values.cpu())
    found = [hypothesis.output for hypothesis in beams.live]
    beams.close()
    return 100 * beams.sharing.saved, torch.cat(rows), found


# %% tags=["nbval-ignore-output"]
real, sureness = {}, []
for name, prompt, length in (("chats", CHAT, 32), ("instructions", TASK, 40)):
    for width in COUNTS:
        real[name, width], rows, _ = search(prompt, width, length)
        sureness.append(rows)
table(
    ["blocks saved by beams, %", *(f"width {width}" for width in COUNTS)],
    [(name, *(real[name, width] for width in COUNTS)) for name in NAMES],
)
assert all(real[name, 6] > real[name, 2] + 10 for name in NAMES)

# %% [markdown]
# Does sharing change what is found? The same search, with private blocks for every hypothesis: a full copy at every
# token.


# %%
class PrivateSearch(BeamSearch):
    """Beam search that shares nothing from one step to the next."""

    def _branch(self, chosen):
        super()._branch(chosen)
        for hypothesis in self.live:
            own = BlockTable(self.pool, self.storage.block_size)
            own.append(hypothesis.table.num_tokens)
            self.storage.copy_blocks(list(map(BlockCopy, hypothesis.table.blocks, own.blocks)))
            hypothesis.table.free()
            hypothesis.table = own


saved_by_forks, _, found = search(TASK, 4, 20)
saved_private, _, found_private = search(TASK, 4, 20, PrivateSearch)
assert found == found_private and len(found) == 4 and saved_private == 0 < saved_by_forks
print("four hypotheses of 20 tokens, the same with shared and with private blocks")


# %%
class Dice:
    """In place of a model: as sure of itself as SmolLM2, but without any memory."""

    def __init__(self, rows, seed):
        self.rows, self.rng = rows, np.random.default_rng(seed)

    def __call__(self, token_ids, batch, storage, backend):
        return torch.zeros(len(token_ids), 1)

    def compute_logits(self, hidden):
        return self.rows[self.rng.integers(len(self.rows), size=len(hidden))]


def dice_search(prompt, length, width, rows, seed):
    """Entries of the tables, and how many of them cost nothing."""
    pool, backend = BlockPool(1500, enable_prefix_caching=False), get_backend("torch", "cpu")
    params = BeamSearchParams(width, length, ignore_eos=True)
    beams = BeamSearch(Dice(rows, seed), pool, tiny, backend, params, (), length)
    beams.start([0] * prompt)
    while not beams.is_done:
        beams.step()
    beams.close()
    return beams.sharing.entries, beams.sharing.entries - beams.sharing.blocks


# %% tags=["nbval-ignore-output"]
rows, tiny = torch.cat(sureness), KVStorage(KVSpec(1, 1, 1, torch.float32), 1500, 16)
PAPER_BEAMS = {
    "chats": {2: 44.3, 6: 66.3},
    "instructions": {2: 37.56, 4: 53.13, 6: 55.16},
}
REQUESTS = {"chats": 8, "instructions": 60}
by_beams = {
    (name, width): averages(
        dice_search(*pair, width, rows, seed)
        for seed, pair in enumerate(lengths[name][: REQUESTS[name]].tolist())
    )
    for name in NAMES
    for width in COUNTS
}
table(
    ["blocks saved, %", "width", "over all steps", "mean of requests", "the paper"],
    [
        (name, width, *pair, str(PAPER_BEAMS[name].get(width, "–")))
        for (name, width), pair in by_beams.items()
    ],
)
for width, percent in PAPER_BEAMS["instructions"].items():
    assert by_beams["instructions", width][1] < percent

# %% tags=["nbval-ignore-output"]
ours = [
    {name: {n: found[name, n][0] for n in COUNTS} for name in NAMES}
    for found in (by_samples, by_beams)
]
show(
    blocks_saved_by_n(
        {"parallel samples": (ours[0], PAPER_SAMPLES), "beam search": (ours[1], PAPER_BEAMS)}
    ),
    "Left, parallel samples: lines that soon become flat, below a quarter. Right, beam search: "
    "several times as much. The paper's figures are rings near our lines.",
)
assert all(ours[1][name][n] > 2 * ours[0][name][n] for name in NAMES for n in COUNTS)

# %% [markdown]
# The order of magnitude and the shape are the paper's; for wide beams our lines lie higher. (That dice agree with SmolLM2
# on the two prompts above would prove little: they were made from these very searches.) What may explain the gap is the
# lengths, which we drew; the way the average is taken; and the model. The paper's is OPT-13B, about a hundred times as
# large and probably surer of its next token. Does that matter? Make the dice surer:

# %% tags=["nbval-ignore-output"]
by_sureness = {}
for words, power in (("less sure", 0.5), ("as SmolLM2", 1), ("surer", 2)):
    some = lengths["instructions"][:40].tolist()
    pairs = [dice_search(*pair, 6, power * rows, seed) for seed, pair in enumerate(some)]
    by_sureness[words] = averages(pairs)[0]
table(["dice, width 6, instructions", "blocks saved, %"], by_sureness.items())
assert by_sureness["less sure"] > by_sureness["as SmolLM2"] > by_sureness["surer"] + 2

# %% [markdown]
# It does, and in the direction of the gap: a model that is sure of each hypothesis keeps more of them alive side by side,
# and they share less. How much each cause weighs we cannot say.
#
# ### Source
#
# - W. Kwon et al., *PagedAttention*, SOSP 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 6.3.
