"""Where each row of logits is largest: what torch finds, and what is refused."""

import math

import pytest
import torch

from minipaged.core.sampler import BadLogitsError, argmax, checked_argmax

SIZES = [1, 7, 16, 256, 257, 768, 769]


def find(x: torch.Tensor) -> torch.Tensor:
    return checked_argmax(x, lambda row: f"request {row}")


def ties(vocab_size: int, num_values: int) -> torch.Tensor:
    """Whole numbers from `num_values` different ones, some of them negative: many ties."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randint(num_values, (40, vocab_size), generator=generator).float() - num_values // 2


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_values", [1, 2, 1000])
def test_of_equals_the_first_is_found(vocab_size, num_values):
    x = ties(vocab_size, num_values)
    x[1] = -x[1].abs() - 1  # negative only
    x[2] = torch.where(x[2] > 0, 0.0, -0.0)  # zeros of both signs are equal
    x[3, 1:] = -torch.inf
    assert torch.equal(find(x), x.argmax(dim=-1))
    assert torch.equal(find(x[:1]), x[:1].argmax(dim=-1))
    assert find(x[:0]).tolist() == []


@pytest.mark.parametrize("vocab_size", SIZES)
def test_extreme_numbers_keep_their_order(vocab_size):
    limits = torch.finfo(torch.float32)
    values = torch.tensor([-limits.max, -1.0, -limits.tiny, -1e-45, 0.0, 1e-45, limits.tiny, 1.0, limits.max])
    x = torch.full((len(values), vocab_size), -limits.max)
    x[:, vocab_size // 2] = values
    expected = [0, *[vocab_size // 2] * (len(values) - 1)]
    assert find(x).tolist() == expected


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_the_first_row_whose_largest_is_not_finite_is_named(vocab_size, bad):
    x = ties(vocab_size, 5)
    x[17, vocab_size // 2], x[30, 0] = bad, math.nan
    with pytest.raises(BadLogitsError, match=f"'request 17'.*row 17 is {abs(bad)}") as error:
        find(x)
    assert (error.value.request_id, error.value.row) == ("request 17", 17)


def test_nothing_but_minus_infinity_is_refused():
    with pytest.raises(BadLogitsError, match="row 1 is -inf"):
        find(torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]))


def test_rows_that_do_not_lie_densely_are_read_right():
    x = ties(512, 50)
    assert torch.equal(find(x[:, ::2]), x[:, ::2].argmax(dim=-1))
    assert torch.equal(find(x.T), x.T.argmax(dim=-1))


def test_any_number_of_threads_finds_the_same():
    x, threads = ties(777, 9), torch.get_num_threads()
    x[3], x[39] = math.nan, math.inf
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            assert torch.equal(find(x[4:39]), x[4:39].argmax(dim=-1))
            with pytest.raises(BadLogitsError, match="row 3"):
                find(x)
    finally:
        torch.set_num_threads(threads)


def test_a_row_whose_largest_is_not_finite_has_none():
    x = ties(768, 1000)
    x[-3, 261:] = torch.nan  # counts as the largest
    x[-2] = -torch.inf
    x[-1, 5] = torch.inf
    expected = [*x[:-3].argmax(dim=-1).tolist(), -1, -1, -1]
    assert argmax(x).tolist() == expected
    on_a_device = x.to("meta")
    assert argmax(on_a_device).shape == (len(x),)  # what a GPU runs takes the same shapes
