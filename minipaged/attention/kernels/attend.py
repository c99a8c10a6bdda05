"""One program's attention: a tile of query rows against a range of keys of one sequence and KV head.

The softmax is taken in one pass. For every query row the program keeps the largest score so far, the sum of
the weights exp(score - largest) and the weighted sum of the values; a larger score rescales what came before.
exp(x) is computed as exp2(x * log2(e)), with log2(e) folded into the scale of the scores.

Sources: Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1.
"""

import triton
import triton.language as tl

from minipaged.attention.kernels.addresses import look_up_blocks, slot_offsets


@triton.jit
def attend_keys(
    query,  # [ROWS, HEAD_PADDED], in the dtype COMPUTE
    visible,  # [ROWS]: row r sees the keys at positions below visible[r]
    first_key,  # the range of positions to attend to, a multiple of TILE
    end_key,
    block_table_ptr,  # this sequence's row of the table
    kv_head,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,  # None where keys and values are not quantised
    value_scale_ptr,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Returns the largest score and the sum of weights [ROWS], the weighted values [ROWS, HEAD_PADDED]."""
    dims = tl.arange(0, query.shape[1])
    lanes = tl.arange(0, TILE)
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros(query.shape, tl.float32)
    # The blocks of a tile are looked up one tile ahead. An address that hangs on a load of the same iteration
    # would keep the compiler from starting the loads of keys and values early.
    blocks = look_up_blocks(block_table_ptr, first_key + lanes, end_key, BLOCK_SIZE)
    for tile in range(first_key, end_key, TILE):
        positions = tile + lanes
        next_blocks = look_up_blocks(block_table_ptr, positions + TILE, end_key, BLOCK_SIZE)
        live = positions < end_key
        loaded = live[:, None] & (dims < HEAD_SIZE)[None, :]
        slots = slot_offsets(blocks, positions, stride_block, stride_slot, BLOCK_SIZE)
        offsets = slots[:, None] + kv_head * stride_head + dims[None, :]  # [TILE, HEAD_PADDED]

        key = tl.load(key_cache_ptr + offsets, mask=loaded, other=0.0).to(COMPUTE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * log2_scale  # [ROWS, TILE]
        if key_scale_ptr is not None:
            scales = (
                slot_offsets(blocks, positions, stride_scale_block, stride_scale_slot, BLOCK_SIZE) + kv_head
            )
            scores *= tl.load(key_scale_ptr + scales, mask=live, other=0.0)[None, :]
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]

        # Masked as well: a weight of 0 times a NaN from an unused slot would be NaN.
        value = tl.load(value_cache_ptr + offsets, mask=loaded, other=0.0).to(COMPUTE)
        if value_scale_ptr is not None:
            # The weights are scaled instead of the values, relative to the tile's largest scale: the bare
            # products could underflow in float16. A scale is never 0, but a foreign cache may hold one.
            value_scale = tl.load(value_scale_ptr + scales, mask=live, other=0.0)
            largest = tl.maximum(tl.max(value_scale, axis=0), 1e-30)
            weights *= (value_scale / largest)[None, :]
            acc += tl.dot(weights.to(COMPUTE), value, input_precision="ieee") * largest
        else:
            acc = tl.dot(weights.to(COMPUTE), value, acc, input_precision="ieee")
        maximum = new_maximum
        blocks = next_blocks
    return maximum, total, acc


@triton.jit
def normalise(acc, total):
    """Weighted values over the sum of weights; 0 for a row that saw no key."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
