"""Attention over the paged cache: one interface, and the backend that serves a device."""

import importlib.util
import warnings

import torch

from minipaged.attention.backend import AttentionBackend
from minipaged.attention.batch import AttentionBatch

__all__ = ["AttentionBackend", "AttentionBatch", "get_backend"]

BACKENDS = ("auto", "torch", "triton", "reference")


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> AttentionBackend:
    """The backend called `name` for tensors on `device`.

    "auto" is Triton on a GPU and plain torch elsewhere; a GPU without Triton gets torch and one warning. On a
    CPU `minipaged.cpu.accelerate` may put faster code in the place of plain torch.
    Raises ValueError for an unknown name and for a device the backend cannot serve, ImportError when
    "triton" is asked for by name and is not installed.
    """
    device = torch.device(device)
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is none of {', '.join(BACKENDS)}")
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
        if name == "triton" and importlib.util.find_spec("triton") is None:
            warnings.warn("triton is not installed: attention runs in plain torch, slower", stacklevel=2)
            name = "torch"
    if name == "reference":
        from minipaged.attention.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "torch":
        from minipaged.attention.torch_backend import TorchBackend

        return TorchBackend()
    if importlib.util.find_spec("triton") is None:
        raise ImportError("attention backend 'triton' needs the triton package: pip install triton")
    from minipaged.attention.triton_backend import TritonBackend

    return TritonBackend(device)
