"""Log-probabilities, their ranks, and ties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipaged.core.sampler import SamplingState, gather_logprobs, sample, top_k
from minipaged.sampling_params import SamplingParams

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])


def test_the_chosen_token_comes_first_then_the_most_likely_in_falling_order():
    (entry,) = gather_logprobs(LOGITS, [0], 3)
    assert list(entry) == [0, 1, 3, 2]
    assert [found.rank for found in entry.values()] == [4, 1, 2, 3]


def test_a_chosen_token_among_the_best_is_not_listed_twice():
    (entry,) = gather_logprobs(LOGITS, [3], 2)
    assert list(entry) == [3, 1]
    assert entry[3].rank == 1  # tied with the best: nothing is more likely


def test_rows_may_ask_for_different_numbers():
    first, second, third = gather_logprobs(LOGITS.repeat(3, 1), [4, 4, 4], [0, -1, 1])
    assert (list(first), len(second), list(third)) == ([4], 5, [4, 1])


def test_more_than_the_vocabulary_is_all_of_it():
    (entry,) = gather_logprobs(LOGITS, [0], 50)
    assert len(entry) == 5
    total = sum(torch.tensor(found.logprob).exp() for found in entry.values())
    assert total == pytest.approx(1, abs=1e-6)


def test_no_rows_give_no_entries():
    assert gather_logprobs(torch.empty(0, 5), [], 3) == []


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    k=st.integers(0, 6),
)
def test_top_k_orders_equal_values_by_place(rows, k):
    values, places = top_k(torch.tensor(rows, dtype=torch.float32), k)
    for row, found_values, found_places in zip(rows, values.tolist(), places.tolist(), strict=True):
        expected = sorted(range(6), key=lambda place: (-row[place], place))[:k]
        assert found_places == expected
        assert found_values == [row[place] for place in expected]


def test_logprobs_describe_the_models_own_distribution():
    logits = torch.randn(2, 40) * 2
    greedy = SamplingParams(temperature=0)
    busy = SamplingParams(temperature=0.3, top_k=2, logprobs=3, repetition_penalty=1.7, seed=1)
    result = sample(
        logits, [SamplingState.make("a", busy, prompt_token_ids=[4, 5]), SamplingState.make("b", greedy)]
    )
    assert result.logprobs is not None and result.logprobs[1] is None
    entry, expected = result.logprobs[0], logits[0].log_softmax(dim=-1)
    assert next(iter(entry)) == result.token_ids[0]
    best = expected.argsort(descending=True).tolist()
    assert set(entry) == {result.token_ids[0], *best[:3]}
    for token, found in entry.items():
        assert found.logprob == pytest.approx(expected[token].item(), abs=1e-6)
        assert found.rank == best.index(token) + 1


def test_no_logprobs_unless_a_row_asks():
    assert sample(torch.randn(1, 9), [SamplingState.make("r", SamplingParams())]).logprobs is None
    zero = sample(torch.randn(1, 9), [SamplingState.make("r", SamplingParams(logprobs=0))])
    assert list(zero.logprobs[0]) == zero.token_ids
