"""From logits to tokens: C27, C28, and the sampling half of C24."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minipaged.engine.sampler import BadLogitsError, SamplingState, probabilities, sample
from minipaged.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def state(params: SamplingParams, name: str = "r", **fields) -> SamplingState:
    return SamplingState.make(name, params, **fields)


def choose(logits, *params: SamplingParams) -> list[int]:
    return sample(torch.tensor(logits), [state(p) for p in params]).token_ids


def kept(probs, **settings) -> list[int]:
    """Token ids that can still be drawn."""
    row = probabilities(torch.tensor([probs]).log(), [SamplingParams(**settings)])[0]
    assert row.sum().item() == pytest.approx(1, abs=1e-12)
    return row.nonzero()[:, 0].tolist()


# Greedy


def test_temperature_zero_takes_the_lowest_of_tied_tokens_alone_and_beside_a_drawn_row():
    assert choose([[1.0, 1, 0]], GREEDY) == [0]
    for seed in range(20):
        assert choose([[1.0, 1, 0], [1.0, 1, 0]], SamplingParams(seed=seed), GREEDY)[1] == 0
    assert choose([[0.0] + [5.0] * 4096], GREEDY) == [1]


def test_filters_do_not_matter_to_a_greedy_row():
    greedy = SamplingParams(temperature=0, top_p=0.9, top_k=2, min_p=0.5)
    assert choose([[2.0, 1, 0]], greedy) == [0]


def test_huge_logits_give_no_nan():
    row = [1e4, -1e4, 0.0]
    assert choose([row, row], GREEDY, SamplingParams(temperature=0.01)) == [0, 0]
    huge = [3e38, -3e38, 0.0]
    assert choose([huge], SamplingParams(temperature=0.01, seed=1, top_p=0.5)) == [0]


def test_no_random_number_is_drawn_for_a_greedy_row(monkeypatch):
    monkeypatch.setattr(SamplingState, "uniform", lambda self: pytest.fail(f"drew for {self.request_id}"))
    before = torch.get_rng_state()
    penalised = SamplingParams(temperature=0, repetition_penalty=1.5)
    assert choose([[1.0, 2, 0]] * 2, GREEDY, penalised) == [1, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_drawing_leaves_torchs_own_random_state_alone():
    before = torch.get_rng_state()
    choose([[1.0, 2, 0]], SamplingParams())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, logprobs=1)])
def test_bad_logits_name_the_request(bad, params):
    logits = torch.tensor([[0.0, 1, 2], [0.0, bad, 2]])
    with pytest.raises(BadLogitsError, match=f"'b'.*row 1.*{bad}") as error:
        sample(logits, [state(params, "a"), state(params, "b")])
    assert error.value.row == 1


def test_a_row_without_any_allowed_token_is_an_error_and_not_token_zero():
    with pytest.raises(BadLogitsError, match="-inf"):
        choose([[-math.inf] * 3], SamplingParams())
    with pytest.raises(BadLogitsError, match="-inf"):  # min_tokens forbids all there is
        sample(torch.zeros(1, 2), [state(SamplingParams(min_tokens=1), eos_token_ids=[0, 1])])


def test_a_token_at_minus_infinity_is_never_drawn(monkeypatch):
    for number in (0.0, 0.3, 1 - 2**-53):
        monkeypatch.setattr(SamplingState, "uniform", lambda self, number=number: number)
        for settings in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.01}):
            token = choose([[-math.inf, 1.0, -math.inf, 1.0, -math.inf]], SamplingParams(**settings))[0]
            assert token in (1, 3)


# Filters


def test_top_k_is_renormalised_before_top_p():
    probs = [0.15, 0.15, 0.14, 0.14, 0.14, 0.14, 0.14]
    assert kept(probs, top_k=1, top_p=0.8) == [0]
    assert choose([np.log(probs).tolist()], SamplingParams(top_k=1, top_p=0.8)) == [0]
    assert kept([0.5, 0.3, 0.2], top_k=2, top_p=0.6) == [0]  # 0.5 of 0.8 reaches 0.6


@pytest.mark.parametrize(
    ("top_p", "count"), [(1e-9, 1), (0.3, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1, 3)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, count):
    assert kept([0.5, 0.3, 0.2], top_p=top_p) == list(range(count))


@pytest.mark.parametrize("off", [0, -1, None, 3, 4, 1000])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(off):
    assert kept([0.5, 0.3, 0.2], top_k=off) == [0, 1, 2]


def test_top_k_keeps_exactly_k_and_of_tied_tokens_the_lowest():
    assert kept([0.1, 0.2, 0.3, 0.2, 0.2], top_k=2) == [1, 2]
    assert kept([0.1, 0.2, 0.3, 0.2, 0.2], top_k=3) == [1, 2, 3]
    assert kept([0.25] * 4, top_p=0.5) == [0, 1]


def test_min_p_drops_what_is_far_below_the_best():
    assert kept([0.5, 0.3, 0.1, 0.1], min_p=0.5) == [0, 1]
    assert kept([0.5, 0.3, 0.1, 0.1], min_p=1.0) == [0]
    assert kept([0.5, 0.3, 0.1, 0.1], min_p=0.15) == [0, 1, 2, 3]


def test_min_p_comes_before_top_p():
    assert kept([0.5, 0.2, 0.1, 0.1, 0.1], top_p=0.75) == [0, 1, 2]
    assert kept([0.5, 0.2, 0.1, 0.1, 0.1], top_p=0.72, min_p=0.3) == [0, 1]  # 0.5 of 0.7 falls short


def reference_kept(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """One row, one filter after another, in plain numpy."""
    order = np.argsort(-logits, kind="stable")
    weight = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    count = int((weight >= min_p).sum())
    count = min(count, top_k or len(order))
    reached = np.cumsum(weight[:count]) / weight[:count].sum() >= top_p
    return set(order[: int(np.argmax(reached)) + 1 if top_p < 1 else count].tolist())


@given(
    vocab_size=st.sampled_from([3, 128, 129, 700]),
    spread=st.sampled_from([0.02, 1.0, 4.0]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0]),
            st.sampled_from([0, 1, 5, 200]),
            st.sampled_from([0.07, 0.5, 0.937, 1.0]),
            st.sampled_from([0.0, 0.0, 0.013, 0.3]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**16),
)
def test_mixed_filters_in_one_batch_keep_what_each_keeps_alone(vocab_size, spread, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * spread
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in rows]
    together = probabilities(logits, params)
    for row, settings in enumerate(rows):
        alone = probabilities(logits[row : row + 1], [params[row]])[0]
        assert torch.equal(together[row] > 0, alone > 0)
        assert set(alone.nonzero()[:, 0].tolist()) == reference_kept(logits[row].numpy(), *settings)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_filters_equal_the_transformers_processors(temperature):
    logits = torch.randn(8, 500) * 3
    scaled = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    for warper, settings in (
        (TopKLogitsWarper(17), {"top_k": 17}),
        (TopPLogitsWarper(0.83), {"top_p": 0.83}),
        (MinPLogitsWarper(0.04), {"min_p": 0.04}),
    ):
        expected = warper(None, scaled.clone()).softmax(dim=-1)
        found = probabilities(logits, [SamplingParams(temperature=temperature, **settings)] * 8)
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-7)
        assert torch.equal(found > 0, expected > 0)


# Penalties and minimum length


def greedy_after_penalties(logits: torch.Tensor, params: SamplingParams, prompt, output) -> list[int]:
    """The order of the penalised logits, read through the sampler: who wins when the winners are removed."""
    logits, order = logits.clone(), []
    for _ in range(logits.shape[1]):
        made = state(params, prompt_token_ids=prompt, output_token_ids=output)
        token = sample(logits, [made]).token_ids[0]
        order.append(token)
        logits[0, token] = -math.inf
        if bool((logits == -math.inf).all()):
            return order
    return order


def test_repetition_penalty_equals_the_transformers_processor():
    prompt, output = [1, 2, 2, 7], [7, 9]
    logits = torch.randn(1, 12) * 2
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt + output]), logits.clone())
    params = SamplingParams(temperature=0, repetition_penalty=1.8)
    found = greedy_after_penalties(logits, params, prompt, output)
    assert found == expected[0].argsort(descending=True, stable=True).tolist()
    assert found != logits[0].argsort(descending=True, stable=True).tolist()


def test_frequency_and_presence_look_at_the_output_only():
    logits = torch.tensor([[3.0, 2.9, 2.8, 2.7]])
    frequency = SamplingParams(temperature=0, frequency_penalty=0.25)
    assert greedy_after_penalties(logits, frequency, [2, 2], [0, 0, 1]) == [2, 3, 1, 0]
    presence = SamplingParams(temperature=0, presence_penalty=0.25)
    assert greedy_after_penalties(logits, presence, [2, 2], [0, 0, 1]) == [2, 0, 3, 1]
    reward = SamplingParams(temperature=0, presence_penalty=-2.0)
    assert greedy_after_penalties(logits, reward, [], [3]) == [3, 0, 1, 2]


def test_penalties_of_one_row_leave_its_neighbours_alone():
    logits = torch.tensor([[3.0, 2.9]]).repeat(3, 1)
    strict = SamplingParams(temperature=0, repetition_penalty=2.0)
    rows = [state(p, prompt_token_ids=[0], output_token_ids=[]) for p in (GREEDY, strict, GREEDY)]
    assert sample(logits, rows).token_ids == [0, 1, 0]


def test_no_stop_token_can_be_chosen_before_min_tokens():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1, 9000])
    output: list[int] = []
    made = state(params, output_token_ids=output, eos_token_ids=[0])
    for expected in (2, 2, 0):
        assert sample(logits, [made]).token_ids == [expected]
        output.append(expected)


def test_logits_are_not_changed():
    logits = torch.randn(3, 50)
    before = logits.clone()
    busy = SamplingParams(top_p=0.5, min_tokens=1, repetition_penalty=1.3, logprobs=2, seed=0)
    rows = [
        state(p, eos_token_ids=[3], prompt_token_ids=[1]) for p in (busy, GREEDY, SamplingParams(top_k=2))
    ]
    sample(logits, rows)
    assert torch.equal(logits, before)


# Random numbers


def test_ten_thousand_draws_lie_within_three_sigma():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, -math.inf]])
    for settings in ({}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.1}):
        rows = [state(SamplingParams(seed=seed, **settings)) for seed in range(10_000)]
        counts = torch.bincount(torch.tensor(sample(logits.expand(10_000, 6), rows).token_ids), minlength=6)
        probs = probabilities(logits, [rows[0].params])[0]
        sigma = (10_000 * probs * (1 - probs)).sqrt()
        assert ((counts - 10_000 * probs).abs() <= 3 * sigma).all(), (settings, counts, probs)


def test_draws_at_successive_positions_are_independent_of_each_other():
    output: list[int] = []
    made = state(SamplingParams(seed=5), output_token_ids=output)
    numbers = []
    for _ in range(4000):
        numbers.append(made.uniform())
        output.append(0)
    x = np.array(numbers)
    assert x.min() >= 0 and x.max() < 1
    assert abs(x.mean() - 0.5) < 3 / math.sqrt(12 * 4000)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 3 / math.sqrt(4000)


def draw_sequence(seed: int | None, length: int, *, index: int = 0, neighbours: int = 0) -> list[int]:
    """Tokens of one sequence over steps whose logits depend on its length, beside unseeded neighbours."""
    output: list[int] = []
    made = state(SamplingParams(seed=seed, top_p=0.95), output_token_ids=output, index=index)
    for _ in range(length):
        logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(len(output)))
        others = [state(SamplingParams(top_k=7, temperature=0.7)) for _ in range(neighbours)]
        batch = torch.cat([torch.randn(neighbours, 300), logits])
        output.append(sample(batch, [*others, made]).token_ids[-1])
    return output


def test_a_seeded_request_draws_the_same_whoever_runs_beside_it():
    alone = draw_sequence(11, 30)
    assert draw_sequence(11, 30) == alone
    assert draw_sequence(11, 30, neighbours=5) == alone
    assert draw_sequence(12, 30) != alone
    assert draw_sequence(-11, 30) != alone


def test_the_samples_of_one_request_differ():
    assert draw_sequence(11, 30, index=1) != draw_sequence(11, 30, index=0)


def test_a_sequence_taken_up_again_draws_what_it_would_have_drawn():
    """After preemption a fresh state with the tokens so far goes on as if nothing had happened."""
    logits = torch.randn(12, 300)
    params = SamplingParams(seed=3)
    output: list[int] = []
    for step in range(12):
        output += sample(logits[step : step + 1], [state(params, output_token_ids=output)]).token_ids
    for cut in range(12):
        again = output[:cut]
        for step in range(cut, 12):
            again += sample(logits[step : step + 1], [state(params, output_token_ids=again)]).token_ids
        assert again == output


def test_requests_without_a_seed_draw_fresh_numbers_but_n_samples_can_share_their_entropy():
    assert draw_sequence(None, 20) != draw_sequence(None, 20)
    params = SamplingParams(n=2)
    same = [state(params, entropy=b"x" * 16, index=index) for index in (0, 0, 1)]
    assert same[0].key == same[1].key != same[2].key


def test_a_row_is_the_same_alone_and_in_a_batch_to_the_last_bit():
    logits = torch.randn(40, 5000) * 2
    settings = ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_p": 0.999, "temperature": 2.0})
    params = [SamplingParams(seed=row, **settings[row % 5]) for row in range(40)]
    together = probabilities(logits, params)
    tokens = sample(logits, [state(p) for p in params]).token_ids
    for row in range(40):
        one = logits[row : row + 1]
        assert torch.equal(probabilities(one, [params[row]])[0] > 0, together[row] > 0)
        assert sample(one, [state(params[row])]).token_ids == [tokens[row]]


def test_an_empty_batch_is_no_tokens():
    assert sample(torch.empty(0, 5), []).token_ids == []


# Log-probabilities


def test_logprobs_describe_the_models_own_distribution():
    logits = torch.randn(2, 40) * 2
    busy = SamplingParams(temperature=0.3, top_k=2, logprobs=3, repetition_penalty=1.7, seed=1)
    result = sample(logits, [state(busy, prompt_token_ids=[4, 5]), state(GREEDY)])
    assert result.logprobs is not None and result.logprobs[1] is None
    entry, expected = result.logprobs[0], logits[0].log_softmax(dim=-1)
    assert next(iter(entry)) == result.token_ids[0]
    best = expected.argsort(descending=True).tolist()
    assert set(entry) == {result.token_ids[0], *best[:3]}
    for token, found in entry.items():
        assert found.logprob == pytest.approx(expected[token].item(), abs=1e-6)
        assert found.rank == best.index(token) + 1


def test_no_logprobs_unless_a_row_asks():
    assert sample(torch.randn(1, 9), [state(SamplingParams())]).logprobs is None
    zero = sample(torch.randn(1, 9), [state(SamplingParams(logprobs=0))])
    assert list(zero.logprobs[0]) == zero.token_ids
