"""Quantised keys and values: one float32 scale per token and head.

A scale that belongs to one written row never has to change later, so a token that is written after it
cannot make the stored ones less exact, and the scale moves with its slot through copies and swaps.
"""

import torch
from torch import Tensor

from minipaged.dtypes import LARGEST


def is_quantized(dtype: torch.dtype) -> bool:
    return dtype in LARGEST


def quantize_rows(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension of `rows` [..., head_size] to int8 or float8_e4m3fn.

    Returns (values [..., head_size] of `dtype`, scales [...] float32). Without `scale` each row is scaled
    so that its largest magnitude just fits; a row of zeros gets the scale 1. With a given `scale` [...],
    values that do not fit saturate. Integers are rounded to the nearest, ties to even.

    Raises ValueError for any other dtype.
    """
    if dtype not in LARGEST:
        raise ValueError(f"cannot quantise to {dtype}, only to {', '.join(map(str, LARGEST))}")
    largest = LARGEST[dtype]
    rows = rows.float()
    if scale is None:
        scale = rows.abs().amax(dim=-1) / largest
        scale = torch.where(scale > 0, scale, 1.0)
    scaled = (rows / scale[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantize_rows`: values [..., head_size] times scale [...], as `dtype`."""
    return (values.float() * scale[..., None]).to(dtype)
