"""min-p, top-k and top-p: at least one token stays, the one that crosses top_p among them; off means off."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minipaged.core.sampler import SamplingState, probabilities, sample
from minipaged.sampling_params import SamplingParams


def kept(probs, **settings) -> list[int]:
    """Token ids that can still be drawn."""
    row = probabilities(torch.tensor([probs]).log(), [SamplingParams(**settings)])[0]
    assert row.sum().item() == pytest.approx(1, abs=1e-12)
    return row.nonzero()[:, 0].tolist()


def test_top_k_is_renormalised_before_top_p():
    probs = [0.15, 0.15, 0.14, 0.14, 0.14, 0.14, 0.14]
    assert kept(probs, top_k=1, top_p=0.8) == [0]
    drawn = sample(torch.tensor([probs]).log(), [SamplingState.make("r", SamplingParams(top_k=1, top_p=0.8))])
    assert drawn.token_ids == [0]
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
