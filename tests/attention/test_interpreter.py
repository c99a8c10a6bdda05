"""What Triton's interpreter gets wrong or hides, so that the other tests mean what they say."""

import ast
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import minipaged.attention.kernels
from minipaged.attention import get_backend
from minipaged.attention.kernels.arguments import compute_dtype, padded
from tests.attention.paged import DECODE, dense_attention, make_problem, relative_error

KERNEL_FILES = sorted(Path(minipaged.attention.kernels.__file__).parent.glob("*.py"))


@triton.jit
def product_kernel(out_ptr, a_ptr, b_ptr, WIDEN: tl.constexpr):
    tile = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + tile), tl.load(b_ptr + tile)
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(out_ptr + tile, tl.dot(a, b, input_precision="ieee"))


@triton.jit
def sum_kernel(out_ptr, a_ptr, b_ptr):
    tl.store(out_ptr, (tl.load(a_ptr) + tl.load(b_ptr)).to(tl.float32))


def test_kernels_run_in_the_interpreter_here():
    assert triton.knobs.runtime.interpret


def test_canary_bfloat16_products_in_the_interpreter_are_wrong():
    """Fails when Triton has fixed it. Then `compute_dtype` need not widen bfloat16 any longer."""
    a, b = torch.randint(1, 5, (2, 16, 16)).bfloat16()
    out = torch.zeros(16, 16)
    product_kernel[(1,)](out, a, b, WIDEN=False)
    assert not torch.equal(out, a.float() @ b.float())
    product_kernel[(1,)](out, a, b, WIDEN=True)
    assert torch.equal(out, a.float() @ b.float())


def test_canary_bfloat16_sums_in_the_interpreter_are_wrong():
    """Fails when Triton has fixed it: 2.5 + 2.0 is 4.5, the interpreter adds the bit patterns."""
    out = torch.zeros(1)
    sum_kernel[(1,)](out, torch.tensor([2.5]).bfloat16(), torch.tensor([2.0]).bfloat16())
    assert out.item() != 4.5


def test_bfloat16_is_widened_for_the_interpreter():
    assert compute_dtype(torch.bfloat16) == tl.float32
    assert compute_dtype(torch.float16) == tl.float16


@pytest.mark.parametrize("kernel", DECODE)
def test_bfloat16_is_computed_rightly_all_the_same(kernel):
    problem = make_problem([21, 3], group=3, dtype=torch.bfloat16)
    assert relative_error(DECODE[kernel](problem), dense_attention(problem)) <= 1e-2


def test_products_are_never_smaller_than_what_compiles():
    """The interpreter multiplies single rows; the compiler wants 16 and a power of two."""
    assert [padded(size) for size in (1, 3, 15, 16, 17, 80)] == [16, 16, 16, 16, 32, 128]


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.stem)
def test_every_masked_load_says_what_masked_lanes_read(file):
    """The interpreter reads 0 there; a GPU reads anything."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            given = {keyword.arg for keyword in node.keywords}
            assert ("mask" in given) == ("other" in given), f"{file.name}:{node.lineno}"


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.stem)
def test_every_product_keeps_float32_whole(file):
    """A GPU would round float32 operands to TF32 by default; the interpreter never does."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot":
            precision = [ast.unparse(k.value) for k in node.keywords if k.arg == "input_precision"]
            assert precision == ["'ieee'"], f"{file.name}:{node.lineno}"


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.stem)
def test_kernels_stay_short_enough_to_be_read_aloud(file):
    if "@triton.jit" in file.read_text():
        assert len(file.read_text().splitlines()) < 120


def test_fp8_is_refused_in_the_interpreter():
    """Its conversion to float8 carries into the wrong bits when it rounds up."""
    problem = make_problem([3], kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8_e4m3fn needs sm_89 or newer"):
        get_backend("triton").paged_attention(
            problem.query, problem.layer, problem.batch, scale=problem.scale
        )
