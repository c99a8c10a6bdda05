"""Prefix hits through the engine: at least one token is computed, only stored blocks are offered, and answers
are those of a cold engine."""

import pytest
from fake_model import HashModel, alone, greedy, make_engine, poison, run, serve, step, tokens_of

from minipaged.cache import hash_blocks
from minipaged.engine.engine import Engine
from minipaged.sampling_params import SamplingParams

FOUR = greedy(4, ignore_eos=True)


def warm_engine(model: HashModel | None = None, **settings) -> Engine:
    return make_engine(model=model, enable_prefix_caching=True, **settings)


def hits(engine: Engine, prompt: list[int]) -> int:
    """Tokens of `prompt` that a request added now would find."""
    return 4 * len(engine.pool.lookup(hash_blocks(prompt, 4)))


def ask(engine: Engine, name: str, prompt: list[int], params: SamplingParams = FOUR) -> tuple[list[int], int]:
    """Serve one request; its tokens and how many prompt tokens were cached."""
    engine.add_request(name, prompt, params)
    output = run(engine)[name]
    return tokens_of(output)[0], output.num_cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (7, 4), (3, 0), (4, 0), (12, 8)])
def test_a_prompt_that_is_cached_whole_still_computes_its_end(length: int, cached: int) -> None:
    """8 tokens twice: 4 cached, not 8, for one must be computed; 9 tokens: 8. The third time as well."""
    prompt = list(range(1, length + 1))
    expected = alone(prompt, FOUR)[0]
    engine = warm_engine()
    assert ask(engine, "cold", prompt) == (expected, 0)
    assert ask(engine, "warm", prompt) == (expected, cached)
    longer = [*prompt, *expected]  # the chain goes on behind the shared block, through the output
    assert hits(engine, longer) == (length + 3) // 4 * 4  # the last token sampled was never stored
    assert ask(engine, "longer", longer)[0] == alone(longer, FOUR)[0]


def test_a_hit_starts_at_the_right_position_and_reads_the_cached_keys() -> None:
    """A prompt of 10, then the same with one more token: computed from position 8, same answer as
    cold."""
    model = HashModel()
    engine = warm_engine(model)
    prompt = list(range(1, 11))
    ask(engine, "a", prompt)
    model.steps.clear()
    longer = [*prompt, 33]
    assert ask(engine, "b", longer) == (alone(longer, FOUR)[0], 8)
    assert model.steps[0] == [(8, 3)]


def test_two_equal_prompts_in_one_batch_agree() -> None:
    """Neither may read what the other has not stored yet."""
    prompt = list(range(1, 11))
    assert serve(warm_engine(), [prompt, prompt], FOUR) == alone(prompt, FOUR) * 2


def test_blocks_are_offered_only_when_their_tokens_are_stored() -> None:
    """A prompt of 12 with budget 6: after the first step one block can be hit, not two or three."""
    engine = warm_engine(max_num_batched_tokens=6, max_num_seqs=2)
    prompt = list(range(1, 13))
    engine.add_request("a", prompt, FOUR)
    assert hits(engine, prompt) == 0
    step(engine)
    assert hits(engine, prompt) == 4
    step(engine)
    assert hits(engine, prompt) == 12
    run(engine)


def test_an_aborted_request_offers_nothing_it_did_not_compute() -> None:
    """Aborted before its first step, and by an error in it: no hit."""
    engine = warm_engine()
    prompt = list(range(1, 13))
    engine.add_request("a", prompt, FOUR)
    engine.abort_request("a")
    assert hits(engine, prompt) == 0
    engine.add_request("b", prompt, FOUR)
    engine.runner.model = lambda *args: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert hits(engine, prompt) == 0
    engine.abort_request("b")


def test_a_partly_filled_block_is_not_offered_until_decoding_fills_it() -> None:
    """A prompt of 6: one block; token 8 is sampled in the second step and stored in the third."""
    engine = warm_engine()
    prompt = [1, 2, 3, 4, 5, 6]
    tokens = prompt + alone(prompt, FOUR)[0]
    engine.add_request("a", prompt, FOUR)
    found = []
    while engine.has_unfinished_requests():
        step(engine)
        found.append(hits(engine, tokens))
    assert found == [4, 4, 8, 8]


def test_a_request_that_was_preempted_finds_its_own_blocks() -> None:
    engine = warm_engine()
    engine.add_request("a", list(range(1, 10)), FOUR)
    for _ in range(3):
        step(engine)
    engine.scheduler.preempt_youngest()
    model = engine.runner.model
    assert isinstance(model, HashModel)
    model.steps.clear()
    output = run(engine)["a"]
    assert model.steps[0] == [(8, 4)]
    assert tokens_of(output) == alone(range(1, 10), FOUR)
    assert output.num_cached_tokens == 0  # of the prompt, when it first ran


def test_an_heir_offers_its_blocks_under_its_own_names() -> None:
    """Two samples are preempted, and the one that computes their prompt again is aborted: the other takes the
    prompt over, not the names of the blocks that the first one's output filled."""
    engine = warm_engine()
    engine.add_request("x", [5, 6, 7, 8, 9], SamplingParams(n=2, seed=3, max_tokens=24, ignore_eos=True))
    for _ in range(10):
        step(engine)
    first, heir = engine.requests["x"].samples
    assert first.tokens[:16] != heir.tokens[:16]
    assert engine.reset_prefix_cache(reset_running_requests=True)
    engine.abort_request("x", 0)
    run(engine)
    assert hits(engine, first.tokens) == 4  # what both begin with
    assert hits(engine, heir.tokens) == 28
    prompt = first.tokens[:13]
    assert ask(engine, "y", prompt) == (alone(prompt, FOUR)[0], 4)


def test_a_salt_keeps_requests_apart() -> None:
    engine = warm_engine()
    prompt = list(range(1, 10))
    cached = []
    for i, salt in enumerate(["one", "one", "two", None]):
        engine.add_request(str(i), {"prompt_token_ids": prompt, "cache_salt": salt}, FOUR)
        output = run(engine)[str(i)]
        cached.append(output.num_cached_tokens)
        assert tokens_of(output) == alone(prompt, FOUR)
    assert cached == [0, 8, 0, 0]


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    """It takes no hit, others may hit its blocks, and a later one like it takes none either."""
    engine = warm_engine()
    prompt = list(range(1, 14))
    scored = greedy(4, ignore_eos=True, prompt_logprobs=1)
    cached = [ask(engine, str(i), prompt, p)[1] for i, p in enumerate([scored, FOUR, scored])]
    assert cached == [0, 12, 0]


def test_reset_is_refused_while_blocks_are_held() -> None:
    """False and nothing cleared; when idle, True and no block keeps a hash."""
    engine = warm_engine()
    prompt = list(range(1, 10))
    ask(engine, "a", prompt)
    engine.add_request("b", prompt, FOUR)
    step(engine)
    assert engine.reset_prefix_cache() is False
    assert hits(engine, prompt) == 8
    run(engine)
    assert engine.reset_prefix_cache() is True
    assert hits(engine, prompt) == 0
    assert not any(engine.pool.is_published(block) for block in range(engine.pool.num_blocks))


def test_a_forced_reset_pushes_running_requests_back_in_order() -> None:
    """They lose their blocks, not their tokens; the queue keeps its order."""
    engine = warm_engine()
    for name in "abc":
        engine.add_request(name, [ord(name) % 40] * 9, FOUR)
    step(engine)
    step(engine)
    engine.add_request("d", [4] * 9, FOUR)
    assert engine.reset_prefix_cache(reset_running_requests=True) is True
    assert [request.request_id for request in engine.scheduler.waiting] == list("abcd")
    engine.check_invariants()
    poison(engine)
    outputs = run(engine)
    assert {n: tokens_of(outputs[n]) for n in "abc"} == {n: alone([ord(n) % 40] * 9, FOUR) for n in "abc"}


def test_a_request_is_counted_once_however_often_it_is_tried_and_comes_back() -> None:
    """It waits several steps for blocks, and is preempted: neither asks the statistics again."""
    engine = make_engine(num_blocks=6, enable_prefix_caching=True)
    for name in "abc":
        engine.add_request(name, [ord(name) % 40] * 9, greedy(8, ignore_eos=True))
    outputs = run(engine)
    assert engine.stats.num_recomputes > 0
    assert max(o.metrics.first_scheduled_time - o.metrics.arrival_time for o in outputs.values()) > 1
    assert (engine.stats.prefix.queries, engine.stats.prefix.hits) == (27, 0)
    assert [o.num_cached_tokens for o in outputs.values()] == [0, 0, 0]


def test_hits_are_counted_in_tokens() -> None:
    engine = warm_engine()
    prompt = list(range(1, 11))
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    prefix = engine.stats.prefix
    assert (prefix.queries, prefix.hits, prefix.hit_rate) == (20, 8, 0.4)
