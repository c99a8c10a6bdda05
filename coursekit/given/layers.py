"""What lessons about kernels run on: a layer with sequences in given blocks, and decode cut into parts."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from minipaged import AttentionBatch, KVSpec, KVStorage
from minipaged.cache.storage import LayerKV


def written_layer(
    spec: KVSpec,
    num_blocks: int,
    block_size: int,
    block_lists: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    generator: Generator,
) -> LayerKV:
    """The first layer of a new pool, with random keys and values of each sequence in its blocks.

    All other slots hold NaN, so that a kernel that reads one of them shows it in its output.

    Args:
        spec: shapes and dtype; float32 on the CPU for a kernel that is interpreted.
        num_blocks: of the pool.
        block_size: tokens a block.
        block_lists: blocks of each sequence, in the order of its tokens.
        context_lens: tokens of each sequence.
        generator: where the numbers come from, standard normal.
    """
    storage = KVStorage(spec, num_blocks, block_size)
    for tensor in storage.tensors:
        tensor.fill_(torch.nan)
    layer = storage.layer(0)
    batch = AttentionBatch.build(block_lists, context_lens, context_lens, block_size)
    shape = (2, sum(context_lens), spec.num_kv_heads, spec.head_size)
    layer.write(batch.slot_mapping, *torch.randn(shape, generator=generator))
    return layer


def decode_in_parts(
    query: Tensor, layer: LayerKV, batch: AttentionBatch, scale: float, part_len: int
) -> Tensor:
    """Decode attention with every context cut into parts of `part_len` keys: `decode_split`, then the sum.

    What the parts store begins as NaN, so an entry that is read and was never written shows in the output.

    Args:
        query: [num_seqs, num_query_heads, head_size] float32 on the CPU.
        layer: keys and values.
        batch: one new token for each sequence.
        scale: of the scores.
        part_len: a multiple of 16.
    """
    from minipaged.attention.kernels.arguments import Tile
    from minipaged.attention.kernels.decode_combine import decode_combine_launch
    from minipaged.attention.kernels.decode_split import decode_split_launch

    num_seqs, heads, size = query.shape
    parts = -(-int(batch.context_lens.max()) // part_len)
    average = torch.full((num_seqs, heads, parts, size), torch.nan)
    log_sum_exp = torch.full((num_seqs, heads, parts), torch.nan)
    output = torch.full_like(query, torch.nan)
    tile = Tile(rows=16, keys=16, num_warps=4, num_stages=2)
    split = (average, log_sum_exp, query, layer, batch, scale)
    decode_split_launch(*split, part_len=part_len, tile=tile).run()
    decode_combine_launch(output, average, log_sum_exp, batch, part_len=part_len).run()
    return output
