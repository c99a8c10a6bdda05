"""Two samples of one prompt, in memory that another request has used before: do they still agree?"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minipaged import AttentionBatch, KVSpec, KVStorage
from minipaged.attention import get_backend
from minipaged.cache import BlockPool, BlockTable
from minipaged.checkpoints.loading import LoadedModel

BLOCK_SIZE, NUM_BLOCKS = 16, 12
EARLIER = 96
"""Tokens of the request that used the memory before."""


@torch.inference_mode()
def samples_apart(
    loaded: LoadedModel,
    spec: KVSpec,
    ids: Sequence[int],
    length: int,
    copy_blocks: Callable[[KVStorage, list[Any]], None],
) -> float:
    """How far apart two samples are that got the same token after the first `length` tokens of `ids`.

    0 but for rounding errors when blocks are copied as they must be. `copy_blocks(storage, copies)` copies
    them on write. At least 96 tokens, and one more than `length`; raises ValueError for fewer.

    Returns the largest difference of any log-probability.
    """
    if len(ids) < max(EARLIER, length + 1):
        raise ValueError(f"{len(ids)} tokens given, {max(EARLIER, length + 1)} are needed")
    device = next(loaded.model.parameters()).device
    storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, device=device)
    backend = get_backend("torch", device)
    pool = BlockPool(NUM_BLOCKS, enable_prefix_caching=False)

    def step(tables: list[BlockTable], tokens: Sequence[int], new: list[int], seen: list[int]) -> Tensor:
        batch = AttentionBatch.build([table.blocks for table in tables], new, seen, BLOCK_SIZE, device)
        hidden = loaded.model(torch.tensor(tokens, device=device), batch, storage, backend)
        return loaded.model.compute_logits(hidden[-2:]).log_softmax(-1)

    earlier, parent = BlockTable(pool, BLOCK_SIZE), BlockTable(pool, BLOCK_SIZE)
    earlier.append(EARLIER)
    step([earlier], ids[-EARLIER:], [EARLIER], [EARLIER])
    earlier.free()
    parent.append(length)
    step([parent], ids[:length], [length], [length])
    child = parent.fork()
    copies = [*(child.append(1) or ()), *(parent.append(1) or ())]
    copy_blocks(storage, copies)
    both = step([parent, child], [ids[length]] * 2, [1, 1], [length + 1] * 2)
    return float((both[0] - both[1]).abs().max())
