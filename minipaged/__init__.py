"""minipaged: a small engine that serves language models from a paged KV cache, and the course that builds it.

Importing this package is cheap: the names below are loaded when they are first used, so neither a model,
a GPU nor triton is needed to look around. It comes before torch where both are imported: `threads` says why.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minipaged import threads as threads  # first of all: it sets what torch reads while it is loaded

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "LLM": "minipaged.engine.llm",
    "SamplingParams": "minipaged.sampling_params",
    "BeamSearchParams": "minipaged.sampling_params",
    "RequestOutputKind": "minipaged.sampling_params",
    "Chat": "minipaged.engine.chat",
    "RequestOutput": "minipaged.engine.output_processor",
    "CompletionOutput": "minipaged.engine.output_processor",
    "ModelConfig": "minipaged.config",
    "CacheConfig": "minipaged.config",
    "EngineConfig": "minipaged.config",
    "KVSpec": "minipaged.memory",
    "BlockPool": "minipaged.cache.block_pool",
    "BlockTable": "minipaged.cache.block_table",
    "KVStorage": "minipaged.cache.storage",
    "AttentionBatch": "minipaged.attention.batch",
    "load_model": "minipaged.checkpoints.loading",
}

if TYPE_CHECKING:
    from minipaged.attention.batch import AttentionBatch as AttentionBatch
    from minipaged.cache.block_pool import BlockPool as BlockPool
    from minipaged.cache.block_table import BlockTable as BlockTable
    from minipaged.cache.storage import KVStorage as KVStorage
    from minipaged.checkpoints.loading import load_model as load_model
    from minipaged.config import CacheConfig as CacheConfig
    from minipaged.config import EngineConfig as EngineConfig
    from minipaged.config import ModelConfig as ModelConfig
    from minipaged.engine.chat import Chat as Chat
    from minipaged.engine.llm import LLM as LLM
    from minipaged.engine.output_processor import CompletionOutput as CompletionOutput
    from minipaged.engine.output_processor import RequestOutput as RequestOutput
    from minipaged.memory import KVSpec as KVSpec
    from minipaged.sampling_params import BeamSearchParams as BeamSearchParams
    from minipaged.sampling_params import RequestOutputKind as RequestOutputKind
    from minipaged.sampling_params import SamplingParams as SamplingParams

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
