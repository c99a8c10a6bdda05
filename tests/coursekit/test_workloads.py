import numpy as np
import pytest

from coursekit import workloads
from coursekit.workloads import azure_lengths, load_mix, lognormal_lengths


@pytest.mark.parametrize(
    ("name", "count", "tokens_in", "tokens_out"),
    [("chat48", 48, 2478, 4265), ("instruct64", 64, 1142, 2237)],
)
def test_a_mix_has_the_requests_it_says(name, count, tokens_in, tokens_out):
    mix = load_mix(name)
    assert len(mix) == len({request.id for request in mix}) == count
    assert sum(len(request.prompt_token_ids) for request in mix) == tokens_in
    assert sum(request.max_tokens for request in mix) == tokens_out
    assert all(0 <= token < 49152 for request in mix for token in request.prompt_token_ids)


@pytest.mark.parametrize(
    ("trace", "count", "means"), [("conv", 19366, (1155, 211)), ("code", 8819, (2048, 28))]
)
def test_azure_lengths_are_the_published_ones(trace, count, means):
    lengths = azure_lengths(trace)
    assert lengths.shape == (count, 2) and lengths.dtype == np.int64
    assert tuple(np.rint(lengths.mean(axis=0))) == means
    assert lengths.min() >= 1


def test_azure_lengths_keep_the_order_of_arrival():
    assert azure_lengths("conv")[:2].tolist() == [[374, 44], [396, 109]]


@pytest.mark.parametrize("workload", ["sharegpt", "alpaca"])
def test_drawn_lengths_have_the_papers_means(workload):
    lengths = lognormal_lengths(workload, 20_000, seed=0)
    assert np.allclose(lengths.mean(axis=0), workloads.PAPER_MEANS[workload], rtol=0.06)
    assert lengths.min() >= 1 and lengths.sum(axis=1).max() <= workloads.PAPER_MAX_LEN


def test_drawn_lengths_depend_on_the_seed_alone():
    first = lognormal_lengths("alpaca", 50, seed=3)
    assert np.array_equal(first, lognormal_lengths("alpaca", 50, seed=3))
    assert not np.array_equal(first, lognormal_lengths("alpaca", 50, seed=4))


def test_the_spread_is_close_to_that_of_real_conversations():
    spread = np.log(azure_lengths("conv")).std(axis=0)
    assert np.allclose(spread, [0.99, 0.86], atol=0.005)
    assert np.allclose(spread, workloads.LENGTH_SIGMA, atol=0.15)


@pytest.mark.parametrize("load", [load_mix, azure_lengths, lambda name: lognormal_lengths(name, 1, 0)])
def test_an_unknown_name_is_refused_by_name(load):
    with pytest.raises(ValueError, match="'nothing'"):
        load("nothing")
