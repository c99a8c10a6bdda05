"""Weights laid out once for the CPU's matrix routines, instead of anew in every product.

A product with few rows takes its time from reading the weight, and that is fastest in the order of use.
`in_panels` is the order of our own kernel, `linear.cpp`. Where that does not run, `pack_weights` asks for
oneDNN's. torch has it for `torch.compile`'s use, under private names, so everything here falls back to the
plain product where they are missing or refuse.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from minipaged.model.llama import Linear, LlamaModel

TYPICAL_ROWS = 32  # oneDNN's layout is chosen for products of about so many rows
PANEL = 32  # output columns that our kernel computes side by side: WIDTH of tile.h
WORD_BYTES = 4


def in_panels(weight: Tensor, *, gated: bool = False) -> Tensor:
    """A weight [N, K] as `linear.cpp` reads it: [N / 32, words of a row, 32, numbers of a word].

    A word is four bytes of a row: one float32 or two bfloat16. N is a multiple of 32, K of a word's numbers.
    gated: the first half of the rows are gates, the second ups; a panel takes 16 of each, of the same index.
    """
    per_word = WORD_BYTES // weight.itemsize
    if weight.shape[0] % PANEL or weight.shape[1] % per_word:
        raise ValueError(f"a weight of {list(weight.shape)}, not of multiples of [{PANEL}, {per_word}]")
    if gated:
        weight = weight.unflatten(0, (2, -1, PANEL // 2)).transpose(0, 1).flatten(0, 2)
    return weight.view(-1, PANEL, weight.shape[1] // per_word, per_word).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """The product of `Linear`, from a packed copy of its weight. CPU only."""

    packed: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self.register_buffer("packed", packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # [T, in_features] -> [T, out_features]; no bias and nothing fused after the product
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


def pack_weights(model: LlamaModel) -> bool:
    """Replace every `Linear` of a model on a CPU by a `PackedLinear`; the plain weights are freed.

    A head that is tied to the embedding is copied, since the embedding still needs its rows. Packing twice
    changes nothing more. False, and nothing changed, where packed products do not run.
    """
    if model.device.type != "cpu" or not packed_products_run(model.dtype):
        return False
    parents = [module for module in model.modules() if not isinstance(module, Linear)]  # hold no weight alive
    for module in parents:
        # The packed product adds no bias.
        for name in [
            n for n, child in module.named_children() if isinstance(child, Linear) and child.bias is None
        ]:
            setattr(module, name, PackedLinear(getattr(module, name).weight.detach()))
            give_freed_memory_back()  # each time, so that two copies of the model never exist
    return True


def give_freed_memory_back() -> None:
    """Ask glibc to return freed memory to the system, which it otherwise keeps; elsewhere do nothing."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return


def packed_products_run(dtype: torch.dtype) -> bool:
    """Whether a packed product of this dtype runs here and equals the plain one, tried on a small one."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    x = torch.arange(64).reshape(2, 32).remainder(7).to(dtype)  # [2, 32], small integers: exact in any order
    weight = torch.arange(512).reshape(16, 32).remainder(5).to(dtype)
    try:
        return torch.equal(PackedLinear(weight)(x), x @ weight.T)
    except (AttributeError, RuntimeError):
        return False
