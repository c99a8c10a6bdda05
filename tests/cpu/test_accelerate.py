"""The seam: what goes in comes out faster or as it was, and plain torch serves where it is taken away."""

import shutil

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.attention import get_backend
from minipaged.attention.reference import ReferenceBackend
from minipaged.attention.torch_backend import TorchBackend
from minipaged.checkpoints.loading import LoadedModel
from minipaged.cpu.accelerate import accelerate
from minipaged.cpu.backend import CpuBackend
from minipaged.cpu.kernels import CpuKernels
from minipaged.cpu.modules import CompiledLinear, CpuLlama
from minipaged.cpu.packing import PackedLinear, packed_products_run
from minipaged.model.llama import Linear, LlamaModel
from minipaged.model.tiny import random_llama
from tests.cpu.test_compiled import WIDE

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: True)


def loaded() -> LoadedModel:
    return LoadedModel(random_llama(WIDE), None, WIDE, "wide")


@needs_compiler
def test_a_model_and_plain_torch_become_the_compiled_pair() -> None:
    fast, backend = accelerate(loaded(), get_backend("torch"))
    assert isinstance(fast.model, CpuLlama) and isinstance(backend, CpuBackend)
    again, same = accelerate(fast, backend)
    assert again.model is fast.model and same is backend


@needs_compiler
@pytest.mark.skipif(
    not packed_products_run(torch.float32), reason="torch has no packed products on this machine"
)
def test_where_our_products_are_not_faster_those_of_torch_serve_from_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: False)
    fast = accelerate(loaded(), TorchBackend())[0].model
    modules = list(fast.modules())
    assert isinstance(fast, CpuLlama)  # norms and rotations are compiled all the same
    assert sum(isinstance(module, PackedLinear) for module in modules) == 4 * WIDE.num_layers + 1
    assert not any(isinstance(module, Linear | CompiledLinear) for module in modules)


@needs_compiler
def test_with_keep_weights_the_model_stays_and_attention_is_compiled() -> None:
    plain = loaded()
    before = list(plain.model.modules())
    same, backend = accelerate(plain, get_backend("torch"), keep_weights=True)
    assert same is plain and list(plain.model.modules()) == before
    assert isinstance(backend, CpuBackend)


def test_another_backend_comes_back_as_it_is() -> None:
    for other in (ReferenceBackend(), CpuBackend(fuses_layers=False)):
        assert accelerate(loaded(), other)[1] is other


@needs_compiler
def test_the_backend_says_what_it_fuses_and_torch_is_torch_throughout() -> None:
    fast = LLM(accelerate(loaded(), TorchBackend())[0], num_blocks=40, max_model_len=64, device="cpu")
    plain = LLM(loaded(), num_blocks=40, max_model_len=64, device="cpu", attention_backend="torch")
    assert isinstance(fast.engine.runner.backend, CpuBackend) and fast.engine.runner.backend.fuses_layers
    assert type(plain.engine.runner.backend) is TorchBackend
    assert type(plain.engine.runner.model) is LlamaModel
    prompts = [{"prompt_token_ids": [i, 2 * i, 3 * i]} for i in range(1, 5)]
    answers = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for llm in (fast, plain)
    ]
    assert answers[0] == answers[1]


def test_a_model_that_llm_loads_itself_is_plain_when_torch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minipaged.engine.llm.load_model", lambda *_, **__: loaded())
    llm = LLM("wide", num_blocks=40, max_model_len=64, device="cpu", attention_backend="torch")
    assert type(llm.engine.runner.model) is LlamaModel and type(llm.engine.runner.backend) is TorchBackend


@needs_compiler
def test_greedy_tokens_are_those_of_the_plain_model() -> None:
    hidden = torch.randn(9, WIDE.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden[4] = torch.nan
    plain, fast = loaded().model, accelerate(loaded(), TorchBackend())[0].model
    assert not plain.fuses_argmax and fast.fuses_argmax
    tokens = fast.argmax_tokens(hidden)
    assert tokens[4] == -1 and tokens.dtype == torch.int64
    assert torch.equal(tokens, plain.argmax_tokens(hidden))
