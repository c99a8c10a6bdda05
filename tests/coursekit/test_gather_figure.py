from coursekit.figures import gathered_through_table

BLUE = (31 / 255, 95 / 255, 191 / 255, 1.0)


def marks_of(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def test_exactly_the_slots_of_the_sequence_are_live():
    marks = marks_of(gathered_through_table([3, 0], num_tokens=6, block_size=4, num_blocks=5))
    live = {gid for gid, mark in marks.items() if gid.startswith("slot:") and mark.get_facecolor() == BLUE}
    assert live == {f"slot:{slot}" for slot in (12, 13, 14, 15, 0, 1)}
    assert len([gid for gid in marks if gid.startswith("slot:")]) == 20
    assert {gid for gid in marks if gid.startswith("key:")} == {f"key:{i}" for i in range(6)}


def test_each_block_is_joined_to_its_place_in_the_row():
    marks = marks_of(gathered_through_table([3, 0], num_tokens=6, block_size=4, num_blocks=5))
    assert {gid for gid in marks if gid.startswith("join:")} == {"join:3:0", "join:0:1"}
    for block, logical, key in ((3, 0, 0), (0, 1, 4)):
        line, slot, end = marks[f"join:{block}:{logical}"], marks[f"slot:{4 * block}"], marks[f"key:{key}"]
        assert slot.get_x() < line.xy1[0] and end.get_x() < line.xy2[0]
        assert line.xy2[1] == end.get_y()
