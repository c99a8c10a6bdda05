"""WasteReport: six kinds that add up to the budget, for strips and for blocks."""

import pytest

from coursekit.contiguous import ContiguousArena
from coursekit.waste import WasteReport
from minipaged.cache import BlockPool, BlockTable, hash_blocks
from tests.coursekit.waste_oracle import Strip, waste_of_strips, waste_of_tables

BYTES = 7  # per token; odd on purpose


def kinds(report: WasteReport) -> list[int]:
    assert sum(report.kinds.values()) == report.budget
    assert sum(report.shares.values()) == pytest.approx(1)
    return list(report.kinds.values())


def test_a_report_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="the kinds add up to 9 bytes, the budget is 10"):
        WasteReport(10, 4, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"must not be negative: \{'free': -1\}"):
        WasteReport(10, 7, 1, 1, 1, 1, -1)


def test_strips_split_into_used_to_come_and_never():
    arena = ContiguousArena(100)
    for size in (40, 20):
        arena.allocate(size)
    report = waste_of_strips(arena, [Strip(40, 5, 30), Strip(20, 20, 20)], BYTES)
    assert kinds(report) == [BYTES * n for n in (25, 25, 10, 0, 0, 40)]
    assert report.share_of_taken == pytest.approx(25 / 60)


def test_a_hole_is_external_waste_when_the_next_request_does_not_fit_in_it():
    arena = ContiguousArena(100)
    starts = [arena.allocate(25) for _ in range(4)]
    arena.free(starts[0])
    arena.free(starts[2])
    strips = [Strip(25, 25, 25)] * 2
    assert kinds(waste_of_strips(arena, strips, BYTES, next_size=26))[4:] == [BYTES * 50, 0]
    assert kinds(waste_of_strips(arena, strips, BYTES, next_size=25))[4:] == [0, BYTES * 50]
    assert kinds(waste_of_strips(arena, strips, BYTES))[4:] == [0, BYTES * 50]


def test_bytes_of_the_budget_that_make_no_slot_are_external():
    arena = ContiguousArena(10)
    assert kinds(waste_of_strips(arena, [], BYTES, budget=75)) == [0, 0, 0, 0, 5, 70]
    assert kinds(waste_of_tables([], 2, 4, BYTES, budget=75)) == [0, 0, 0, 0, 75 - 56, 56]


def test_strips_that_are_not_those_of_the_arena_are_refused():
    arena = ContiguousArena(100)
    arena.allocate(40)
    with pytest.raises(ValueError, match=r"reserve \[30\], the arena \[40\]"):
        waste_of_strips(arena, [Strip(30, 1, 2)], BYTES)
    for strip in (Strip(40, 41, 41), Strip(40, 5, 4), Strip(40, -1, 4), Strip(40, 5, 41)):
        with pytest.raises(ValueError, match="num_tokens <= final_tokens <= reserved"):
            waste_of_strips(arena, [strip], BYTES)


def test_blocks_waste_only_after_the_last_token():
    pool = BlockPool(10)
    table = BlockTable(pool, 4)
    table.append(9)
    report = waste_of_tables([table], 10, 4, BYTES)
    assert kinds(report) == [BYTES * n for n in (9, 0, 0, 3, 0, 28)]
    assert report.share_of_taken == 9 / 12


def test_a_shared_block_counts_once():
    pool = BlockPool(10)
    parent = BlockTable(pool, 4)
    parent.append(6)
    tables = [parent, parent.fork(), parent.fork()]
    assert kinds(waste_of_tables(tables, 10, 4, BYTES)) == [BYTES * n for n in (6, 0, 0, 2, 0, 32)]
    tables[1].append(1)
    assert kinds(waste_of_tables(tables, 10, 4, BYTES)) == [BYTES * n for n in (9, 0, 0, 3, 0, 28)]


def test_a_block_holds_what_its_fullest_holder_sees():
    pool = BlockPool(10)
    table = BlockTable(pool, 4)
    table.append(8)
    trimmed = table.fork()
    trimmed.trim(5)
    for tables in ([table, trimmed], [trimmed, table]):
        assert kinds(waste_of_tables(tables, 10, 4, BYTES))[0] == BYTES * 8


def test_a_cached_block_is_free():
    pool = BlockPool(4)
    table = BlockTable(pool, 4)
    table.append(8)
    table.publish(hash_blocks(range(8), 4), 8)
    table.free()
    assert kinds(waste_of_tables([], 4, 4, BYTES)) == [0, 0, 0, 0, 0, BYTES * 16]


def test_nothing_taken_is_nothing_wasted():
    assert waste_of_tables([], 4, 4, BYTES).share_of_taken == 1.0


def test_reports_add_up_over_time():
    a = WasteReport(10, 4, 1, 1, 1, 1, 2)
    b = WasteReport(10, 0, 0, 0, 0, 0, 10)
    assert kinds(a + b) == [4, 1, 1, 1, 1, 12]
    assert (a + b).shares["used"] == 0.2
