"""A compiled model is the same model, with our products or torch's; without kernels the formulas stay."""

import shutil
from dataclasses import replace

import pytest
import torch

from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.accelerate import accelerate_model, use_compiled_kernels
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.modules import CompiledLayer, CompiledLinear, CompiledRMSNorm, CpuLlama, RotatedInPlace
from minipaged.model.llama import Attention, Linear, RMSNorm, rotate
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import logits_of

IDS = list(range(3, 40))
WIDE = replace(TINY, hidden_size=64, num_query_heads=4, num_kv_heads=2, head_size=32)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
# Of bfloat16 the last of 8 bits may differ: torch rounds after each operation, the kernel once.
TOLERANCES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)]


@pytest.fixture(params=["our products", "torch's products"])
def products(request, every_way, monkeypatch) -> bool:
    """Whether our products are used: as on a processor for which they are fast, or one for which not."""
    ours = request.param == "our products"
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: ours)
    return ours


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_a_compiled_model_gives_the_same_logits(dtype, tolerance, products):
    expected = logits_of(random_llama(WIDE, dtype=dtype), IDS)
    model = use_compiled_kernels(random_llama(WIDE, dtype=dtype))
    assert isinstance(model, CpuLlama)
    ours = logits_of(model, IDS, backend=CpuBackend())
    assert (ours - expected).norm() <= 2 * tolerance * expected.norm()


@needs_compiler
def test_every_norm_rotation_and_product_is_replaced_and_twice_changes_nothing(products):
    model = use_compiled_kernels(random_llama(WIDE))
    modules = list(model.modules())
    norms = 1 if products else 2 * WIDE.num_layers + 1  # a layer's norms are a part of its products
    assert sum(isinstance(module, CompiledRMSNorm) for module in modules) == norms
    assert not any(isinstance(module, RMSNorm) for module in modules)
    assert not any(isinstance(module, Attention) for module in modules)
    assert sum(isinstance(module, RotatedInPlace) for module in modules) == WIDE.num_layers
    assert sum(isinstance(m, CompiledLinear) for m in modules) == (4 * WIDE.num_layers + 1) * products
    assert sum(isinstance(module, Linear) for module in modules) == (4 * WIDE.num_layers + 1) * (not products)
    assert accelerate_model(model) is model
    assert list(model.modules()) == modules


@needs_compiler
def test_the_plain_weights_are_freed_and_the_embedding_stays(monkeypatch):
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: True)
    model = use_compiled_kernels(random_llama(WIDE))
    plain = [name for name, _ in model.named_parameters()]
    assert "embed_tokens.weight" in plain
    assert all("norm" in name or name == "embed_tokens.weight" for name in plain)


@needs_compiler
def test_what_is_not_made_of_whole_panels_keeps_the_products_of_torch(monkeypatch):
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: True)
    odd_head, odd_layers = replace(WIDE, vocab_size=200), replace(WIDE, intermediate_size=72)
    for config in (odd_head, odd_layers):
        expected = logits_of(random_llama(config), IDS)
        model = use_compiled_kernels(random_llama(config))
        assert isinstance(model, CpuLlama)
        assert isinstance(model.lm_head, Linear) == (config is odd_head)
        assert isinstance(model.layers[0], CompiledLayer) == (config is odd_head)
        torch.testing.assert_close(logits_of(model, IDS, backend=CpuBackend()), expected)


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 576), (100, 576)])
def test_the_norm_equals_torch(dtype, tolerance, rows, size):
    plain = RMSNorm(size, 1e-5, dtype, "cpu")
    generator = torch.Generator().manual_seed(0)
    plain.weight.copy_(torch.randn(size, generator=generator))
    x = (torch.randn(rows, size, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    ours = CompiledRMSNorm(plain, cpu_kernels.load())(x)
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
    turned = cpu_kernels.load().rotate(whole[:, :heads], cos, sin)
    assert (turned.float() - expected.float()).norm() <= tolerance * expected.float().norm()
    assert torch.equal(whole[:, heads:], rest)


def test_dtypes_and_sizes_that_the_kernels_do_not_know_are_left_alone():
    for model in (random_llama(TINY), random_llama(WIDE, dtype=torch.float16)):
        assert use_compiled_kernels(model) is model
        assert not any(isinstance(module, CompiledRMSNorm) for module in model.modules())
