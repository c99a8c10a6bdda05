"""Our matrix products on a CPU: right for every number of rows, and no row's result depends on the others."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import After
from minipaged.cpu.modules import CompiledHead, CompiledLinear, CompiledRMSNorm
from minipaged.cpu.packing import in_panels
from minipaged.model.llama import RMSNorm

pytestmark = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
    ),
    pytest.mark.usefixtures("every_way"),
]
DTYPES = [torch.float32, torch.bfloat16]
# Vectors take up to 12 rows at once, AMX 16 or twice 16; 224 or 240 rows meet a panel before the next one.
ROWS = [*range(1, 41), 48, 65, 223, 224, 225, 239, 240, 241, 500]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # of the last step, relative to the largest result


def operands(rows: int, columns: int = 96, depth: int = 70, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, depth, generator=generator).to(dtype) for n in (rows, columns))
    return x, weight


def linear(weight: torch.Tensor, after: After = After.ROUND) -> CompiledLinear:
    return CompiledLinear(weight, cpu_kernels.load(), after)


def require_close(ours: torch.Tensor, exact: torch.Tensor, error: float) -> None:
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max() <= error * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows_equals_float64(dtype, rows):
    x, weight = operands(rows, dtype=dtype)
    exact = x.double() @ weight.double().T
    ours = linear(weight)(x)
    assert ours.dtype == dtype
    require_close(ours, exact, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [2, 16, 30, 32, 34, 62, 64, 66, 96, 130, 576])
def test_every_depth_equals_float64(dtype, depth):
    """AMX takes 32 bfloat16 of the depth at a time."""
    for rows in (1, 16, 17, 33):
        x, weight = operands(rows, columns=64, depth=depth, dtype=dtype)
        require_close(linear(weight)(x), x.double() @ weight.double().T, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_can_be_kept_in_float32(dtype):
    x, weight = operands(7, dtype=dtype)
    ours = linear(weight, After.KEEP_FLOAT32)(x)
    assert ours.dtype == torch.float32
    require_close(ours, x.double() @ weight.double().T, ROUNDING[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 13, 33, 241])
def test_sums_are_added_to_what_is_there(dtype, rows):
    x, weight = operands(rows, dtype=dtype)
    there = torch.randn(rows, len(weight)).to(dtype)
    exact = there.double() + x.double() @ weight.double().T
    out = there.clone()
    assert linear(weight, After.ADD)(x, out) is out
    require_close(out, exact, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 13, 33, 241])
def test_gates_meet_their_ups(dtype, rows):
    x, weight = operands(rows, dtype=dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    require_close(linear(weight, After.GATE)(x), F.silu(gate) * up, 2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 13, 239, 240, 241, 500])
def test_a_norm_before_the_product_changes_no_bit(dtype, rows):
    x, weight = operands(rows, depth=80, dtype=dtype)
    norm = RMSNorm(80, 1e-5, dtype, "cpu")
    norm.weight.copy_(torch.randn(80))
    kernels = cpu_kernels.load()
    together = CompiledLinear(weight, kernels, norm=norm)(x)
    assert torch.equal(together, linear(weight)(CompiledRMSNorm(norm, kernels)(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 13, 33, 241])
def test_the_place_of_the_largest_sum_is_that_of_the_sums_themselves(dtype, rows):
    x, weight = operands(rows, columns=320, dtype=dtype)
    weight[200:250] = weight[100:150]  # equal sums: the first counts
    head, threads = CompiledHead(weight, cpu_kernels.load()), torch.get_num_threads()
    expected = head(x).argmax(-1)
    assert (expected >= 100).any()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            assert torch.equal(head.argmax(x), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_row_with_a_sum_that_is_not_finite_has_no_largest(bad):
    x, weight = operands(5)
    head = CompiledHead(weight, cpu_kernels.load())
    right = head.argmax(x)
    x[3] = float(bad)
    places = head.argmax(x)
    assert places[3] == -1
    assert torch.equal(places[[0, 1, 2, 4]], right[[0, 1, 2, 4]])


def test_the_largest_of_negative_and_of_equal_sums():
    weight = torch.full((96, 2), -1.0)
    assert CompiledHead(weight, cpu_kernels.load()).argmax(torch.ones(3, 2)).tolist() == [0, 0, 0]
    weight[70] = -0.5
    assert CompiledHead(weight, cpu_kernels.load()).argmax(torch.ones(3, 2)).tolist() == [70, 70, 70]
    assert CompiledHead(weight, cpu_kernels.load()).argmax(torch.zeros(2, 2)).tolist() == [0, 0]
    lowest = torch.finfo(torch.float32).min
    weight = torch.tensor([[lowest, 0.0]]).expand(96, 2).contiguous()
    assert CompiledHead(weight, cpu_kernels.load()).argmax(torch.ones(2, 2)).tolist() == [0, 0]


def test_gates_far_from_zero_do_not_become_nan():
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    weight = torch.full((32, 2), 1000.0)
    out = linear(weight, After.GATE)(x)
    torch.testing.assert_close(out, torch.tensor([[1e6], [0.0]]).expand(2, 16))
    assert linear(weight, After.GATE)(x * torch.nan).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("after", [After.ROUND, After.GATE, After.KEEP_FLOAT32])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(dtype, after):
    x, weight = operands(300, columns=192, dtype=dtype)
    product, threads = linear(weight, after), torch.get_num_threads()
    whole = product(x)
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            for begin, end in ((0, 1), (5, 18), (5, 37), (11, 300), (299, 300)):
                assert torch.equal(product(x[begin:end]), whole[begin:end])
    finally:
        torch.set_num_threads(threads)


def test_panels_hold_every_number_in_the_order_in_which_it_is_read():
    weight = torch.arange(64.0 * 6).view(64, 6)
    packed = in_panels(weight)
    assert packed.shape == (2, 6, 32, 1)
    assert packed[1, 4, 3, 0] == weight[32 + 3, 4]
    halves = in_panels(weight.bfloat16())
    assert halves.shape == (2, 3, 32, 2)
    assert torch.equal(halves[1, 2, 3], weight.bfloat16()[32 + 3, 4:6])
    gated = in_panels(weight, gated=True)
    assert gated[1, 4, 3, 0] == weight[16 + 3, 4]
    assert gated[1, 4, 16 + 3, 0] == weight[32 + 16 + 3, 4]


@pytest.mark.parametrize("shape", [(48, 6), (64, 5)])
def test_a_weight_that_is_not_made_of_whole_panels_and_words_is_refused(shape):
    with pytest.raises(ValueError, match=f"{shape[0]}, {shape[1]}.*32, 2"):
        in_panels(torch.zeros(shape, dtype=torch.bfloat16))


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"71.*takes 70"):
        linear(operands(1)[1])(torch.zeros(3, 71))


def test_rows_that_lie_apart_are_read_right():
    x, weight = operands(5)
    apart = torch.stack((x, -x), dim=1)[:, 0]
    assert not apart.is_contiguous()
    assert torch.equal(linear(weight)(apart), linear(weight)(x))


def test_no_rows_give_no_rows():
    assert linear(operands(1)[1])(torch.zeros(0, 70)).shape == (0, 96)
