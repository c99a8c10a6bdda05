"""Compiled norms and rotations: the same model, and the plain formulas where there are no kernels."""

import shutil
from dataclasses import replace

import pytest
import torch

from minipaged.attention import cpu_kernel
from minipaged.model.compiled import CompiledRMSNorm, use_compiled_kernels
from minipaged.model.llama import RMSNorm, rotate
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import logits_of

IDS = list(range(3, 40))
WIDE = replace(TINY, hidden_size=64, num_query_heads=4, num_kv_heads=2, head_size=32)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
# Of bfloat16 the last of 8 bits may differ: torch rounds after each operation, the kernel once.
TOLERANCES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)]


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_a_compiled_model_gives_the_same_logits(dtype, tolerance):
    expected = logits_of(random_llama(WIDE, dtype=dtype), IDS)
    model = random_llama(WIDE, dtype=dtype)
    assert use_compiled_kernels(model)
    ours = logits_of(model, IDS)
    assert (ours - expected).norm() <= 2 * tolerance * expected.norm()


@needs_compiler
def test_every_norm_and_rotation_is_replaced_and_twice_changes_nothing():
    model = random_llama(WIDE)
    assert use_compiled_kernels(model)
    norms = [module for module in model.modules() if isinstance(module, CompiledRMSNorm)]
    assert len(norms) == 2 * WIDE.num_layers + 1
    assert all(layer.attention.rotate is not rotate for layer in model.layers)
    assert use_compiled_kernels(model)
    assert [module for module in model.modules() if isinstance(module, CompiledRMSNorm)] == norms


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 576), (100, 576)])
def test_the_norm_equals_torch(dtype, tolerance, rows, size):
    plain = RMSNorm(size, 1e-5, dtype, "cpu")
    generator = torch.Generator().manual_seed(0)
    plain.weight.copy_(torch.randn(size, generator=generator))
    x = (torch.randn(rows, size, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    ours = CompiledRMSNorm(plain, cpu_kernel.load())(x)
    torch.testing.assert_close(ours, plain(x), rtol=tolerance, atol=0)


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 12, 64), (7, 5, 128), (200, 12, 64)])
def test_the_rotation_equals_torch_and_leaves_the_values_alone(dtype, tolerance, rows, heads, size):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(rows, heads + 3, size, generator=generator).to(dtype)
    angles = 1000 * torch.rand(rows, 1, size // 2, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected, rest = rotate(whole[:, :heads], cos, sin), whole[:, heads:].clone()
    turned = cpu_kernel.load().rotate(whole[:, :heads], cos, sin)
    assert (turned.float() - expected.float()).norm() <= tolerance * expected.float().norm()
    assert torch.equal(whole[:, heads:], rest)


def test_dtypes_and_sizes_that_the_kernels_do_not_know_are_left_alone():
    for model in (random_llama(TINY), random_llama(WIDE, dtype=torch.float16)):
        assert not use_compiled_kernels(model)
        assert not any(isinstance(module, CompiledRMSNorm) for module in model.modules())
