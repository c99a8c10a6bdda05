"""Clocks around methods: each part's own time, and nothing left behind."""

import pytest

from coursekit.stopwatch import Stopwatch


class Kitchen:
    """Its clock moves only where it says so."""

    def __init__(self):
        self.now = 0.0

    def bake(self):
        self.now += 1
        self.chop()
        self.chop()
        self.now += 2
        return "bread"

    def chop(self):
        self.now += 10

    def burn(self):
        self.now += 5
        raise RuntimeError("smoke")


@pytest.fixture
def kitchen():
    return Kitchen()


def test_a_part_does_not_count_the_parts_that_it_calls(kitchen):
    with Stopwatch(clock=lambda: kitchen.now) as watch:
        watch.around(kitchen, "bake", "baking")
        watch.around(kitchen, "chop", "chopping")
        assert kitchen.bake() == "bread"
        assert watch.take() == {"baking": 3, "chopping": 20}


def test_time_between_calls_counts_to_nobody_and_take_starts_again(kitchen):
    with Stopwatch(clock=lambda: kitchen.now) as watch:
        watch.around(kitchen, "chop", "chopping")
        kitchen.chop()
        kitchen.now += 100
        kitchen.chop()
        assert watch.take() == {"chopping": 20}
        assert watch.take() == {}


def test_a_call_that_raises_is_counted_and_closed(kitchen):
    with Stopwatch(clock=lambda: kitchen.now) as watch:
        watch.around(kitchen, "burn", "burning")
        watch.around(kitchen, "chop", "chopping")
        with pytest.raises(RuntimeError, match="smoke"):
            kitchen.burn()
        kitchen.chop()
        assert watch.take() == {"burning": 5, "chopping": 10}


def test_afterwards_objects_and_modules_are_as_before(kitchen):
    kitchen.own = own = lambda: None
    with Stopwatch() as watch:
        for name in ("bake", "own", "bake"):
            watch.around(kitchen, name, "part")
        assert "bake" in vars(kitchen) and kitchen.own is not own
    assert "bake" not in vars(kitchen) and kitchen.own is own


def test_it_waits_before_it_reads_the_clock(kitchen):
    def wait():
        kitchen.now += 1  # what was launched and not finished yet

    with Stopwatch(clock=lambda: kitchen.now, wait=wait) as watch:
        watch.around(kitchen, "chop", "chopping")
        kitchen.chop()
        assert watch.take() == {"chopping": 11}
