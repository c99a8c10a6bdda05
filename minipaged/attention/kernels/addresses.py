"""Where a tile lies in the cache and in the batch: address arithmetic shared by the kernels.

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

    Ids are widened before they are multiplied: id times stride passes 2**31 in any large pool.
    """
    return blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE).to(tl.int64) * stride_slot


@triton.jit
def sequence_of_tile(query_start_ptr, tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence that owns a tile of TOKENS query tokens, by binary search in int32 [num_seqs + 1].

    Sequence i starts with tile query_start[i] // TOKENS + i. That leaves room for its last, partly filled
    tile, and some tiles without tokens, whose programs end at once:

        8 tokens per tile    query lengths 20, 1, 9    query_start 0, 20, 21, 30    first tiles 0, 3, 4
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1
