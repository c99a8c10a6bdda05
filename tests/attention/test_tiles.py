"""The pure functions that choose tiles: whatever the card and the model, what they choose must compile."""

import pytest

from minipaged.attention.kernels.arguments import SHORTEST_PART, decode_tile, prefill_tile
from minipaged.attention.targets import TARGETS

HEAD_SIZES = [16, 48, 64, 80, 96, 112, 128, 192, 256]


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_are_powers_of_two_that_hold_their_heads(target, itemsize):
    for head_size in HEAD_SIZES:
        for group in (1, 3, 8, 32):
            tiles = [decode_tile(target, group, head_size, itemsize)]
            tiles += [
                prefill_tile(target, group, head_size, itemsize, quantized) for quantized in (False, True)
            ]
            for tile in tiles:
                assert is_power_of_two(tile.rows) and tile.rows >= max(16, group)
                assert is_power_of_two(tile.keys) and 16 <= tile.keys <= 64
                assert SHORTEST_PART % tile.keys == 0


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_two_decode_programs_share_a_multiprocessor(target):
    """Their tiles of keys and values fit the shared memory twice, so that one computes while one waits."""
    tile = decode_tile(target, 4, 64, 2)
    in_flight = (tile.num_stages - 1) * 2 * tile.keys * 64 * 2
    assert 2 * in_flight <= target.shared_memory
