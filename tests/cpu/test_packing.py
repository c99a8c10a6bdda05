"""Packed weights: the same model, and the plain product where packing is not to be had."""

import pytest
import torch

from minipaged.cpu import packing
from minipaged.cpu.packing import PackedLinear, pack_weights
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import logits_of

IDS = list(range(3, 40))
needs_packing = pytest.mark.skipif(
    not packing.packed_products_run(torch.float32), reason="torch has no packed products on this machine"
)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_gives_the_same_logits(dtype):
    if not packing.packed_products_run(dtype):
        pytest.skip(f"no packed products in {dtype} on this machine")
    expected = logits_of(random_llama(dtype=dtype), IDS)
    model = random_llama(dtype=dtype)
    assert pack_weights(model)
    torch.testing.assert_close(logits_of(model, IDS), expected)


@needs_packing
def test_every_product_is_packed_and_packing_twice_changes_nothing():
    model = random_llama()
    assert pack_weights(model)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 4 * TINY.num_layers + 1  # query-key-value, output, gate-up, down; and the head
    assert pack_weights(model)
    assert [module for module in model.modules() if isinstance(module, PackedLinear)] == packed


@needs_packing
def test_the_plain_weights_are_freed_and_the_embedding_stays():
    model = random_llama()
    pack_weights(model)
    plain = [name for name, _ in model.named_parameters()]
    assert "embed_tokens.weight" in plain
    assert not [name for name in plain if "proj" in name]


def test_where_packed_products_do_not_run_the_model_is_left_alone(monkeypatch):
    def refuse(*_):
        raise RuntimeError("mkldnn is not available")

    monkeypatch.setattr(packing.torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    model = random_llama()
    expected = logits_of(model, IDS)
    assert not pack_weights(model)
    assert torch.equal(logits_of(model, IDS), expected)


def test_float16_is_not_packed():
    assert not packing.packed_products_run(torch.float16)
