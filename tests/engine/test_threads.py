"""Callers in several threads: none is in the middle of what another does to pool, cache and backend."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

import pytest
from fake_model import assert_idle, greedy
from torch import Tensor

from minipaged.core.request import StepPlan
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput
from minipaged.model.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import BeamSearchParams

SIX = greedy(6, ignore_eos=True)


def test_a_generate_call_waits_for_the_end_of_a_beam_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the backend, which remembers the batch of a step: in turns both would read wrong blocks."""
    model = random_llama()
    llm = LLM(LoadedModel(model, None, TINY, "tiny"), num_blocks=64, max_model_len=64)
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    (expected,) = llm.beam_search([[1, 2, 3]], params)
    (alone,) = llm.generate([[4, 5]], SIX, use_tqdm=False)
    callers: list[threading.Thread] = []
    others: list[Future[list[RequestOutput]]] = []
    forward = model.forward

    def watched(*inputs: Any) -> Tensor:
        callers.append(threading.current_thread())
        if not others:
            others.append(pool.submit(llm.generate, [[4, 5]], SIX, use_tqdm=False))
            with suppress(FutureTimeoutError):
                others[0].result(timeout=0.2)  # time enough for one that does not wait
        return forward(*inputs)

    monkeypatch.setattr(model, "forward", watched)
    with ThreadPoolExecutor(1) as pool:
        (found,) = llm.beam_search([[1, 2, 3]], params)
        (output,) = others[0].result()
    searched = [caller is threading.current_thread() for caller in callers]
    assert searched == [True] * 5 + [False] * 6
    assert found == expected
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert_idle(llm.engine)


def test_the_prefix_cache_is_reset_between_two_steps() -> None:
    """In the middle of one it would take away what the plan was made of."""
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), num_blocks=64, max_model_len=64)
    resets: list[Future[bool]] = []

    def in_the_middle(plan: StepPlan) -> None:
        if not resets:
            resets.append(pool.submit(llm.reset_prefix_cache))
            with pytest.raises(FutureTimeoutError):
                resets[0].result(timeout=0.2)

    llm.engine.on_step = in_the_middle
    with ThreadPoolExecutor(1) as pool:
        llm.generate([[1, 2, 3]], SIX, use_tqdm=False)
        resets[0].result()  # comes to its end; whether blocks are held then is chance
    assert_idle(llm.engine)
