import pytest

from coursekit.figures.style import BLUE, GREY, PALE
from coursekit.figures.tiles import program_grid, tile_through_table

TABLE = [7, 2, 4, 0, 5]
COLORS = {tuple(int(shade[i : i + 2], 16) for i in (1, 3, 5)): shade for shade in (BLUE, GREY, PALE)}


def marks_of(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def color_of(mark):
    return COLORS[tuple(round(255 * part) for part in mark.get_facecolor()[:3])]


def grid():
    return marks_of(program_grid([5, 16, 37], num_heads=6, queries_per_kv=3, tile=16, chosen=(2, 4)))


def draw_tile(first_key):
    return marks_of(
        tile_through_table(TABLE, context_len=18, block_size=4, tile=8, first_key=first_key, num_blocks=9)
    )


def test_each_program_walks_over_as_many_tiles_as_its_sequence_has():
    tiles = [gid for gid in grid() if gid.startswith("tile:")]
    assert {gid for gid in tiles if gid.startswith("tile:2:4:")} == {f"tile:2:4:{i}" for i in range(3)}
    assert len(tiles) == 6 * (1 + 1 + 3)


def test_a_tile_is_as_long_as_its_live_lanes():
    assert [grid()[f"tile:{name}"].get_width() for name in ("0:0:0", "1:0:0", "2:3:1", "2:3:2")] == [
        5,
        16,
        16,
        5,
    ]


def test_only_the_chosen_program_is_blue():
    blue = {gid for gid, mark in grid().items() if gid.startswith("tile:") and color_of(mark) == BLUE}
    assert blue == {f"tile:2:4:{i}" for i in range(3)}


def test_heads_that_share_a_kv_head_stand_over_its_line():
    marks = grid()
    for kv_head, heads in ((0, (0, 1, 2)), (1, (3, 4, 5))):
        left, right = marks[f"reads:{kv_head}"].get_xdata()
        over = [head for head in range(6) if left <= marks[f"tile:1:{head}:0"].get_x() < right]
        assert over == list(heads)


@pytest.mark.parametrize(
    ("first_key", "slots"),
    [
        (0, [28, 29, 30, 31, 8, 9, 10, 11]),
        (8, [16, 17, 18, 19, 0, 1, 2, 3]),
        (16, [20, 21]),
    ],
)
def test_exactly_the_slots_of_the_live_lanes_are_blue(first_key, slots):
    marks = draw_tile(first_key)
    blue = {gid for gid, mark in marks.items() if gid.startswith("slot:") and color_of(mark) == BLUE}
    assert blue == {f"slot:{slot}" for slot in slots}
    lanes = [mark for gid, mark in marks.items() if gid.startswith("lane:")]
    assert [color_of(mark) for mark in lanes].count(BLUE) == len(slots) and len(lanes) == 8


def test_the_rest_of_the_sequence_is_grey():
    marks = draw_tile(16)
    grey = {gid for gid, mark in marks.items() if gid.startswith("slot:") and color_of(mark) == GREY}
    assert len(grey) == 16 and "slot:22" not in grey


def test_an_entry_is_looked_up_if_and_only_if_a_lane_needs_it():
    marks = draw_tile(16)
    assert {gid for gid in marks if gid.startswith("look up:")} == {"look up:4"}
    assert {gid for gid in marks if gid.startswith("read:")} == {"read:4:5"}
    assert color_of(marks["entry:4"]) == BLUE and color_of(marks["entry:0"]) == GREY


def test_lines_run_from_lanes_to_entry_to_block():
    marks = draw_tile(0)
    down, on = marks["look up:1"], marks["read:1:2"]
    assert down.xy2[0] == on.xy1[0]
    assert marks["lane:4"].get_x() < down.xy1[0] < marks["lane:7"].get_x() + 1
    assert marks["slot:8"].get_x() < on.xy2[0] < marks["slot:11"].get_x() + 1
