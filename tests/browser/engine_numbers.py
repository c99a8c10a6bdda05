"""The numbers that the sentence below a lesson's widget must have, from the engine and the controls.

Each function takes a widget's controls (description -> text) and returns the numbers in the sentence's order.
"""

from collections.abc import Callable

import numpy as np
import torch

from minipaged import KVSpec

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


def shuffled_table(controls: Controls) -> Numbers:
    """05: the block table after a shuffle."""
    return list(np.random.default_rng(int(controls["step"])).permutation(8)[:4].tolist())


EXPECTED: dict[str, Callable[[Controls], Numbers]] = {"02": conversations, "05": shuffled_table}
"""Lesson -> the numbers below its widget."""
