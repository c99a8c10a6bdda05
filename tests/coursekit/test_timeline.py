"""A timeline says what the engine did, request by request."""

import pytest

from coursekit.timeline import Timeline
from minipaged import LLM, SamplingParams
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

MODEL = LoadedModel(random_llama(), None, TINY, "tiny")
LENGTHS = {"A": (6, 18), "B": (9, 14), "C": (20, 8)}


def watched(num_blocks=12, **settings):
    llm = LLM(
        MODEL,
        device="cpu",
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        enable_prefix_caching=False,
        watermark=0.0,
        **settings,
    )
    timeline = Timeline(llm.engine)
    for name, (prompt, answer) in LENGTHS.items():
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        llm.engine.add_request(name, list(range(5, 5 + prompt)), params)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    return llm, timeline


ONCE = sum(prompt + answer - 1 for prompt, answer in LENGTHS.values())


def test_without_shortage_every_token_is_computed_once():
    llm, timeline = watched(num_blocks=64)
    assert (timeline.computed, timeline.again, timeline.preemptions) == (ONCE, 0, 0)
    assert [sum(m.tokens for m in step.requests.values()) for step in timeline.steps] == [
        record.prefill_tokens + record.decode_tokens for record in llm.trace
    ]


def test_a_recomputed_request_computes_again_what_it_held():
    llm, timeline = watched()
    assert timeline.preemptions == llm.stats.num_recomputes > 0 == timeline.blocks_moved
    lost = [
        before.requests[name].stored
        for before, step in zip(timeline.steps, timeline.steps[1:], strict=False)
        for name in step.preempted
    ]
    assert timeline.again == sum(lost) == timeline.computed - ONCE


def test_a_swapped_request_moves_its_blocks_there_and_back():
    llm, timeline = watched(preemption="swap", swap_space="1MiB")
    held = [
        len(before.requests[name].blocks)
        for before, step in zip(timeline.steps, timeline.steps[1:], strict=False)
        for name in step.preempted
    ]
    assert len(held) == llm.stats.num_swaps > 0
    assert timeline.blocks_moved == 2 * sum(held) and timeline.again == 0


@pytest.mark.parametrize(("preemption", "parked"), [("recompute", "preempted"), ("swap", "swapped")])
def test_states_run_from_waiting_to_the_end(preemption, parked):
    settings = {} if preemption == "recompute" else {"swap_space": "1MiB"}
    _, timeline = watched(preemption=preemption, **settings)
    states = timeline.states()
    assert list(states) == list(LENGTHS)
    assert {len(line) for line in states.values()} == {len(timeline.steps)}
    assert states["A"][:2] == ["prefill", "decode"] and set(states["A"][1:]) <= {"decode", None}
    for index, step in enumerate(timeline.steps):
        assert all(states[name][index] == parked for name in step.preempted)
        held = {
            block for m in step.requests.values() if m.state in ("prefill", "decode") for block in m.blocks
        }
        assert step.free == 12 - len(held)
