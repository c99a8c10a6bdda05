"""Recordings of an `LLM`: versioned, bounded, the same each time, and read back as the engine had it."""

import json
import re
from pathlib import Path

import pytest

from coursekit.recording import Lane, Recording, from_trace, moments, record
from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import SamplingParams

MODEL = LoadedModel(random_llama(), None, TINY, "tiny")


def make_llm(**settings):
    return LLM(MODEL, **({"device": "cpu", "num_blocks": 64, "block_size": 4, "watermark": 0.0} | settings))


def generate(llm, prompts, max_tokens=6, **params):
    random = {"temperature": 1.0, "seed": 1} if params.get("n", 1) > 1 else {"temperature": 0}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **random, **params)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def events(run):
    return [event for lanes in moments(run) for event in lanes["blocks"].events]


def test_recording_has_a_header_and_a_frame_for_each_step_and_one_for_the_end(tmp_path):
    llm = make_llm()
    with record(llm) as run:
        generate(llm, [[5, 6, 7]], max_tokens=5)
    assert llm.engine.on_step is None
    run.save(tmp_path / "run.jsonl")
    header, *frames = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert (header["format"], header["version"]) == ("minipaged-recording", 1)
    assert (header["num_blocks"], header["block_size"], header["clock"]) == (64, 4, "steps")
    assert [(frame["index"], frame["time"]) for frame in frames] == [*((i, i) for i in range(5)), (4, 5)]
    assert (frames[-1]["blocks_held"], frames[-1]["gone"]) == (0, ["llm-0/0"])
    assert Recording.load(tmp_path / "run.jsonl").lines == run.lines


def test_the_same_run_gives_the_same_lines():
    runs = []
    for _ in range(2):
        llm = make_llm()
        with record(llm) as run:
            generate(llm, [[1, 2, 3], [4, 5, 6, 7, 8]])
        runs.append(run.text)
    assert runs[0] == runs[1]


def test_time_can_be_the_engines_seconds():
    llm = make_llm()
    with record(llm, in_steps=False) as run:
        generate(llm, [[1, 2, 3]])
    header, *frames = map(json.loads, run.lines)
    assert header["clock"] == "seconds"
    assert [frame["time"] for frame in frames[:-1]] == [step.time for step in llm.trace]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_reader_knows_the_blocks_that_the_pool_has_given_out(preemption):
    llm = make_llm(num_blocks=12, preemption=preemption, swap_space="1MiB", enable_prefix_caching=False)
    with record(llm) as run:
        generate(llm, [[i, i + 1, i + 2, i + 3, i + 4] for i in range(4)], max_tokens=14)
    assert llm.stats.num_preemptions > 0
    for lanes in moments(run):
        lane = lanes["blocks"]
        assert len(lane.refs) == lane.frame["blocks_held"]
        assert sum(one.status == "running" for one in lane.sequences.values()) <= lane.frame["running"]
        for one in lane.sequences.values():
            assert len(one.blocks) == -(-one.stored // 4)
    gave_way = [event for event in events(run) if event.kind == "preempted"]
    assert len(gave_way) == llm.stats.num_preemptions
    assert {event.kind for event in events(run)} == {"preempted"}, "without a cache nothing is found"


@pytest.mark.parametrize(("prompt", "copies"), [(6, 2), (8, 0)])
def test_forks_and_copies_on_write_are_seen(prompt, copies):
    llm = make_llm()
    with record(llm) as run:
        generate(llm, [list(range(10, 10 + prompt))], n=3)
    found = events(run)
    forks = [event for event in found if event.kind == "fork"]
    assert [(event.sequence, len(event.blocks)) for event in forks] == [("llm-0/1", 2), ("llm-0/2", 2)]
    assert [event.kind for event in found if event.kind != "fork"] == ["copy"] * copies
    for event in found:
        if event.kind == "copy":
            assert event.blocks[0] == forks[0].blocks[-1] != event.blocks[1]


def test_hits_in_the_prefix_cache_are_seen():
    llm = make_llm()
    with record(llm) as run:
        for tail in (90, 91):
            generate(llm, [[*range(20, 30), tail]])
    (hit,) = events(run)
    assert (hit.kind, hit.sequence, len(hit.blocks)) == ("hit", "llm-1/0", 2)


def test_size_is_bounded_and_the_last_line_says_what_was_left_out():
    llm = make_llm()
    with record(llm, max_bytes=2000) as run:
        generate(llm, [[1, 2, 3]], max_tokens=40)
    header, *frames = map(json.loads, run.lines)
    assert len(run.text.encode()) < 2000 + 2 * max(len(line.encode()) for line in run.lines)
    assert frames[-1]["left_out"] == 40 - (len(frames) - 1) > 0
    assert frames[-1]["gone"] == ["llm-0/0"], "the end is there all the same"


def test_another_version_is_refused_by_number(tmp_path):
    (tmp_path / "new.jsonl").write_text('{"format":"minipaged-recording","version":2}\n')
    with pytest.raises(ValueError, match="version 2, only minipaged-recording of version 1"):
        Recording.load(tmp_path / "new.jsonl")


def test_a_watched_engine_is_not_recorded_and_one_that_raised_is_let_go():
    llm = make_llm()
    with record(llm), pytest.raises(RuntimeError, match="something else watches"), record(llm):
        pass
    with pytest.raises(KeyError), record(llm):
        raise KeyError
    assert llm.engine.on_step is None


def test_a_trace_becomes_a_recording_after_the_run(tmp_path):
    llm = make_llm()
    generate(llm, [[1, 2, 3]])
    from_trace(llm).save(tmp_path / "run.jsonl")
    saved = Recording.load(tmp_path / "run.jsonl")
    header, *frames = map(json.loads, saved.lines)
    assert header["format"] == "minipaged-recording"
    assert [frame["blocks_held"] for frame in frames] == [step.blocks_held for step in llm.trace]
    assert [frame["index"] for frame in frames] == list(range(len(llm.trace)))
    assert frames[-1]["generated"] == sum(step.decode_tokens for step in llm.trace) > 0
    assert sum(1 for _ in moments(saved)) == len(frames), "and it plays"


def test_two_engines_stand_side_by_side_step_by_step():
    runs = []
    for lane, block_size in (("blocks", 4), ("strips", 16)):
        llm = make_llm(num_blocks=64 // block_size, block_size=block_size)
        with record(llm, lane=lane) as run:
            generate(llm, [[1, 2, 3]] * 6)
        runs.append(run)
    both = runs[0].beside(runs[1])
    first = next(moments(both))
    assert list(first) == ["blocks", "strips"] and all(isinstance(lane, Lane) for lane in first.values())
    assert all(lane.frame["index"] == 0 for lane in first.values())
    assert sum(1 for _ in moments(both)) == max(len(run.lines) - 1 for run in runs)
    with pytest.raises(ValueError, match=r"both recordings have a lane \['blocks'\]"):
        runs[0].beside(runs[0])


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "recordings.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, page.name, "exec"), {})
    assert len(Recording.load("run.jsonl").lines) == 1 + 8, "a header, and a frame for each step"
