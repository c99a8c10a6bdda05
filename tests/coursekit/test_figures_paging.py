import pytest

from coursekit.figures import block_size_tradeoff, blocks_and_table, table_growing


def artists(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def is_white(mark):
    return mark.get_facecolor() == (1, 1, 1, 1)


def growing(num_tokens=6):
    return table_growing([3, 1], num_tokens=num_tokens, block_size=4, num_blocks=5, others={0: 4, 2: 1})


def test_a_growing_table_fills_the_slots_of_its_tokens_and_no_others():
    marks = artists(growing())
    slots = {(block, offset): marks[f"slot:{block}:{offset}"] for block in range(5) for offset in range(4)}
    filled = {place for place, mark in slots.items() if not is_white(mark)}
    mine = {(3, 0), (3, 1), (3, 2), (3, 3), (1, 0), (1, 1)}
    assert filled == mine | {(0, 0), (0, 1), (0, 2), (0, 3), (2, 0)}
    [blue] = {slots[place].get_facecolor() for place in mine}
    assert blue not in {slots[place].get_facecolor() for place in filled - mine}


def test_a_growing_table_writes_each_position_left_and_in_the_pool():
    said = words(growing())
    assert all(said.count(str(position)) >= 2 for position in (4, 5))
    assert "6" not in said


def test_a_growing_table_joins_each_entry_to_the_row_of_its_block():
    marks = artists(growing())
    assert {gid for gid in marks if gid.startswith("join:")} == {"join:0:3", "join:1:1"}
    for logical, block in ((0, 3), (1, 1)):
        start, end = marks[f"join:{logical}:{block}"].get_xydata()
        entry, slot = marks[f"entry:{logical}"], marks[f"slot:{block}:0"]
        assert start[0] == pytest.approx(entry.get_x() + entry.get_width()) and end[0] == slot.get_x()
        assert entry.get_y() < start[1] < entry.get_y() + entry.get_height()
        assert slot.get_y() < end[1] < slot.get_y() + slot.get_height()


def test_the_newest_token_has_a_frame():
    marks = artists(growing())
    thick = {gid for gid, mark in marks.items() if gid.startswith("slot") and mark.get_linewidth() > 1}
    assert thick == {"slot:1:1"}


def test_a_growing_table_refuses_more_tokens_than_it_has_room_for():
    with pytest.raises(ValueError, match="9 tokens do not fit 2 blocks of 4"):
        growing(num_tokens=9)


def test_block_size_tradeoff_shows_what_it_is_given():
    holds = {"chats": {1: 1.0, 16: 0.98, 256: 0.79}, "instructions": {1: 1.0, 16: 0.92, 256: 0.33}}
    entries = {"chats": {1: 500.0, 16: 32.0, 256: 2.5}, "instructions": {1: 84.0, 16: 5.8, 256: 1.1}}
    marks = artists(block_size_tradeoff(holds, entries))
    for name in holds:
        assert dict(marks[f"holds:{name}"].get_xydata()) == pytest.approx(
            {size: 100 * share for size, share in holds[name].items()}
        )
        assert dict(marks[f"entries:{name}"].get_xydata()) == pytest.approx(entries[name])


def test_the_number_of_a_block_can_be_read_however_full_it_is():
    """White on blue, grey on white: a nearly empty block has its number on white."""
    for num_tokens, color in ((8, "white"), (5, "#757575")):
        figure = blocks_and_table([5, 2], num_tokens=num_tokens, block_size=4, num_blocks=8, max_model_len=32)
        [number] = [t for t in figure.axes[1].texts if t.get_text() == "2" and t.get_fontsize() < 9]
        assert number.get_color() == color
