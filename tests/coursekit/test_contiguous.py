"""ContiguousArena and the three rules of reservation."""

import random

import pytest

from coursekit.contiguous import ContiguousArena, reserve


def filled(sizes, *, slots: int = 100, fit: str = "first") -> tuple[ContiguousArena, list[int]]:
    arena = ContiguousArena(slots, fit=fit)
    return arena, [arena.allocate(size) for size in sizes]


@pytest.mark.parametrize(
    ("rule", "prompt", "output", "expected"),
    [
        ("maximum", 10, 25, 2048),
        ("power_of_two", 10, 25, 10 + 32),  # the paper's example
        ("power_of_two", 10, 32, 10 + 32),
        ("power_of_two", 10, 33, 10 + 64),
        ("power_of_two", 10, 1, 10 + 1),
        ("power_of_two", 10, 0, 10),
        ("power_of_two", 1000, 1025, 2048),  # never more than the maximum
        ("oracle", 10, 25, 35),
        ("oracle", 1, 0, 1),
    ],
)
def test_each_rule_reserves_what_it_says(rule, prompt, output, expected):
    assert reserve(rule, prompt, output, 2048) == expected


def test_every_rule_covers_the_need_and_keeps_to_the_maximum():
    for output in range(0, 60):
        for rule in ("maximum", "power_of_two", "oracle"):
            assert 5 + output <= reserve(rule, 5, output, 64) <= 64


@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (5, -1), (10, 55)])
def test_impossible_requests_are_refused(prompt, output):
    with pytest.raises(ValueError, match=f"{prompt} \\+ {output} tokens do not fit max_len 64"):
        reserve("oracle", prompt, output, 64)


def test_an_unknown_rule_or_fit_is_refused():
    with pytest.raises(ValueError, match="reservation rule is 'buddy'"):
        reserve("buddy", 1, 1, 8)
    with pytest.raises(ValueError, match="fit is 'worst'"):
        ContiguousArena(8, fit="worst")


def test_strips_are_cut_one_behind_the_other():
    arena, starts = filled([10, 20, 30])
    assert starts == [0, 10, 30]
    assert arena.holes == [(60, 40)]
    assert arena.strips == {0: 10, 10: 20, 30: 30}
    arena.check_invariants()


def test_first_fit_takes_the_first_hole_and_best_fit_the_tightest():
    for fit, expected in (("first", 0), ("best", 40)):
        arena, starts = filled([30, 10, 12, 10], fit=fit)
        arena.free(starts[0])
        arena.free(starts[2])
        assert arena.holes[:2] == [(0, 30), (40, 12)]
        assert arena.allocate(11) == expected
        arena.check_invariants()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]])
def test_freed_neighbours_join_into_one_hole(order):
    arena, starts = filled([30, 30, 40])
    for i in order:
        arena.free(starts[i])
        arena.check_invariants()
    assert arena.holes == [(0, 100)]
    assert arena.allocate(100) == 0


def test_a_strip_must_fit_in_one_hole():
    """External fragmentation: half of the arena is free, and a strip a quarter as long does not fit."""
    arena, starts = filled([10] * 10)
    for start in starts[::2]:
        arena.free(start)
    assert arena.num_free == 50
    assert arena.largest_hole == 10
    before = arena.holes
    assert arena.allocate(25) is None
    assert arena.holes == before
    assert arena.unusable(25) == 50
    assert arena.unusable(10) == 0
    assert arena.allocate(10) == 0


def test_a_full_arena_has_no_hole():
    arena, _ = filled([100])
    assert (arena.holes, arena.num_free, arena.largest_hole) == ([], 0, 0)
    assert arena.allocate(1) is None


def test_impossible_calls_are_refused_and_change_nothing():
    arena, _ = filled([10])
    before = (arena.holes, arena.strips)
    for start in (5, 10, -1):
        with pytest.raises(ValueError, match=f"no strip starts at slot {start}"):
            arena.free(start)
    with pytest.raises(ValueError, match="cannot reserve 0 slots"):
        arena.allocate(0)
    assert (arena.holes, arena.strips) == before
    arena.free(0)
    with pytest.raises(ValueError, match="no strip starts at slot 0"):
        arena.free(0)
    with pytest.raises(ValueError, match="num_slots is 0"):
        ContiguousArena(0)


@pytest.mark.parametrize("fit", ["first", "best"])
def test_random_traffic_keeps_every_slot_in_one_place(fit):
    rng = random.Random(1)
    arena, live = ContiguousArena(200, fit=fit), []
    owner: dict[int, int] = {}  # slot -> start of its strip: the obvious model
    for _ in range(2000):
        if live and rng.random() < 0.5:
            start = live.pop(rng.randrange(len(live)))
            arena.free(start)
            owner = {slot: s for slot, s in owner.items() if s != start}
        else:
            size = rng.randint(1, 40)
            start = arena.allocate(size)
            runs = "".join("x" if slot in owner else "." for slot in range(200)).split("x")
            assert (start is None) == (max(map(len, runs)) < size)
            if start is not None:
                strip = range(start, start + size)
                assert not owner.keys() & set(strip)
                owner.update(dict.fromkeys(strip, start))
                live.append(start)
        assert arena.num_free == 200 - len(owner)
        arena.check_invariants()


def test_the_checker_notices_each_fault():
    for message, damage in (
        ("belongs to two stretches or to none", lambda a: a._strips.update({5: 10})),
        ("belongs to two stretches or to none", lambda a: a._strips.pop(0)),
        ("touch", lambda a: a._holes.__setitem__(slice(None), [(10, 40), (50, 50)])),
        ("out of order", lambda a: a._holes.__setitem__(slice(None), [(50, 50), (10, 40)])),
        ("cover 10 of 100", lambda a: a._holes.clear()),
        ("has 0 slots", lambda a: a._holes.append((100, 0))),
    ):
        arena, _ = filled([10])
        arena.check_invariants()
        damage(arena)
        with pytest.raises(AssertionError, match=message):
            arena.check_invariants()
