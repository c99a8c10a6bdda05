"""Who runs, who waits, who gives way: order, budgets, blocks, and no way to stall."""

from typing import Any

import pytest

from minipaged.config import EngineConfig
from minipaged.core.request import Status
from minipaged.engine.engine import Engine
from minipaged.sampling_params import SamplingParams
from tests.engine.fake_model import HashModel, alone, greedy, make_engine, run, serve, step, tokens_of

LONG = greedy(12, ignore_eos=True)


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def test_prompts_share_the_budget_and_only_finished_prefills_are_sampled() -> None:
    """Budget 8; 3 + 5, then 1 + 7, then 8 tokens; the long prompt says nothing before its last token."""
    model = HashModel()
    engine = make_engine(model=model, max_num_batched_tokens=8)
    engine.add_request("short", [1, 2, 3], greedy(2, ignore_eos=True))
    engine.add_request("long", list(range(1, 21)), greedy(2, ignore_eos=True))
    emitted = []
    while engine.has_unfinished_requests():
        outputs = {o.request_id: len(o.outputs[0].token_ids) for o in step(engine)}
        emitted.append(outputs)
    assert model.steps == [[(0, 3), (0, 5)], [(3, 1), (5, 7)], [(12, 8)], [(20, 1)]]
    assert emitted == [{"short": 1}, {"short": 2}, {"long": 1}, {"long": 2}]


@pytest.mark.parametrize("budget", range(2, 22))
def test_output_is_the_same_at_every_chunk_size(budget: int) -> None:
    """Each token is fed once, in order, whatever the chunks; so the text does not change."""
    prompts = [list(range(1, 21)), [5, 6, 7], [9] * 8]
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=2)
    assert serve(engine, prompts, LONG) == [alone(p, LONG)[0] for p in prompts]


def test_without_chunked_prefill_a_prompt_is_computed_in_one_step() -> None:
    model = HashModel()
    engine = make_engine(
        model=model, max_model_len=24, max_num_batched_tokens=24, enable_chunked_prefill=False
    )
    prompts = [[1] * 15, [2] * 15, [3] * 4]
    params = greedy(3, ignore_eos=True)
    assert serve(engine, prompts, params) == [alone(p, params)[0] for p in prompts]
    assert model.steps[0] == [
        (0, 15)
    ]  # the second does not fit in the 9 tokens left, and nobody overtakes it
    assert model.steps[1] == [(15, 1), (0, 15), (0, 4)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_prompt_that_finds_no_block_for_its_next_token_gives_way(preemption: str) -> None:
    """The older request grows into the blocks that the prompt needs: the youngest that gives way is then
    the prompt itself, nothing is left idle inside, and it says what it would have said."""
    model = HashModel()
    engine = make_engine(
        model=model, num_blocks=10, max_num_batched_tokens=3, max_num_seqs=2, preemption=preemption
    )
    engine.add_request("old", [5] * 4, greedy(30, ignore_eos=True))
    engine.add_request("prompt", list(range(1, 33)), greedy(4, ignore_eos=True))
    outputs = {}
    engine.on_step = lambda plan: seen.append((len(engine.scheduler.running), len(plan.requests)))
    seen: list[tuple[int, int]] = []
    while engine.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in step(engine) if o.finished)
    assert all(inside == computing for inside, computing in seen)
    assert 0 < outputs["prompt"].metrics.num_preemptions <= 3
    assert tokens_of(outputs["prompt"]) == alone(range(1, 33), greedy(4, ignore_eos=True))
    assert tokens_of(outputs["old"]) == alone([5] * 4, greedy(30, ignore_eos=True))


def test_requests_are_admitted_in_order_of_arrival() -> None:
    """A short request does not overtake a long one that must wait for blocks: first come, first served."""
    engine = make_engine(num_blocks=8)
    engine.add_request("first", [1] * 17, LONG)  # 5 blocks
    engine.add_request("large", [2] * 17, LONG)  # 5 more are not there
    engine.add_request("small", [3], LONG)
    step(engine)
    assert (ids(engine.scheduler.running), ids(engine.scheduler.waiting)) == (["first"], ["large", "small"])
    assert set(run(engine)) == {"first", "large", "small"}


def test_a_prompt_is_admitted_only_if_it_can_be_finished() -> None:
    """Two prompts in chunks must not take each other's blocks: the second waits, though a chunk would fit."""
    engine = make_engine(num_blocks=10, max_num_batched_tokens=8)
    engine.add_request("a", [1] * 26, greedy(1))  # 7 blocks; its last chunk leaves 6 tokens of the budget
    engine.add_request("b", [2] * 14, LONG)  # 4 blocks, 3 are left
    for _ in range(4):
        assert ids(engine.scheduler.running) in ([], ["a"])
        step(engine)
    assert set(run(engine)) == {"b"}
    assert max(record.running for record in engine.trace) == 1


def test_cached_blocks_that_a_prompt_hits_are_not_free_for_it_as_well() -> None:
    """Two free blocks, both hit by a prompt of three blocks: pinned, they leave none for the third."""
    engine = make_engine(num_blocks=10, enable_prefix_caching=True)
    prompt = list(range(1, 10))
    assert serve(engine, [prompt], greedy(1)) == alone(prompt, greedy(1))
    engine.add_request("holder", [33] * 32, LONG)  # takes the 8 others
    engine.add_request("hit", prompt, LONG)
    step(engine)
    assert engine.pool.num_free == len(engine.pool._cached) == 2
    assert ids(engine.scheduler.running) == ["holder"]
    assert tokens_of(run(engine)["hit"]) == alone(prompt, LONG)


def test_max_num_seqs_counts_the_samples_of_a_request() -> None:
    engine = make_engine(max_num_seqs=4)
    sampled = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    engine.add_request("a", [1, 2], sampled)
    engine.add_request("b", [3, 4], sampled)
    engine.add_request("c", [5, 6], greedy(4))
    step(engine)
    assert ids(engine.scheduler.running) == ["a"] * 3  # 3 + 3 > 4, and "c" does not overtake
    assert engine.manager.num_free_rows == 1
    assert set(run(engine)) == {"a", "b", "c"}


def test_watermark_holds_for_admission_only() -> None:
    """With 2 of 10 blocks kept free a third request waits, while those inside may take the last block."""
    engine = make_engine(num_blocks=10, watermark=0.2)
    for name in ("a", "b", "c"):
        engine.add_request(name, [1] * 12, LONG)  # 3 blocks each
    step(engine)
    assert ids(engine.scheduler.running) == ["a", "b"]
    least_free = engine.pool.num_free
    while engine.has_unfinished_requests():
        step(engine)
        least_free = min(least_free, engine.pool.num_free)
    assert least_free < 2


def test_a_prompt_that_fits_an_empty_pool_is_admitted_whatever_the_watermark() -> None:
    """A watermark of 90 % refuses nobody when nothing runs."""
    engine = make_engine(num_blocks=4, watermark=0.9)
    assert serve(engine, [[1] * 12, [2] * 12], greedy(2)) == [alone([n] * 12, greedy(2))[0] for n in (1, 2)]


def test_a_prompt_larger_than_the_pool_is_refused_when_it_is_added() -> None:
    """Both numbers in the message, and the request after it is served."""
    engine = make_engine(num_blocks=4)
    with pytest.raises(ValueError, match="prompt has 20 tokens: it needs 5 blocks, the pool has 4"):
        engine.add_request("large", [1] * 20, greedy())
    engine.add_request("small", [1, 2, 3], greedy(4))
    assert tokens_of(run(engine)["small"]) == alone([1, 2, 3], greedy(4))


def test_more_samples_than_fit_are_refused_when_they_are_added() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="n is 9, max_num_seqs is 8"):
        engine.add_request("a", [1], SamplingParams(n=9))
    with pytest.raises(ValueError, match="prompt has 6 tokens and n is 4: it needs 5 blocks, the pool has 4"):
        engine.add_request("a", [1] * 6, SamplingParams(n=4))
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_alone_in_a_full_pool_ends_with_length(preemption: str) -> None:
    """16 slots, prompt 12: the 5th token is sampled and has no slot; nobody could make room."""
    engine = make_engine(num_blocks=4, preemption=preemption)
    engine.add_request("a", [1] * 12, greedy(8, ignore_eos=True))
    output = run(engine, max_steps=8)["a"].outputs[0]
    assert output.finish_reason == "length"
    assert [output.token_ids] == [alone([1] * 12, greedy(8, ignore_eos=True))[0][:5]]
    assert engine.stats.num_preemptions == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_of_several_samples_each_gets_all_the_pool_has(preemption: str) -> None:
    """n = 2: the later sample gives way and comes back; both end where the pool is full."""
    params = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True)
    engine = make_engine(num_blocks=6, preemption=preemption)
    engine.add_request("a", [1] * 9, params)
    output = run(engine)["a"]
    whole = alone([1] * 9, params)
    assert output.metrics.num_preemptions > 0
    for sample, expected in zip(output.outputs, whole, strict=True):
        assert sample.finish_reason == "length"
        assert sample.token_ids == expected[: 6 * 4 - 9 + 1]


def preemption_scene(preemption: str) -> Engine:
    """Three requests of 8 tokens in 8 blocks of 4; they grow until the youngest have to give way."""
    engine = make_engine(num_blocks=8, preemption=preemption)
    for name in ("a", "b", "c"):
        engine.add_request(name, [ord(name) % 40] * 8, LONG)
    engine.add_request("new", [4], LONG)
    return engine


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_youngest_is_preempted_and_returns_before_new_requests_enter(preemption: str) -> None:
    """Whoever gave way comes back first, and says what it would have said without."""
    engine = preemption_scene(preemption)
    seen: list[tuple[str, ...]] = []
    outputs = {}
    while engine.has_unfinished_requests():
        order = ids(engine.scheduler.running) + ids(engine.scheduler.waiting)
        assert order == sorted(order, key=["a", "b", "c", "new"].index)  # always in order of arrival
        outputs.update((o.request_id, o) for o in step(engine) if o.finished)
        seen.append(tuple(ids(engine.scheduler.running)))
    stats = engine.stats
    assert (stats.num_swaps if preemption == "swap" else stats.num_recomputes) > 0
    assert outputs["a"].metrics.num_preemptions == 0  # the oldest never gives way
    assert outputs["c"].metrics.num_preemptions > 0
    assert all("a" in running for running in seen[:11])
    for name in ("a", "b", "c"):
        assert tokens_of(outputs[name]) == alone([ord(name) % 40] * 8, LONG)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nobody_enters_in_a_step_that_preempts(preemption: str) -> None:
    """What was just taken away is not given back in the same step: the room is for those inside."""
    engine = preemption_scene(preemption)
    engine.add_request("tiny", [3], greedy(1))
    plans: list[tuple[int, int]] = []
    engine.on_step = lambda plan: plans.append((len(plan.preempted), len(plan.admitted)))
    run(engine)
    assert any(preempted for preempted, _ in plans)
    assert not any(preempted and admitted for preempted, admitted in plans)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", range(7, 18))
def test_samples_at_different_stages_give_way(
    num_blocks: int, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recomputation one sample decodes while the other computes its tail; then blocks run out."""
    old = greedy(40, ignore_eos=True)
    params = SamplingParams(n=2, seed=2, max_tokens=16, ignore_eos=True)
    engine = make_engine(
        num_blocks=num_blocks, max_num_batched_tokens=4, max_num_seqs=3, preemption=preemption
    )
    engine.add_request("old", [9], old)
    engine.add_request("x", [1, 2, 3, 4], params)
    request, finished = engine.requests["x"], {}
    for number in range(400):
        if number in (10, 14, 18, 22) and request.samples[-1].status is Status.RUNNING:
            with monkeypatch.context() as patch:
                patch.setattr(engine.manager, "swap", None)
                engine.scheduler.preempt_youngest()
        finished.update((o.request_id, o) for o in step(engine) if o.finished)
    assert tokens_of(finished["old"])[0] == alone([9], old)[0][: 4 * num_blocks]
    assert tokens_of(finished["x"]) == alone([1, 2, 3, 4], params)  # each fits the pool alone


def test_swapped_requests_hold_host_blocks_and_no_row() -> None:
    engine = preemption_scene("swap")
    assert engine.manager.swap is not None
    while not engine.scheduler.num_swapped:
        step(engine)
    swapped = [r for r in engine.scheduler.waiting if r.status is Status.SWAPPED]
    host = engine.manager.swap.host_pool
    assert host.num_blocks - host.num_free == sum(len(s.table.blocks) for s in swapped) > 0
    assert {s.row for s in swapped} == {-1}
    run(engine)


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    engine = make_engine(num_blocks=8, preemption="swap", num_host_blocks=1)
    prompts = [[n] * 8 for n in (1, 2, 3)]
    assert serve(engine, prompts, LONG) == [alone(p, LONG)[0] for p in prompts]
    assert engine.stats.num_recomputes > 0


@pytest.mark.parametrize("preemption", ["auto", "Swap", None])
def test_other_ways_to_preempt_are_refused_by_name(preemption: Any) -> None:
    with pytest.raises(ValueError, match=f"preemption is {preemption!r}, supported are 'recompute', 'swap'"):
        EngineConfig(max_model_len=64, preemption=preemption)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("after", range(10))
def test_preemption_at_every_output_length_changes_nothing(after: int, chunk: int, preemption: str) -> None:
    """Preempted at output length 0 … 9, and again 4 tokens later, with small chunks: each token is kept,
    sampled and streamed once, seeded draws go on where they were, max_tokens counts from the prompt."""
    params = SamplingParams(seed=7, max_tokens=14, ignore_eos=True, logprobs=2)
    engine = make_engine(max_num_batched_tokens=chunk, max_num_seqs=2, preemption=preemption)
    engine.add_request("a", [1, 2, 3, 4, 5], params)
    request = engine.requests["a"]
    streamed: list[int] = []
    preempted_at = []
    last = None
    while engine.has_unfinished_requests():
        length = len(request.samples[0].output.token_ids)
        if length in (after, after + 4) and length not in preempted_at and engine.scheduler.running:
            preempted_at.append(length)
            engine.scheduler.preempt_youngest()
        for output in step(engine):
            last = output
            streamed += output.outputs[0].token_ids[len(streamed) :]
    calm = make_engine()
    calm.add_request("a", [1, 2, 3, 4, 5], params)
    expected = run(calm)["a"].outputs[0]
    # With the large budget the prompt is computed in one step: then length 0 is never seen running.
    assert preempted_at == [after] * (after > 0 or chunk < 5) + [after + 4]
    assert last is not None and last.metrics.num_preemptions == len(preempted_at)
    assert last.outputs[0].token_ids == streamed == expected.token_ids
    assert last.outputs[0].logprobs == expected.logprobs
    assert len(streamed) == 14


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("after", range(1, 8))
def test_samples_share_the_prompt_again_after_a_preemption(after: int, chunk: int) -> None:
    """n = 3: all give way and find the prompt in the prefix cache; no block more than before."""
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    engine = make_engine(max_num_batched_tokens=chunk, max_num_seqs=4, enable_prefix_caching=True)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], params)
    samples = engine.requests["a"].samples
    while len(samples[0].output.token_ids) < after:
        step(engine)
    for _ in samples:
        engine.scheduler.preempt_youngest()
    assert engine.pool.num_free == engine.pool.num_blocks
    while len(samples[2].output.token_ids) == after:
        step(engine)
    inside = [sample for sample in samples if sample.status is Status.RUNNING]
    assert samples[2] in inside and len({sample.table.blocks[0] for sample in inside}) == 1
    assert tokens_of(run(engine)["a"]) == alone([1, 2, 3, 4, 5, 6], params)
    # 15 tokens stored by each: 4 blocks, of which the first, the prompt's full one, is shared.
    assert max(record.blocks_held for record in engine.trace) <= 1 + 3 * 3


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("gone", range(1, 4))
def test_samples_give_way_one_by_one(gone: int, caching: bool, preemption: str) -> None:
    """The youngest `gone` of three samples are preempted in the middle; the others do not notice."""
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    engine = make_engine(max_num_seqs=4, enable_prefix_caching=caching, preemption=preemption)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], params)
    samples = engine.requests["a"].samples
    for _ in range(4):
        step(engine)
    for _ in range(gone):
        engine.scheduler.preempt_youngest()
    engine.check_invariants()
    assert [sample.status is Status.RUNNING for sample in samples] == [i < 3 - gone for i in range(3)]
    output = run(engine)["a"]
    assert tokens_of(output) == alone([1, 2, 3, 4, 5, 6], params)
    assert output.metrics.num_preemptions == gone


@pytest.mark.parametrize("chunked", [True, False])
def test_nobody_takes_the_room_of_samples_that_came_back(chunked: bool) -> None:
    """Both prompts fit one step when they are computed again. What the samples had said by then does not."""
    params = SamplingParams(n=2, seed=3, max_tokens=14, ignore_eos=True)
    engine = make_engine(
        num_blocks=8, max_model_len=32, max_num_batched_tokens=32, enable_chunked_prefill=chunked
    )
    prompts = {"a": [1] * 6, "b": [2] * 12}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while len(engine.requests["a"].samples[0].tokens) < 17:
        step(engine)
    assert engine.requests["b"].samples[0].output.token_ids and "b" in ids(engine.scheduler.waiting)
    engine.reset_prefix_cache(reset_running_requests=True)
    step(engine)
    assert ids(engine.scheduler.running) == ["a"]
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == alone(prompt, params)


def test_a_long_prompt_is_not_starved_by_running_decodes() -> None:
    """The budget equals max_num_seqs: decodes can take nearly all of it, the prompt still moves every
    step."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4)
    for name in "abc":
        engine.add_request(name, [1], greedy(40, ignore_eos=True))
    engine.add_request("long", [2] * 30, greedy(1))
    for _ in range(36):
        step(engine)
    assert "long" not in engine.requests and "a" in engine.requests


def test_a_step_that_can_do_nothing_raises() -> None:
    """The guard against an endless loop. Without a row that is free the only request cannot be scheduled."""
    engine = make_engine(max_num_seqs=1)
    engine.manager._free_rows.clear()
    engine.add_request("a", [1], greedy())
    with pytest.raises(RuntimeError, match="scheduled nothing: 0 running, 1 waiting, 64 of 64 blocks free"):
        engine.step()


def test_a_request_that_ends_for_lack_of_blocks_makes_room_for_the_next() -> None:
    """The one after it could not enter before; it does in the next step, and is served whole."""
    engine = make_engine(num_blocks=4)
    engine.add_request("a", [1] * 12, greedy(8, ignore_eos=True))
    engine.add_request("b", [2] * 12, greedy(4, ignore_eos=True))
    outputs = run(engine)
    assert len(outputs["a"].outputs[0].token_ids) == 5
    assert tokens_of(outputs["b"]) == alone([2] * 12, greedy(4, ignore_eos=True))


def test_a_step_without_requests_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert not engine.trace


def test_a_decode_takes_a_block_only_when_its_token_needs_one() -> None:
    """A prompt of 8 in blocks of 4 takes 2; the 9th token, stored a step after it was sampled, the
    third."""
    for chunk in (4, 8):
        engine = make_engine(max_num_batched_tokens=chunk, max_num_seqs=1)
        engine.add_request("a", [1] * 8, greedy(6, ignore_eos=True))
        run(engine)
        assert [record.blocks_held for record in engine.trace] == [1] * (chunk == 4) + [2, 3, 3, 3, 3, 4]


def test_budgets_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 8, it must reach max_num_seqs \(16\)"):
        EngineConfig(max_model_len=64, max_num_batched_tokens=8, max_num_seqs=16)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 32, max_model_len is 64"):
        EngineConfig(
            max_model_len=64, max_num_batched_tokens=32, max_num_seqs=8, enable_chunked_prefill=False
        )
