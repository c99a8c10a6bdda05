"""Attention over the paged cache: one interface, three backends."""

from minipaged.attention.backend import AttentionBackend, get_backend
from minipaged.attention.batch import AttentionBatch

__all__ = ["AttentionBackend", "AttentionBatch", "get_backend"]
