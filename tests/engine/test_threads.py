"""Callers in several threads: none is in the middle of what another does to pool, cache and backend."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

import pytest
from fake_model import assert_idle, greedy
from torch import Tensor

from minipaged.checkpoints.loading import LoadedModel
from minipaged.core.request import StepPlan
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import BeamSearchParams, SamplingParams

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


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on() -> None:
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), num_blocks=64, max_model_len=64)
    (expected,) = llm.generate([[1, 2, 3]], SIX, use_tqdm=False)  # that was llm-0
    llm.engine.add_request("llm-1", [1, 2, 3], SIX)
    llm.engine.step()
    with pytest.raises(ValueError, match=r"request ids \['llm-1'\] are in use"):
        llm.generate([[5, 6]], SIX)
    llm.engine.add_request("llm-2", [1, 2], SIX)
    with pytest.raises(ValueError, match=r"request ids \['llm-2'\] are in use"):
        next(llm.stream([5, 6], SIX))
    assert list(llm.engine.requests) == ["llm-1", "llm-2"]
    outputs = {}
    while llm.engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in llm.engine.step())
    assert outputs["llm-1"].outputs[0].token_ids == expected.outputs[0].token_ids
    assert_idle(llm.engine)


def test_requests_that_another_thread_adds_and_aborts_do_not_disturb_a_generate_call() -> None:
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), num_blocks=24, max_model_len=64)
    prompts = [[n, n + 1, n + 2] for n in range(1, 9)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, SIX, use_tqdm=False)]
    stop, aborted = threading.Event(), [0]

    def come_and_go() -> None:
        while not stop.is_set():
            llm.engine.add_request("passing", [7, 8, 9], SamplingParams(n=2, max_tokens=40, ignore_eos=True))
            aborted[0] += llm.engine.abort_request("passing", 0) and llm.engine.abort_request("passing")

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(come_and_go)
        try:
            for _ in range(12):
                found = llm.generate(prompts, SIX, use_tqdm=False)
                assert [o.outputs[0].token_ids for o in found] == expected
        finally:
            stop.set()
        going.result()
    assert aborted[0] > 10
    assert_idle(llm.engine)
