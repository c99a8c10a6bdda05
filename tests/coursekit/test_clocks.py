"""The clocks around the parts of a step leave the engine as it was, and the parts lie within the step."""

import pytest

from coursekit.clocks import PARTS, WAYS, take_turns, timed_step
from minipaged import LLM, SamplingParams
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama


@pytest.fixture
def llm():
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), device="cpu", num_blocks=32, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    llm.engine.add_request("one", [5] * 10, params)
    return llm


def test_parts_are_known_and_lie_within_the_step(llm):
    seconds, parts = timed_step(llm.engine, clocks=True, fused=False)
    assert set(parts) <= set(PARTS) and {"scheduler", "bookkeeping"} <= set(parts)
    assert 0 < sum(parts.values()) <= seconds


def test_a_step_without_clocks_has_no_parts(llm):
    seconds, parts = timed_step(llm.engine, clocks=False, fused=True)
    assert seconds > 0 and parts == {}


def test_the_engine_is_as_it_was_afterwards(llm):
    backend = llm.engine.runner.backend
    timed_step(llm.engine, clocks=True, fused=False)
    assert llm.engine.runner.backend is backend
    assert "step" not in vars(llm.engine) and "schedule" not in vars(llm.engine.scheduler)


def test_every_way_takes_its_turns_over_decode_steps_only(llm):
    seconds, parts = take_turns(llm, rounds=3)
    assert list(seconds) == list(WAYS) and list(parts) == PARTS
    assert len(llm.trace) == 9 and llm.trace[0].prefill_tokens == 10
