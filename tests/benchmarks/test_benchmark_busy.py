"""A job beside busy loops, without clocks: loops that end, ratios, goals, what is printed."""

import psutil
import pytest

from benchmarks import busy


def times(seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


FOUND = {
    "minipaged": {0: times(1.0, 2.0), 4: times(3.0, 2.4)},
    "minipaged-spinning": {0: times(0.98, 2.0), 4: times(9.0, 10.0)},
    "vllm": {4: times(5.0, 6.0)},
}


def loops_that_run() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline()[-1:] == ["while True: pass"]]


def test_loops_run_meanwhile_and_not_afterwards():
    def fail():
        with busy.busy_loops(2):
            assert len(loops_that_run()) == 2
            raise RuntimeError("the job failed")

    with pytest.raises(RuntimeError, match="the job failed"):
        fail()
    assert loops_that_run() == []


def test_times_are_set_against_the_quiet_ones_of_the_same_engine():
    header, *rows = busy.rows(FOUND)
    assert header[0] == "engine" and len(rows) == 5
    assert rows[1] == ["minipaged", "4", "3.00", "3.00 ×", "2.40", "1.20 ×"]
    assert rows[4] == ["vllm", "4", "5.00", "-", "6.00", "-"]  # there was no quiet moment


def test_goals_are_the_cost_beside_neighbours_and_its_price_without():
    cost, price = busy.goals(FOUND)
    assert (cost["measured"], cost["met"], cost["aim_met"]) == (pytest.approx(1.2), True, False)
    assert (price["measured"], price["met"]) == (pytest.approx(1.0204, abs=1e-4), False)
    for row in busy.goals({"minipaged": {2: times(1, 1)}}):
        assert (row["measured"], row["met"]) == (None, None)


class Engine:
    """Counts the ways it was asked."""

    def __init__(self):
        self.quiet = self.beside = 0

    def sample(self, name, mix):
        self.quiet += 1
        return times(1.0, float(self.quiet))

    def serve(self, mix):
        self.beside += 1
        return times(2.0, 2.0)


def test_only_the_quiet_rounds_need_a_quiet_machine():
    engine = Engine()
    found = busy.measure({"minipaged": engine}, [0, 1], 3)
    assert (engine.quiet, engine.beside) == (3, 3)
    assert found == {"minipaged": {0: times(1.0, 2.0), 1: times(2.0, 2.0)}}
