"""Recordings: what a reader of the frames knows is what the engine's tables and pool say, at every step."""

import json

import pytest

pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")

from tiny import tiny_llm

from minipaged.core.request import Status
from minipaged.live.users import MIXES
from minipaged.recording import Camera, recording
from minipaged.sampling_params import SamplingParams

pytestmark = pytest.mark.serve


class Reader:
    """Knows only frames; follows them as docs/recordings.md says."""

    def __init__(self):
        self.sequences, self.published = {}, {}

    def read(self, frame):
        for name, change in frame.get("sequences", {}).items():
            new = {"status": None, "stored": 0, "blocks": [], "tokens": []}
            sequence = self.sequences.setdefault(name, new)
            sequence["tokens"] += change.get("tokens", [])
            if "blocks" in change:
                sequence["blocks"][change["from"] :] = change["blocks"]
            sequence.update({key: change[key] for key in ("status", "stored", "prompt") if key in change})
        self.published |= {int(block): name for block, name in frame.get("published", {}).items()}
        for block in frame.get("unpublished", []):
            del self.published[block]
        for name in frame.get("gone", []):
            del self.sequences[name]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_frames_say_what_the_tables_and_the_pool_say(preemption):
    llm = tiny_llm(num_blocks=24, preemption=preemption, swap_space="1MiB")
    engine, reader, seen = llm.engine, Reader(), []
    camera = Camera(engine, "blocks", "tiny")

    def look(plan):
        reader.read(json.loads(json.dumps(camera.frame())))
        unfinished = [request for parent in engine.requests.values() for request in parent.unfinished]
        live = {f"{request.request_id}/{request.index}": request for request in unfinished}
        assert set(reader.sequences) == set(live)
        for name, request in live.items():
            known, on_host = reader.sequences[name], request.status is Status.SWAPPED
            assert known["blocks"] == ([] if on_host else request.table.blocks)
            assert known["status"] == request.status.name.lower()
            assert known["stored"] == (0 if on_host else request.table.num_tokens)
            assert len(known["tokens"]) == len(request.tokens)
            for block in known["blocks"]:
                assert engine.pool.ref_count(block) >= 1
        assert reader.published == {b: h.hex()[:12] for b, h in engine.pool.published.items()}
        seen.append({known["status"] for known in reader.sequences.values()})

    engine.on_step = look
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, n=2)
    llm.generate([f"a prompt that is number {i}" for i in range(6)], params, use_tqdm=False)
    assert engine.stats.num_preemptions > 0
    assert any("preempted" in statuses or "swapped" in statuses for statuses in seen)


def test_a_recording_has_a_header_and_a_frame_for_each_step(tmp_path):
    llm, file = tiny_llm(), tmp_path / "run.jsonl"
    with recording(llm, file):
        llm.generate("abc", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert llm.engine.on_step is None
    header, *frames = [json.loads(line) for line in file.read_text().splitlines()]
    assert (header["format"], header["version"]) == ("minipaged-recording", 1)
    assert (header["num_blocks"], header["block_size"], header["model"]) == (128, 8, "tiny")
    assert [frame["index"] for frame in frames] == [0, 1, 2, 3, 4, 4]  # the last one shows what the end left
    assert (frames[-1]["blocks_held"], frames[-1]["gone"]) == (0, [next(iter(frames[0]["sequences"]))])


def test_users_have_the_lengths_of_the_courses_mixes():
    from coursekit.workloads import load_mix

    for name in ("chat48", "instruct64"):
        expected = [[len(request.prompt_token_ids), request.max_tokens] for request in load_mix(name)]
        assert MIXES[name] == expected
