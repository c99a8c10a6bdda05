"""A compiled head tells greedy rows their token without logits: the same tokens, and the same refusals."""

import shutil
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.checkpoints.loading import LoadedModel
from minipaged.core.runner import ModelRunner
from minipaged.core.sampler import BadLogitsError
from minipaged.cpu.accelerate import use_compiled_kernels
from minipaged.cpu.kernels import CpuKernels
from minipaged.model.tiny import random_llama
from tests.cpu.test_compiled import WIDE

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
PROMPTS = [{"prompt_token_ids": list(range(i, 3 * i + 2))} for i in range(1, 20)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(CpuKernels, "multiplies_fast", lambda self, dtype: True)
    model = use_compiled_kernels(random_llama(WIDE))
    assert model.fuses_argmax
    return LLM(LoadedModel(model, None, WIDE, "wide"), num_blocks=200, max_model_len=100, device="cpu")


def tokens(llm: LLM, params: Any) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_tokens_are_those_of_the_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "compute_logits", lambda hidden: pytest.fail("made logits"))
        ours = tokens(llm, GREEDY)
    monkeypatch.setattr(ModelRunner, "greedy_tokens", lambda self, plan, hidden: None)
    assert ours == tokens(llm, GREEDY)


def test_a_batch_in_which_somebody_draws_is_sampled_as_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = [DRAWN if i % 3 == 0 else GREEDY for i in range(len(PROMPTS))]
    ours = tokens(llm, mixed)
    monkeypatch.setattr(
        ModelRunner, "greedy_tokens", lambda self, plan, hidden: pytest.fail("not all are greedy")
    )
    assert ours == tokens(llm, mixed)


def test_logits_that_are_not_finite_are_refused_with_the_name_of_the_request(llm: LLM) -> None:
    llm.engine.runner.model.layers[0].down_proj.packed.fill_(torch.nan)
    llm.engine.add_request("broken", PROMPTS[0], GREEDY)
    with pytest.raises(BadLogitsError, match="request 'broken': the largest logit of row 0 is nan"):
        llm.engine.step()
    llm.engine.check_invariants()
