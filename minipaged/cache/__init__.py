"""Paged KV memory: the pool of blocks, the tables that point into it, the tensors it manages."""

from minipaged.cache.accounting import Sharing
from minipaged.cache.block_pool import BlockPool
from minipaged.cache.block_table import BlockCopy, BlockTable, append_all, blocks_to_append_all
from minipaged.cache.prefix import PrefixStats, hash_block, hash_blocks, usable_hits
from minipaged.cache.storage import KVStorage, LayerKV
from minipaged.cache.swap import SwapSpace

__all__ = [
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "KVStorage",
    "LayerKV",
    "PrefixStats",
    "Sharing",
    "SwapSpace",
    "append_all",
    "blocks_to_append_all",
    "hash_block",
    "hash_blocks",
    "usable_hits",
]
