"""One program's attention: a tile of query rows against a range of keys of one sequence and KV head.

The softmax is taken in one pass. For every query row the program keeps the largest score so far, the sum of
the weights exp(score - largest) and the weighted sum of the values; a larger score rescales what came before.
exp(x) is computed as exp2(x * log2(e)), with log2(e) folded into the scale of the scores.

Sources: Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1.
"""

import triton
import triton.language as tl

from minipaged.attention.kernels.addresses import lanes_below, slot_offsets


@triton.jit
def attend_keys(
    query,  # [ROWS, HEAD_PADDED], in the dtype COMPUTE
    visible,  # [ROWS]: row r sees the keys at positions below visible[r]
    first_key,  # the range of positions to attend to: from here
    end_unmasked,  # up to here, whole tiles that every row sees
    end_key,  # up to here, tiles that are masked
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
    key_cache_ptr += kv_head * stride_head
    value_cache_ptr += kv_head * stride_head
    if key_scale_ptr is not None:
        key_scale_ptr += kv_head
        value_scale_ptr += kv_head
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros(query.shape, tl.float32)
    for tile in range(first_key, end_unmasked, TILE):
        maximum, total, acc = attend_tile(
            query, visible, maximum, total, acc, tile, end_key, block_table_ptr, key_cache_ptr,
            value_cache_ptr, key_scale_ptr, value_scale_ptr, stride_block, stride_slot, stride_scale_block,
            stride_scale_slot, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE, COMPUTE, MASKED=False,
        )  # fmt: skip
    for tile in range(end_unmasked, end_key, TILE):
        maximum, total, acc = attend_tile(
            query, visible, maximum, total, acc, tile, end_key, block_table_ptr, key_cache_ptr,
            value_cache_ptr, key_scale_ptr, value_scale_ptr, stride_block, stride_slot, stride_scale_block,
            stride_scale_slot, log2_scale, BLOCK_SIZE, HEAD_SIZE, TILE, COMPUTE, MASKED=True,
        )  # fmt: skip
    return maximum, total, acc


@triton.jit
def attend_tile(
    query, visible, maximum, total, acc, first_key, end_key, block_table_ptr, key_cache_ptr,
    value_cache_ptr, key_scale_ptr, value_scale_ptr, stride_block, stride_slot, stride_scale_block,
    stride_scale_slot, log2_scale, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the tile of keys that starts at `first_key` into the running softmax."""
    positions = first_key + tl.arange(0, TILE)
    dims = tl.arange(0, query.shape[1])
    live = lanes_below(positions, end_key, MASKED)
    loaded = live[:, None] & lanes_below(dims, HEAD_SIZE, query.shape[1] > HEAD_SIZE)[None, :]
    slots = slot_offsets(block_table_ptr, positions, live, stride_block, stride_slot, BLOCK_SIZE)
    offsets = slots[:, None] + dims[None, :]  # [TILE, HEAD_PADDED]

    key = tl.load(key_cache_ptr + offsets, mask=loaded, other=0.0).to(COMPUTE)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * log2_scale  # [ROWS, TILE]
    if key_scale_ptr is not None:
        scales = slot_offsets(
            block_table_ptr, positions, live, stride_scale_block, stride_scale_slot, BLOCK_SIZE
        )
        scores *= tl.load(key_scale_ptr + scales, mask=live, other=0.0)[None, :]
    if MASKED:
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))

    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(maximum - shift)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = acc * rescale[:, None]

    value = tl.load(value_cache_ptr + offsets, mask=loaded, other=0.0).to(COMPUTE)
    if value_scale_ptr is not None:
        # The weights are scaled instead of the values, relative to the tile's largest scale: the bare
        # products could underflow in float16.
        value_scale = tl.load(value_scale_ptr + scales, mask=live, other=0.0)
        largest = tl.max(value_scale, axis=0)
        weights *= (value_scale / largest)[None, :]
        acc += tl.dot(weights.to(COMPUTE), value, input_precision="ieee") * largest
    else:
        acc = tl.dot(weights.to(COMPUTE), value, acc, input_precision="ieee")
    return new_maximum, total, acc


@triton.jit
def normalise(acc, total):
    """Weighted values over the sum of weights; 0 for a row that saw no key."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
