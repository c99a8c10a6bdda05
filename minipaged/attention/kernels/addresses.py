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
def look_up_blocks(block_table_ptr, positions, end, BLOCK_SIZE: tl.constexpr):
    """Block ids of `positions`. Nothing is looked up for positions from `end` on: the table ends there."""
    return tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def slot_offsets(blocks, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Offsets in elements, int64, of the cache rows of `positions`, which lie in `blocks`.

    The block id is widened before it is multiplied: id times stride passes 2**31 in any large pool.
    """
    return blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot
