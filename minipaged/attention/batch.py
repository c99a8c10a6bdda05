"""AttentionBatch: everything one step of attention has to know about its sequences.

The queries of all sequences lie end to end in one tensor, without padding. For each sequence the
batch says where its queries are, how many keys it can see, and in which blocks of the cache they lie:

    three sequences, block size 4             query_start   [0, 1, 4, 6]
      A decodes its 6th token                 context_lens  [6, 3, 9]
      B prefills 3 tokens                     block_tables  [[7, 2, -], [5, -, -], [0, 9, 4]]
      C prefills its last 2 of 9 tokens       slot_mapping  [9,  20, 21, 22,  39, 16]

A's 6th token is at position 5: block 5 // 4 = 1 of its table is physical block 2, and the slot is
2 * 4 + 5 % 4 = 9.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from minipaged.cache.storage import LayerKV

LAYOUT = (
    ("query_start", torch.int32),
    ("context_lens", torch.int32),
    ("block_tables", torch.int32),
    ("slot_mapping", torch.int64),
    ("positions", torch.int64),
)


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step of attention; the only thing that tells a backend about it.

    The three integers are kept on the host so that a kernel launch never waits for the device. A batch
    describes one step: make a new one for the next step, because backends remember what they derived from it.
    """

    query_start: Tensor
    """int32 [num_seqs + 1]: sequence i has the query rows query_start[i] to query_start[i + 1]."""
    context_lens: Tensor
    """int32 [num_seqs]: keys of each sequence, those written in this step included."""
    block_tables: Tensor
    """int32 [num_seqs, max_blocks]: physical block ids; entries after the last live block are never read."""
    slot_mapping: Tensor
    """int64 [num_tokens]: the slot (block * block_size + offset) each new key and value is written to."""
    positions: Tensor
    """int64 [num_tokens]: position of each query token in its sequence."""
    block_size: int
    max_query_len: int
    max_context_len: int
    num_blocks_named: int | None = None
    """Blocks that a cache must have: one more than the highest id named, by a table or a slot.

    None: found from the tensors, for which a device is waited for. Whoever gives it vouches for them."""

    def __post_init__(self) -> None:
        """Kernels read these tensors through bare addresses: another layout would be garbage to them, and an
        id that no cache has would lead them anywhere. Raises ValueError."""
        for name, dtype in LAYOUT:
            tensor = getattr(self, name)
            if tensor.dtype is not dtype or not (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1):
                raise ValueError(
                    f"{name} is {tensor.dtype} with strides {tensor.stride()}, "
                    f"it must be {dtype} with dense rows"
                )
        self._check_shapes()
        if self.num_blocks_named is None:
            object.__setattr__(self, "num_blocks_named", self._check())

    def _check_shapes(self) -> None:
        num_seqs, num_tokens = self.context_lens.shape[0], self.slot_mapping.shape[0]
        shapes = {
            "query_start": (num_seqs + 1,),
            "context_lens": (num_seqs,),
            "block_tables": (num_seqs, *self.block_tables.shape[1:2]),
            "slot_mapping": (num_tokens,),
            "positions": (num_tokens,),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} has shape {list(getattr(self, name).shape)}, for {num_seqs} sequences and "
                    f"{num_tokens} tokens it must be {list(shape)}"
                )
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, the least allowed is 1")
        room = self.block_tables.shape[1] * self.block_size
        if self.max_context_len > room:
            raise ValueError(f"max_context_len is {self.max_context_len}, the block tables hold {room}")

    def _check(self) -> int:
        """The blocks that a cache must have; ValueError for numbers that contradict each other."""
        starts, lengths = self.query_start.tolist(), self.context_lens.tolist()
        queries = [last - first for first, last in pairwise(starts)]
        if starts[0] != 0 or starts[-1] != self.num_tokens or min(queries, default=0) < 0:
            raise ValueError(f"query_start is {starts}, it must rise from 0 to {self.num_tokens}, the tokens")
        for name, most, values in (
            ("max_query_len", self.max_query_len, queries),
            ("max_context_len", self.max_context_len, lengths),
        ):
            if max(values, default=0) > most or min(values, default=0) < 0:
                raise ValueError(f"{name} is {most}, the lengths are {values}")
        require_tables(self, 2**31)  # no negative ids
        columns = torch.arange(self.block_tables.shape[1], device=self.block_tables.device) * self.block_size
        live = self.block_tables[columns < self.context_lens[:, None]]  # what is beyond is never read
        highest_slot = int(self.slot_mapping.max()) if self.num_tokens else -1
        return max(int(live.max()) if live.numel() else -1, highest_slot // self.block_size) + 1

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether no sequence brings more than one query token."""
        return self.max_query_len <= 1

    def decoding_sequences(self) -> Tensor:
        """int64 [num_decodes]: the sequences with one query token that sees a key."""
        query_lens = self.query_start.diff()  # [num_seqs]
        return torch.nonzero((query_lens == 1) & (self.context_lens > 0)).flatten()

    @classmethod
    def build(
        cls,
        block_lists: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionBatch":
        """Make a batch from plain lists, one entry per sequence.

        The last `query_lens[i]` of the `context_lens[i]` tokens of sequence i are the ones computed in this
        step; `block_lists[i]` holds the ids of its blocks and may be longer than needed.

        Raises ValueError when the lists differ in length, a sequence has more queries than keys, its blocks
        cannot hold its keys, or an id is no block's.
        """
        if not len(block_lists) == len(query_lens) == len(context_lens):
            raise ValueError(
                f"{len(block_lists)} block lists, {len(query_lens)} query lengths and "
                f"{len(context_lens)} context lengths do not describe the same sequences"
            )
        for i, (blocks, queries, keys) in enumerate(zip(block_lists, query_lens, context_lens, strict=True)):
            if not 0 <= queries <= keys:
                raise ValueError(f"sequence {i} has {queries} queries and {keys} keys")
            if keys > len(blocks) * block_size:
                raise ValueError(
                    f"sequence {i} has {keys} keys, its {len(blocks)} blocks hold {len(blocks) * block_size}"
                )
            for block in blocks[: -(-keys // block_size)]:  # those beyond are never read
                if not 0 <= block < 2**31:
                    raise ValueError(f"sequence {i} has the block id {block}, ids are 0 to {2**31 - 1}")
        tables = np.zeros((len(block_lists), max(map(len, block_lists), default=0)), dtype=np.int32)
        for row, blocks in zip(tables, block_lists, strict=True):
            row[: len(blocks)] = blocks
        query, context = np.array(query_lens, dtype=np.int64), np.array(context_lens, dtype=np.int64)
        query_start = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
        positions, slots = new_token_slots(tables, query, context, block_size)

        def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(device=device, dtype=dtype)

        return cls(
            query_start=on_device(query_start, torch.int32),
            context_lens=on_device(context, torch.int32),
            block_tables=on_device(tables, torch.int32),
            slot_mapping=on_device(slots, torch.int64),
            positions=on_device(positions, torch.int64),
            block_size=block_size,
            max_query_len=max(query_lens, default=0),
            max_context_len=max(context_lens, default=0),
        )


def new_token_slots(
    block_tables: np.ndarray, query_lens: np.ndarray, context_lens: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and cache slots of the tokens a step computes.

    `block_tables` [num_seqs, max_blocks], `query_lens` and `context_lens` [num_seqs]; the new tokens of a
    sequence are its last ones. Returns two int64 arrays [num_tokens], without a Python loop over tokens.
    """
    owner = np.repeat(np.arange(len(query_lens)), query_lens)  # [num_tokens], the sequence of each token
    ahead = context_lens - np.cumsum(query_lens)  # [num_seqs], of a position against its row of the batch
    positions = np.arange(len(owner)) + ahead[owner]
    index, offset = np.divmod(positions, block_size)
    return positions, block_tables[owner, index].astype(np.int64) * block_size + offset


def require_matching(query: Tensor, layer: "LayerKV", batch: AttentionBatch) -> None:
    """Raise ValueError, with both numbers, unless query, cache and batch fit together."""
    num_blocks, block_size, num_kv_heads, head_size = layer.key.shape
    if query.shape[2] != head_size:
        raise ValueError(f"the query's head size is {query.shape[2]}, the cache's {head_size}")
    if batch.block_size != block_size:
        raise ValueError(f"the batch's block size is {batch.block_size}, the cache's {block_size}")
    if query.shape[0] != batch.num_tokens:
        raise ValueError(f"the query has {query.shape[0]} rows, the batch {batch.num_tokens} tokens")
    require_blocks(batch, num_blocks)
    queries_per_kv(query.shape[1], num_kv_heads)


def require_blocks(batch: AttentionBatch, num_blocks: int) -> None:
    """Raise ValueError when the batch names a block that a cache of `num_blocks` does not have."""
    if batch.num_blocks_named is not None and batch.num_blocks_named > num_blocks:
        require_tables(batch, num_blocks)  # says where; if no table does, a slot does
        raise ValueError(
            f"the batch names block {batch.num_blocks_named - 1}, the cache has blocks 0 to {num_blocks - 1}"
        )


def require_tables(batch: AttentionBatch, num_blocks: int) -> None:
    """Raise ValueError, naming sequence, entry and limit, unless each entry of a table that a kernel would
    read is a block of a cache of `num_blocks`, and each table long enough. A device is waited for.

    Whoever built the batch may have vouched for it; a kernel that reads through bare addresses asks again.
    """
    tables, lengths = batch.block_tables.numpy(force=True), batch.context_lens.numpy(force=True)
    room = tables.shape[1] * batch.block_size
    if len(lengths) and lengths.max() > room:
        seq = int(lengths.argmax())
        raise ValueError(f"sequence {seq} has {lengths[seq]} keys, its block table holds {room}")
    outside = tables.view(np.uint32) >= num_blocks  # a negative id, read without sign, is far outside
    if not outside.any():
        return
    outside &= np.arange(tables.shape[1]) * batch.block_size < lengths[:, None]  # the rest is never read
    if outside.any():
        seq, entry = np.argwhere(outside)[0]
        raise ValueError(
            f"sequence {seq} names block {tables[seq, entry]}, the cache has blocks 0 to {num_blocks - 1} "
            f"(entry {entry} of its block table)"
        )


def require_slots(layer: "LayerKV", slot_mapping: Tensor) -> None:
    """Raise IndexError for a slot beyond the cache, before anything is written. A device is waited for."""
    num_slots = layer.key.shape[0] * layer.key.shape[1]
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        raise IndexError(
            f"slot {int(slot_mapping.max())} is to be written, the cache has 0 to {num_slots - 1}"
        )


def queries_per_kv(num_query_heads: int, num_kv_heads: int) -> int:
    """Query heads that share one key/value head. Raises ValueError when the heads do not divide evenly."""
    if num_kv_heads < 1 or num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    return num_query_heads // num_kv_heads
