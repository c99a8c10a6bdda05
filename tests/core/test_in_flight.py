"""Requests of one step share what one of them computes in it: one copy, nobody waits, nothing is offered to
later steps that was not stored."""

import pytest

from minipaged.cache import hash_blocks
from minipaged.engine.engine import Engine
from minipaged.sampling_params import SamplingParams
from tests.engine.fake_model import (
    HashModel,
    alone,
    assert_idle,
    greedy,
    make_engine,
    run,
    serve,
    step,
    tokens_of,
)

SYSTEM = list(range(1, 21))  # five blocks of 4
SIX = greedy(6, ignore_eos=True)


def sharing_engine(model: HashModel | None = None, **settings) -> Engine:
    return make_engine(model=model, enable_prefix_caching=True, **settings)


def add(engine: Engine, name: str, prompt: list[int], params: SamplingParams = SIX, salt: str | None = None):
    engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": salt}, params)
    return engine.requests[name]


def blocks_of(engine: Engine) -> list[list[int]]:
    """The block tables of the running requests, in order of arrival."""
    return [request.table.blocks for request in engine.scheduler.running]


def cached_tokens(engine: Engine, max_steps: int = 1000) -> list[int]:
    """Serve all that wait; how many prompt tokens each found, in order of their names."""
    outputs = run(engine, max_steps)
    return [outputs[name].num_cached_tokens for name in sorted(outputs)]


def test_a_burst_with_one_new_prompt_computes_it_once() -> None:
    """32 at once, nothing cached: the prompt of the first, and each one's own 3 tokens; one copy."""
    model = HashModel()
    engine = sharing_engine(model, num_blocks=128, max_num_seqs=32, max_num_batched_tokens=256)
    prompts = [[*SYSTEM, 30, i, 7] for i in range(32)]
    for i, prompt in enumerate(prompts):
        add(engine, f"{i:02}", prompt)
    step(engine)
    assert model.steps == [[(0, 23), *[(20, 3)] * 31]]
    assert {tuple(blocks[:5]) for blocks in blocks_of(engine)} == {(0, 1, 2, 3, 4)}
    assert [engine.pool.ref_count(block) for block in range(6)] == [32] * 5 + [1]
    assert engine.pool.num_blocks - engine.pool.num_free == 5 + 32
    assert [r.request_id for r in engine.scheduler.running] == [f"{i:02}" for i in range(32)]
    outputs = run(engine)
    off = serve(make_engine(num_blocks=512, max_num_seqs=32, max_num_batched_tokens=1024), prompts, SIX)
    assert [tokens_of(outputs[name])[0] for name in sorted(outputs)] == off
    assert [outputs[name].num_cached_tokens for name in sorted(outputs)] == [0] + [20] * 31
    assert engine.stats.num_prefill_tokens == 23 + 31 * 3
    assert (engine.stats.prefix.queries, engine.stats.prefix.hits) == (32 * 23, 31 * 20)


@pytest.mark.parametrize("budget", [9, 16, 23, 24, 30, 200])
def test_a_burst_over_several_steps_keeps_its_order_and_computes_nothing_twice(budget: int) -> None:
    """The first prompt may take several steps; then the others follow it, as many to a step as fit."""
    engine = sharing_engine(max_num_batched_tokens=budget)
    first_tokens: list[str] = []
    prompts = {name: [*SYSTEM, ord(name) % 40, 3] for name in "abcdefgh"}
    for name, prompt in prompts.items():
        add(engine, name, prompt, greedy(6, ignore_eos=True))
    engine.on_step = lambda plan: first_tokens.extend(
        s.request_id for s in plan.sampled if not s.output.token_ids
    )
    outputs = run(engine)
    assert first_tokens == list("abcdefgh")
    computed = sum(record.prefill_tokens + record.decode_tokens for record in engine.trace)
    assert computed == 22 + 7 * 2 + 8 * 5  # the sixth token of an answer is never fed
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == alone(prompt, SIX)


def test_a_block_that_the_last_token_of_a_prompt_completes_is_in_flight() -> None:
    """Budget 19: the first prompt's 20th token is left to the second step, alone, like a decode."""
    model = HashModel()
    engine = sharing_engine(model, max_num_batched_tokens=19)
    add(engine, "a", SYSTEM)
    add(engine, "b", [*SYSTEM, 5, 6])
    assert cached_tokens(engine) == [0, 20]
    assert model.steps[:2] == [[(0, 19)], [(19, 1), (20, 2)]]


def test_of_two_prefixes_in_flight_each_finds_its_own() -> None:
    """A tree: what is common to all, to some, to none; a chain goes on from the cache into the flight."""
    engine = sharing_engine(max_num_batched_tokens=200)
    a, b, c = [1] * 4, [2] * 4, [3] * 4
    serve(engine, [[*a, 9]], greedy(1))
    prompts = [[*a, *b, *c, 1], [*a, *b, *a, 2], [*a, *b, *c, 3, 3], [*a, *b, *a, *a, 4]]
    prompts += [[*b, *c, 5], [*b, 6]]
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt)
    assert cached_tokens(engine) == [4, 8, 12, 12, 0, 4]
    assert serve(engine, prompts, SIX) == [alone(prompt, SIX)[0] for prompt in prompts]


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16)])
def test_of_equal_prompts_the_end_is_computed_by_each(length: int, found: int) -> None:
    """Only a full block of which every token may be found is shared: one token's logits are needed."""
    engine = sharing_engine()
    for name in "abc":
        add(engine, name, SYSTEM[:length])
    outputs = run(engine)
    assert [outputs[name].num_cached_tokens for name in "abc"] == [0, found, found]
    assert [tokens_of(outputs[name]) for name in "abc"] == [alone(SYSTEM[:length], SIX)] * 3


def test_salts_and_prompt_logprobs_share_as_they_do_from_the_cache() -> None:
    """Another salt finds nothing; who wants the logits of its prompt takes nothing and gives all the same."""
    engine = sharing_engine(max_num_batched_tokens=200)
    prompt = [*SYSTEM, 5]
    scored = greedy(6, ignore_eos=True, prompt_logprobs=1)
    add(engine, "0", prompt, scored)
    add(engine, "1", prompt)
    add(engine, "2", prompt, scored)
    add(engine, "3", prompt, salt="one")
    add(engine, "4", prompt, salt="two")
    add(engine, "5", prompt, salt="one")
    assert cached_tokens(engine) == [0, 20, 0, 0, 0, 20]


def test_samples_give_and_take() -> None:
    """n = 3 computes its prompt once, for itself and for others, and takes what others compute."""
    engine = sharing_engine(max_num_batched_tokens=200)
    params = SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True)
    prompts = {name: [*SYSTEM, ord(name) % 40] for name in "abcd"}
    for name, prompt in prompts.items():
        add(engine, name, prompt, params if name in "bc" else SIX)
    step(engine)
    assert engine.pool.ref_count(0) == 1 + 3 + 3 + 1
    outputs = run(engine)
    assert [outputs[name].num_cached_tokens for name in "abcd"] == [0, 20, 20, 20]
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == alone(prompt, params if name in "bc" else SIX)


def test_without_prefix_caching_nothing_is_shared() -> None:
    engine = make_engine(max_num_batched_tokens=200)
    for name in "abc":
        add(engine, name, [*SYSTEM, 5])
    step(engine)
    assert len({block for blocks in blocks_of(engine) for block in blocks}) == 3 * 6
    assert not any(r.hashes for r in engine.scheduler.running)
    run(engine)


@pytest.mark.parametrize("stored", [False, True])
def test_a_step_that_fails_offers_nothing(stored: bool) -> None:
    """Whether the model broke before or after it stored: all start over, and then share as before."""
    engine = sharing_engine(max_num_batched_tokens=200)
    prompts = [[*SYSTEM, i] for i in range(4)]
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt)
    model = engine.runner.model

    def broken(*inputs):
        if stored:
            model(*inputs)
        raise ZeroDivisionError

    engine.runner.model = broken  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.check_invariants()
    assert_idle(engine)
    assert engine.pool.lookup(hash_blocks(SYSTEM, 4)) == []
    engine.runner.model = model
    engine.abort_request("0")  # nobody waits for the one that was to compute it
    outputs = run(engine)
    assert [tokens_of(outputs[str(i)]) for i in (1, 2, 3)] == [alone(prompts[i], SIX) for i in (1, 2, 3)]
    assert engine.stats.num_prefill_tokens == 21 + 2


@pytest.mark.parametrize("event", ["ends", "aborted", "preempted"])
def test_who_computed_a_block_may_leave_it_to_those_who_share_it(event: str) -> None:
    """The first request ends in the shared step itself, or is aborted or preempted right after it."""
    engine = sharing_engine(max_num_batched_tokens=200)
    add(engine, "a", [*SYSTEM, 5], greedy(1) if event == "ends" else SIX)
    add(engine, "b", [*SYSTEM, 6])
    step(engine)
    if event == "aborted":
        engine.abort_request("a")
    elif event == "preempted":
        engine.scheduler.preempt_youngest()
        engine.scheduler.preempt_youngest()
    engine.check_invariants()
    outputs = run(engine)
    assert tokens_of(outputs["b"]) == alone([*SYSTEM, 6], SIX)
    assert outputs["b"].num_cached_tokens == 20
    assert event != "preempted" or tokens_of(outputs["a"]) == alone([*SYSTEM, 5], SIX)


def test_a_burst_enters_a_pool_that_holds_its_prompt_once() -> None:
    """8 requests in 13 blocks: 5 that all share and one for each one's own tokens."""
    engine = sharing_engine(num_blocks=13, max_num_batched_tokens=200)
    for name in "abcdefgh":
        add(engine, name, [*SYSTEM, ord(name) % 40], greedy(3, ignore_eos=True))
    step(engine)
    assert (len(engine.scheduler.running), engine.pool.num_free) == (8, 0)
    assert cached_tokens(engine) == [0] + [20] * 7
    assert engine.stats.num_preemptions == 0
