"""The event simulation agrees with the memory manager itself, step by step, and with what must hold."""

import numpy as np
import pytest

from coursekit.contiguous import ContiguousArena, reserve
from coursekit.traffic import contiguous_traffic, paged_traffic
from coursekit.waste import WasteReport
from minipaged.cache import BlockPool, BlockTable
from tests.coursekit.waste_oracle import Strip, waste_of_strips, waste_of_tables

BUDGET, MAX_LEN = 230, 64
NOTHING = WasteReport(0, 0, 0, 0, 0, 0, 0)


def lengths(n: int = 60, seed: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(1, MAX_LEN // 2, size=(n, 2))


@pytest.mark.parametrize("fit", ["first", "best"])
@pytest.mark.parametrize("rule", ["maximum", "power_of_two", "oracle"])
def test_strips_are_summed_as_a_step_by_step_run_does(rule, fit):
    waiting = lengths().tolist()
    arena, running = ContiguousArena(BUDGET, fit=fit), {}  # start -> [strip, steps left]
    total, steps, request_steps = NOTHING, 0, 0
    while True:
        while waiting:
            prompt, generated = waiting[0]
            size = reserve(rule, prompt, generated - 1, MAX_LEN)
            start = arena.allocate(size)
            if start is None:
                break
            waiting.pop(0)
            running[start] = [Strip(size, prompt, prompt + generated - 1), generated]
        if not waiting:
            break
        strips = [strip for strip, _ in running.values()]
        total += waste_of_strips(arena, strips, 1, next_size=size)
        steps, request_steps = steps + 1, request_steps + len(strips)
        for start, (strip, left) in list(running.items()):
            if left == 1:
                arena.free(start)
                del running[start]
            else:
                running[start] = [strip._replace(num_tokens=strip.num_tokens + 1), left - 1]
    traffic = contiguous_traffic(lengths(), BUDGET, MAX_LEN, rule, fit=fit)
    assert traffic.waste == total
    assert (traffic.steps, traffic.request_steps) == (steps, request_steps)
    assert steps > 100


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_blocks_are_counted_as_the_pool_and_its_tables_do(block_size):
    waiting = [(prompt, prompt + generated - 1) for prompt, generated in lengths().tolist()]
    num_blocks = BUDGET // block_size
    pool = BlockPool(num_blocks, enable_prefix_caching=False)
    running: list[tuple[BlockTable, int]] = []
    total, steps, preemptions = NOTHING, 0, 0
    while waiting:
        for table, final in running:
            if table.num_tokens == final:
                table.free()
        running = [(table, final) for table, final in running if table.num_tokens]
        preempted = False
        while sum(table.blocks_to_append(1) for table, _ in running) > pool.num_free:
            table, final = running.pop()
            waiting.insert(0, (table.num_tokens, final))
            table.free()
            preempted, preemptions = True, preemptions + 1
        for table, _ in running:
            assert table.append(1) == []
        while waiting and not preempted:
            table = BlockTable(pool, block_size)
            if table.append(waiting[0][0]) is None:
                break
            running.append((table, waiting.pop(0)[1]))
        pool.check_invariants([table for table, _ in running])
        if waiting:
            tables = [table for table, _ in running]
            total += waste_of_tables(tables, num_blocks, block_size, 1, budget=BUDGET)
            steps += 1
    traffic = paged_traffic(lengths(), BUDGET, block_size)
    assert traffic.waste == total
    assert (traffic.steps, traffic.preemptions) == (steps, preemptions)
    assert preemptions > 0


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32])
def test_paging_never_wastes_a_whole_block_on_a_request(block_size):
    traffic = paged_traffic(lengths(), BUDGET, block_size)
    assert traffic.waste.to_come == traffic.waste.never == 0
    assert 0 <= traffic.unused_per_request <= block_size - 1


def test_reserving_the_maximum_gets_worse_as_the_maximum_grows():
    shares = [
        contiguous_traffic(lengths(), factor * MAX_LEN, factor * MAX_LEN, "maximum").waste.shares["used"]
        for factor in (1, 2, 4)
    ]
    assert shares == pytest.approx([shares[0], shares[0] / 2, shares[0] / 4])


def test_a_budget_that_is_never_short_measures_nothing():
    for measure in (
        lambda: paged_traffic(lengths(4), 10_000, 16),
        lambda: contiguous_traffic(lengths(4), 10_000, MAX_LEN, "oracle"),
    ):
        with pytest.raises(ValueError, match="a budget of 10000 tokens holds every request at once"):
            measure()


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="a request stores 12 tokens, the budget is 11"):
        paged_traffic(np.array([[10, 3], [1, 1]]), 11, 1)
    with pytest.raises(ValueError, match="a request reserves 12 slots, the budget is 11"):
        contiguous_traffic(np.array([[10, 3], [1, 1]]), 11, MAX_LEN, "oracle")
    with pytest.raises(ValueError, match="do not fit max_len 64"):
        contiguous_traffic(np.array([[60, 6], [1, 1]]), 500, MAX_LEN, "oracle")
