"""Where the keys of a tile lie: address arithmetic shared by the kernels.

A program walks over the keys of a sequence in tiles of TILE positions. Tile and block are independent: every
lane of a tile looks its own block up, so any block size goes with any tile.

    block size 4, block table [7, 2]            position   0  1  2  3  4  5
    a tile of 8 lanes, 6 of them live           block      7  7  7  7  2  2
                                                slot      28 29 30 31  8  9
"""

import triton
import triton.language as tl


@triton.jit
def lanes_below(lanes, limit, NEEDED: tl.constexpr):
    """Which lanes lie below `limit`. Say NEEDED=False where all do: the mask is then a constant, and the
    compiler drops it from the loads."""
    if NEEDED:
        return lanes < limit
    else:
        return tl.full(lanes.shape, True, tl.int1)


@triton.jit
def slot_offsets(block_table_ptr, positions, live, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Offsets in elements, int64, of the cache rows of `positions`. Lanes that are not live look nothing up.

    The block id is widened before it is multiplied: id times stride passes 2**31 in any large pool.
    """
    blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=live, other=0)
    return blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot
