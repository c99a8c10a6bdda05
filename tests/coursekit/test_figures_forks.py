import pytest

from coursekit.figures.forks import ForkState, blocks_saved_by_n, forked_tables

BEFORE = ForkState("before", [0, 1], [0, 1], [2, 2, 0], {0: list("abcd"), 1: list("ef"), 2: list("old")})
AFTER = ForkState("after", [0, 1], [0, 2], [2, 1, 1], {0: list("abcd"), 1: list("ef"), 2: list("efg")})


def artists(figure):
    return {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_both_tables_are_joined_to_their_blocks_before_and_after():
    marks = artists(forked_tables([BEFORE, AFTER], block_size=4))
    joins = {gid for gid in marks if ":join:" in gid}
    assert joins == {
        *("0:join:parent:0:0", "0:join:parent:1:1", "0:join:child:0:0", "0:join:child:1:1"),
        *("1:join:parent:0:0", "1:join:parent:1:1", "1:join:child:0:0", "1:join:child:1:2"),
    }
    for gid in joins:
        panel, _, name, index, block = gid.split(":")
        start, end = marks[gid].get_xydata()
        entry, slot = marks[f"{panel}:{name}:{index}:{block}"], marks[f"{panel}:slot:{block}:0"]
        assert entry.get_y() < start[1] < entry.get_y() + entry.get_height()
        assert slot.get_y() < end[1] < slot.get_y() + slot.get_height()


def test_shared_private_and_free_blocks_have_three_colours():
    marks = artists(forked_tables([BEFORE, AFTER], block_size=4))
    shared, private, free = (marks[f"{g}:0"].get_facecolor() for g in ("0:slot:1", "1:slot:1", "0:slot:2"))
    assert len({shared, private, free}) == 3 and free == (1, 1, 1, 1)
    assert marks["1:slot:2:0"].get_facecolor() == private


def test_words_and_reference_counts_are_written_and_a_free_block_shows_nothing_old():
    left, right = forked_tables([BEFORE, AFTER], block_size=4).axes
    assert "block 1: 2 references" in words(left) and "block 1: 1 reference" in words(right)
    assert "block 2: free" in words(left) and "o" not in words(left)
    assert words(right).count("e") == 2 and words(right).count("g") == 1


def test_an_entry_outside_the_pool_is_refused():
    with pytest.raises(ValueError, match="block 3 is not one of 3"):
        forked_tables([ForkState("", [3], [], [0, 0, 0])], block_size=4)


def test_blocks_saved_shows_what_it_is_given():
    ours = {"chats": {2: 13.0, 4: 20.0, 6: 22.0}, "instructions": {2: 5.0, 4: 8.0, 6: 9.0}}
    paper = {"chats": {2: 16.2, 6: 30.5}}
    marks = artists(blocks_saved_by_n({"samples": (ours, paper)}))
    for name, line in ours.items():
        assert dict(marks[f"samples:ours:{name}"].get_xydata()) == line
    assert dict(marks["samples:paper:chats"].get_xydata()) == paper["chats"]
