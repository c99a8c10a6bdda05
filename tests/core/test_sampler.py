"""From logits to tokens: greedy is argmax for each row, filters at their edges, and seeds that go on after a
preemption."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
)

from minipaged.core.sampler import (
    BadLogitsError,
    SamplingState,
    probabilities,
    sample,
)
from minipaged.sampling_params import REPETITION_MAX, REPETITION_MIN, SamplingParams

GREEDY = SamplingParams(temperature=0)


def state(params: SamplingParams, name: str = "r", **fields) -> SamplingState:
    return SamplingState.make(name, params, **fields)


def choose(logits, *params: SamplingParams) -> list[int]:
    return sample(torch.tensor(logits), [state(p) for p in params]).token_ids


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


@pytest.mark.parametrize("penalty", [REPETITION_MIN, REPETITION_MAX])
@pytest.mark.parametrize("temperature", [0, 0.01, 2])
def test_the_most_extreme_penalties_still_leave_a_choice(penalty, temperature):
    params = SamplingParams(
        repetition_penalty=penalty, temperature=temperature, frequency_penalty=2, presence_penalty=-2, seed=1
    )
    logits = torch.tensor([[1e6, -1e6, 3.0, 0.0, 1e-30]])
    state = SamplingState.make("a", params, prompt_token_ids=[0, 1, 2, 3, 4], output_token_ids=[2, 2])
    assert sample(logits, [state]).token_ids[0] in range(5)
