"""Times, counters and the step trace, on a clock that ticks once per reading."""

import pytest
import torch
from fake_model import alone, greedy, make_engine, run

from minipaged.core.request import EngineStats, StepPlan
from minipaged.sampling_params import SamplingParams


def test_times_of_a_request_are_in_order_and_add_up() -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=1)
    engine.add_request("a", [1] * 12, greedy(5, ignore_eos=True))
    engine.add_request("b", [2], greedy(3, ignore_eos=True))
    outputs = run(engine)
    a, b = outputs["a"].metrics, outputs["b"].metrics
    for metrics in (a, b):
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
        ]
        assert None not in times and times == sorted(times)  # type: ignore[type-var]
        assert metrics.finished_time == metrics.last_token_time
        assert metrics.ttft is not None and metrics.tpot is not None and metrics.finished_time is not None
        decode = (metrics.num_generation_tokens - 1) * metrics.tpot
        assert metrics.finished_time - metrics.arrival_time == pytest.approx(metrics.ttft + decode)
    # Two readings a step: "a" begins in step 0, has its first token in step 1 and four more by step 5.
    assert a.num_generation_tokens == 5 and a.tpot == 2
    assert a.arrival_time < a.first_scheduled_time < b.first_scheduled_time


def test_a_request_that_never_ran_has_no_times() -> None:
    engine = make_engine()
    engine.add_request("a", [1], greedy())
    metrics = engine.requests["a"].metrics
    assert (metrics.first_scheduled_time, metrics.ttft, metrics.tpot, metrics.finished_time) == (None,) * 4


def test_a_single_token_has_no_time_per_output_token() -> None:
    engine = make_engine()
    engine.add_request("a", [1], greedy(1))
    assert run(engine)["a"].metrics.tpot is None


def test_the_trace_accounts_for_every_token_and_slot() -> None:
    """Per step: tokens computed, requests inside and outside, blocks held, and bytes reserved and used."""
    engine = make_engine(num_blocks=10, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add_request("a", [1] * 10, greedy(3, ignore_eos=True))
    engine.add_request("b", [2] * 3, greedy(3, ignore_eos=True))
    stored: list[int] = []
    engine.on_step = lambda plan: stored.append(sum(s.table.num_tokens for s in engine.scheduler.running))
    run(engine)
    trace = list(engine.trace)
    assert [(r.prefill_tokens, r.decode_tokens) for r in trace] == [(8, 0), (5, 0), (0, 2), (0, 2)]
    assert [(r.running, r.waiting) for r in trace] == [(1, 1), (2, 0), (2, 0), (2, 0)]
    assert [r.blocks_held for r in trace] == [2, 4, 4, 5]
    slot = 2 * 2 * 4  # key and value, head size 2, float32
    assert (
        [r.used_bytes for r in trace]
        == [tokens * slot for tokens in stored]
        == [8 * 16, 13 * 16, 15 * 16, 17 * 16]
    )
    assert [r.reserved_bytes for r in trace] == [r.blocks_held * 4 * slot for r in trace]
    assert engine.storage.nbytes == 10 * 4 * slot
    assert [r.index for r in trace] == [0, 1, 2, 3]
    assert all(r.duration == 1 for r in trace)


def test_samples_that_share_a_block_count_its_tokens_once() -> None:
    """Right after the fork they share the last block as well; then each has a copy of its own."""
    engine = make_engine()
    engine.add_request("a", [1] * 6, SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    engine.add_request("b", [2] * 3, greedy(4, ignore_eos=True))
    slots: list[int] = []

    def look(plan: StepPlan) -> None:
        tables = [request.table for request in engine.scheduler.running]
        slots.append(len({slot for t in tables for slot in t.slots(0, t.num_tokens).tolist()}))

    engine.on_step = look
    run(engine)
    assert slots == [6 + 3, 4 + 3 * 3 + 4, 4 + 3 * 4 + 5, 4 + 3 * 5 + 6]
    assert [record.used_bytes for record in engine.trace] == [16 * count for count in slots]


def test_totals_agree_with_what_was_served() -> None:
    engine = make_engine(enable_prefix_caching=True)
    for name in ("a", "b"):
        engine.add_request(name, list(range(1, 10)), greedy(4, ignore_eos=True))
        run(engine)
    stats = engine.stats
    assert stats.num_finished == 2 and stats.num_generation_tokens == 8
    assert stats.num_prefill_tokens == 9 + 1
    assert (stats.prefix.queries, stats.prefix.hits) == (18, 8)
    assert stats.num_steps == len(engine.trace) == 8
    engine.reset_stats()
    assert engine.stats == EngineStats() and not engine.trace


@pytest.mark.parametrize(("length", "saved"), [(8, 2 * 2 / 9), (16, 2 * 4 / 15)])
def test_samples_report_the_blocks_that_sharing_saved(length: int, saved: float) -> None:
    """Three samples of a prompt of full blocks, with one to four own tokens: 1 - blocks / entries."""
    engine = make_engine()
    engine.add_request("a", [1] * length, SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
    assert run(engine)["a"].metrics.blocks_saved == pytest.approx(saved)


def test_one_sample_saves_nothing() -> None:
    engine = make_engine()
    engine.add_request("a", [1] * 8, greedy(4))
    assert run(engine)["a"].metrics.blocks_saved == 0


def test_the_head_meets_only_rows_that_are_sampled() -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    rows: list[int] = []
    compute_logits = engine.runner.model.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute_logits(hidden)

    engine.runner.model.compute_logits = counted  # type: ignore[method-assign]
    engine.add_request("a", [1] * 20, greedy(3, ignore_eos=True))
    run(engine)
    assert rows == [1, 1, 1]
    assert alone([1] * 20, greedy(3, ignore_eos=True))
