"""The numbers that the sentence below a lesson's widget must have, from the engine and the controls.

Each function takes a widget's controls (description -> text) and returns the numbers in the sentence's order.
"""

import copy
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from coursekit.multiprocessors import busy_share, run_programs
from coursekit.replay import replay_contiguous
from coursekit.workloads import lognormal_lengths
from minipaged import LLM, BlockPool, BlockTable, KVSpec, SamplingParams
from minipaged.attention.kernels import arguments
from minipaged.attention.targets import TARGETS
from minipaged.cache.prefix import hash_blocks, usable_hits
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

Numbers = list[float]
Controls = dict[str, str]
GB = 10**9


def conversations(controls: Controls) -> Numbers:
    """02: conversations of a 70B model on a card."""
    card, weights, heads, tokens = (
        int(controls[n]) for n in ("card, GB", "weights, GB", "KV heads", "tokens")
    )
    each = KVSpec(80, heads, 128, torch.float16).bytes_for(tokens, 16)
    return [max(0, (card - weights) * GB // each), tokens, weights, card]


@cache
def crowded_moments() -> list[tuple[int, int, int]]:
    """03: (step, free slots, largest hole) when a request came or went and another waits."""
    budget = 12 * GB // (800 * 1024)
    lengths = lognormal_lengths("sharegpt", 2000, seed=0)[:600]
    moments, before = [], None
    for index, step in enumerate(replay_contiguous(lengths, budget, 2048, "oracle")):
        starts = [strip.start for strip in step.strips]
        if index and starts != before and step.waiting:
            strips = sorted((strip.start, strip.start + strip.size) for strip in step.strips)
            ends, begins = [0, *(stop for _, stop in strips)], [*(start for start, _ in strips), budget]
            holes = [begin - end for end, begin in zip(ends, begins, strict=True)]
            moments.append((index, sum(holes), max(holes)))
        before = starts
        if len(moments) == 40:
            break
    return moments


def holes(controls: Controls) -> Numbers:
    return list(crowded_moments()[int(controls["step"])])


def growing_table(controls: Controls) -> Numbers:
    """04: a table that takes blocks beside two neighbours, one of which ends."""
    pool = BlockPool(8, enable_prefix_caching=False)
    early, late, mine = (BlockTable(pool, 4) for _ in range(3))
    early.append(7)
    late.append(3)
    for step in range(int(controls["step"]) + 1):
        if step == 6:
            early.free()
        if step % 2 and step < 14:
            late.append(1)
        mine.append(1)
    return [mine.num_tokens, *mine.blocks, int(mine.slots(mine.num_tokens - 1, mine.num_tokens)[0])]


def shuffled_table(controls: Controls) -> Numbers:
    """05: the block table after a shuffle."""
    return list(np.random.default_rng(int(controls["step"])).permutation(8)[:4].tolist())


def tile(controls: Controls) -> Numbers:
    """06: positions and slots of one tile of 8 of 18 keys."""
    table = BlockTable(BlockPool(8), 4)
    table.blocks, table.num_tokens = [7, 2, 4, 0, 5], 18
    first = 8 * int(controls["step"])
    stop = min(first + 8, 18)
    slots = table.slots(first, stop).tolist()
    table.blocks, table.num_tokens = [], 0
    return [first, stop - 1, *slots]


def card_at_work(controls: Controls) -> Numbers:
    """07: the share of the card's time in which multiprocessors have work, uncut and cut."""
    target = next(target for target in TARGETS.values() if target.card == controls["card"])
    count, sequences, context = (
        target.num_multiprocessors,
        int(controls["sequences"]),
        int(controls["context"]),
    )
    cut = arguments.keys_per_part(sequences, 8, context, count)
    shares = []
    for length in (context, cut):
        whole, rest = divmod(context, length)
        each = [length] * whole + [rest] * bool(rest)
        runs = run_programs([keys for keys in each for _ in range(8 * sequences)], count)
        shares.append(round(100 * busy_share(runs, count)))
    return [sequences, context, shares[0], count, shares[1]]


def token_budget(controls: Controls) -> Numbers:
    """08: under a token budget, the longest step and the steps of a prompt of 400 beside eight chats."""
    budget = int(controls["budget"])
    sizes = {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": budget}
    model = LoadedModel(random_llama(), None, TINY, "tiny")
    llm = LLM(model, device="cpu", enable_prefix_caching=False, **sizes)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    for index in range(8):
        llm.engine.add_request(str(index), [5 + index] * 7, params)
    for step in range(100):
        if step == 6:
            llm.engine.add_request("long", [3] * 400, params)
        if llm.engine.has_unfinished_requests():
            llm.engine.step()
    longest = max(record.prefill_tokens + record.decode_tokens for record in llm.trace)
    chunks = sum(record.prefill_tokens > 0 for record in list(llm.trace)[6:])
    return [budget, longest, 408, chunks]


def fork(controls: Controls) -> Numbers:
    """09: which block is held by how many; the history begins after the fork."""
    pool = BlockPool(4, enable_prefix_caching=False)
    parent = BlockTable(pool, 4)
    parent.append(6)
    child = parent.fork()
    for step in range(1, int(controls["step"]) + 1):
        if step in (1, 2):
            (child if step == 1 else parent).append(1)
        else:
            (child if step == 3 else parent).free()
    return [n for block in range(4) if pool.ref_count(block) for n in (block, pool.ref_count(block))]


@cache
def evictions() -> list[Numbers]:
    """10: tokens of the request that runs, if one has just begun, and the block that is taken next."""
    pool = BlockPool(8)

    def next_block() -> Numbers:
        taken = copy.deepcopy(pool).allocate(1)
        return list(taken or [])

    a, b, d = (list(range(first, first + 20)) for first in (0, 100, 200))
    states = [next_block()]
    for tokens in (a[:11], b[:12], [*a[:8], 9, 9, 9], d):
        table = BlockTable(pool, 4)
        names = hash_blocks(tokens, 4)
        assert table.begin(pool.lookup(names[: usable_hits(len(tokens), 4)]), len(tokens))
        table.publish(names, len(tokens))
        states.append([len(tokens), *next_block()])
        if tokens is not d:
            table.free()
            states.append(next_block())
    return states


def eviction(controls: Controls) -> Numbers:
    return evictions()[int(controls["step"])]


@cache
def free_blocks() -> list[int]:
    """11: blocks of twelve that are free in each step of five requests that do not all fit."""
    settings = {"block_size": 4, "num_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    plain = {"max_model_len": 512, "enable_prefix_caching": False, "watermark": 0.0}
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), device="cpu", **settings, **plain)
    for index, (prompt, answer) in enumerate([(6, 18), (9, 14), (20, 8), (5, 16), (11, 6)]):
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        llm.engine.add_request("ABCDE"[index], [(7 * index + 3 * i + 5) % 300 for i in range(prompt)], params)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    return [12 - record.blocks_held for record in llm.trace]


def pool_in_step(controls: Controls) -> Numbers:
    step = int(controls["step"])
    return [step, free_blocks()[step], 12]


EXPECTED: dict[str, Callable[[Controls], Numbers]] = {
    "02": conversations,
    "03": holes,
    "04": growing_table,
    "05": shuffled_table,
    "06": tile,
    "07": card_at_work,
    "08": token_budget,
    "09": fork,
    "10": eviction,
    "11": pool_in_step,
}
"""Lesson -> the numbers below its widget."""
