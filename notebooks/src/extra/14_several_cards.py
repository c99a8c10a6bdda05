# %% [markdown]
# # 14 · Study: several cards
#
# A study beside [lesson 14](../14_vllm_today.ipynb). An engine here runs on one card; what would several share? This is
# computed, not measured.

# %%
import torch

from minipaged import KVSpec
from coursekit.figures import card_filled, show
from coursekit.lesson import number, say, table

# %% [markdown]
# | | a card has | keys and values of a token are |
# |:--|:--|:--|
# | [tensor parallel](../../docs/glossary.md#tensor-parallelism) | some heads of every layer | split by KV head; every card has the same block table |
# | pipeline parallel | all heads of some layers | split by layer |
# | data parallel | a whole model, some of the requests | whole, on one card |
#
# Take a model of 70 billion parameters with 16-bit weights on cards of 80 GB: 80 layers, 8 KV heads of 128. Under
# tensor parallelism the scheduler still sees one pool: block 17 is block 17 on every card, a piece of each. But heads
# cannot be cut. (We leave out what activations and CUDA graphs take.)


# %%
CARD, WEIGHTS, LAYERS, KV_HEADS, CONTEXT = 80 * 10**9, 140 * 10**9, 80, 8, 4096


def on_each_card(cards, dtype=torch.float16):
    """Tensor parallelism: KV bytes of a token on each card, and the requests that fit."""
    heads = max(1, KV_HEADS // cards)  # fewer heads than cards: they are repeated
    spec = KVSpec(LAYERS, heads, 128, dtype)
    room = CARD - WEIGHTS // cards
    return spec.bytes_per_token, max(0, room // spec.bytes_for(CONTEXT, 16))


cards_tried = (1, 2, 4, 8, 16)
table(
    ["cards", "bytes per token and card", "bytes per token, all cards", "requests that fit"],
    [(str(n), on_each_card(n)[0], n * on_each_card(n)[0], on_each_card(n)[1]) for n in cards_tried],
)
fits = {n: on_each_card(n)[1] for n in cards_tried}
assert fits[1] == 0 and on_each_card(8)[0] * 8 == on_each_card(1)[0]
assert on_each_card(16)[0] == on_each_card(8)[0]
assert fits[4] > 4 * fits[2] and fits[16] < 1.3 * fits[8]

# %% [markdown]
# One card does not hold the weights. From two to four cards the requests grow by far more than twice, because what was
# short was the room beside the weights. From eight to sixteen they hardly grow: there are eight KV heads, so two cards
# each store the same. One of the cards, first of eight, then of sixteen:

# %%
for cards in (8, 16):
    each, count = on_each_card(cards)
    show(
        card_filled(CARD, WEIGHTS / cards, each * CONTEXT, count),
        f"The memory of one of {cards} cards as a bar: its share of the weights, then "
        f"{count} conversations of {number(each * CONTEXT)} bytes.",
    )

# %%
copies = {n: n * on_each_card(n)[0] / on_each_card(1)[0] for n in (8, 16)}
say(f"""
    Stored on all cards together, every key is there **{copies[8]:.0f} time** with 8 cards and
    **{copies[16]:.0f} times** with 16. Twice the cards hold {fits[16] / fits[8]:.2f} times the
    requests.
""")
assert copies == {8: 1, 16: 2}

# %% [markdown]
# What the table leaves out: twice in every layer all cards must add up their results, which takes time and memory.
# Pipeline parallelism sends less, but a card waits for the one before it unless several batches are under way. Those
# are times, and times have to be measured on such machines. We have not.
#
# <details><summary>With 16 cards and 8 KV heads, which setting would you change to stop storing everything twice?</summary>
#
# Tensor parallel 8, and two of those: data parallel 2 for more requests, or pipeline parallel 2 when the weights need
# the room.
# </details>
#
# ### Sources
#
# - W. Kwon et al., *PagedAttention*, SOSP 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): section 4.6.
# - M. Shoeybi et al., *Megatron-LM*, 2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053): tensor parallelism.
# - vLLM's `get_num_kv_heads` in `config/model.py`: heads are repeated where there are fewer than cards.
