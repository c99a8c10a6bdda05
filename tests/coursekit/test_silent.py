"""The engine with a silent model: exact about memory, and never asked for arithmetic."""

import numpy as np
import torch

from coursekit.silent import add_all, at_once, exactly, real_llm, replay, silent_engine
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama

SIZES = {"num_slots": 512, "max_len": 128}


def served(lengths, block_size, **more):
    return replay(TINY, torch.float32, np.array(lengths), block_size=block_size, **(SIZES | more))


def test_every_request_gets_the_length_that_it_asked_for():
    engine, requests = served([[20, 5], [3, 9], [60, 1]], 16)
    assert [len(request.samples[0].output.token_ids) for request in requests] == [5, 9, 1]
    assert engine.pool.num_free == engine.pool.num_blocks == 32


def test_strips_of_the_longest_length_decide_how_many_run_at_once():
    engine, _ = served([[20, 12]] * 40, 128)
    assert {record.running for record in engine.trace if record.waiting} == {4}
    assert at_once(engine) == 4


def test_blocks_let_more_in_than_strips():
    engine, _ = served([[20, 12]] * 40, 16)
    assert at_once(engine) > 12


def test_the_clock_counts_steps():
    engine, requests = served([[8, 3]], 16)
    assert engine.stats.num_steps == 3
    assert requests[0].metrics.ttft == 1


def test_a_replay_stops_after_the_steps_that_were_asked_for():
    engine, _ = served([[8, 50]], 16, most_steps=7)
    assert len(engine.trace) == 7 and engine.has_unfinished_requests()


def test_a_chunk_bounds_what_a_step_computes():
    engine, _ = served([[60, 2]] * 3, 16, chunk=40)
    assert max(record.prefill_tokens + record.decode_tokens for record in engine.trace) == 40


def test_one_engine_can_be_stepped_by_hand():
    engine = silent_engine(TINY, torch.float32, block_size=16, **SIZES)
    engine.add_request("one", [5] * 4, exactly(3))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert list(outputs[0].outputs[0].token_ids) == [0, 0, 0]


def test_the_real_engine_runs_what_the_silent_one_runs():
    loaded = LoadedModel(random_llama(), None, TINY, "tiny")
    lengths = [[20, 12]] * 40
    llm = real_llm(loaded, block_size=16, **SIZES)
    add_all(llm.engine, np.array(lengths))
    for _ in range(15):
        llm.engine.step()
    silent, _ = served(lengths, 16, most_steps=15)
    assert [r.running for r in llm.trace] == [r.running for r in silent.trace]
