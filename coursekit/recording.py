"""Recordings of a run: made from an `LLM`, and read back step by step.

docs/recordings.md describes the file. The live page of `minipaged serve` draws the same lines, so what is
recorded here plays in the same player: `coursekit.player` makes a page or a notebook output of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minipaged.core.request import StepPlan
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import StepRecord
from minipaged.recording import FORMAT, VERSION, Camera

MAX_BYTES = 4 << 20
"""A recording of 48 chats from their first step to their last takes a tenth of this."""


class Recording:
    """The lines of a recording, of one engine or of several side by side."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    @property
    def text(self) -> str:
        """The file's contents."""
        return "".join(line + "\n" for line in self.lines)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a file. Raises ValueError for one that is of another format or version."""
        recording = cls(Path(path).read_text(encoding="utf-8").splitlines())
        header = json.loads(recording.lines[0]) if recording.lines else {}
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise ValueError(
                f"{path}: format {header.get('format')!r} of version {header.get('version')!r}, "
                f"only {FORMAT} of version {VERSION} can be read"
            )
        return recording

    def beside(self, other: Recording) -> Recording:
        """Both, step by step, for a player that shows one above the other. Their lanes must differ."""
        mine, others = ([json.loads(line) for line in one.lines] for one in (self, other))
        lanes = [{line["lane"] for line in lines if "format" in line} for lines in (mine, others)]
        if lanes[0] & lanes[1]:
            raise ValueError(f"both recordings have a lane {sorted(lanes[0] & lanes[1])}")
        headers = [line for lines in (mine, others) for line in lines if "format" in line]
        frames = [line for lines in (mine, others) for line in lines if "format" not in line]
        frames.sort(key=lambda frame: frame.get("time", 0.0))  # stable: the last frame of a lane stays last
        return Recording([_line(value) for value in headers + frames])


@contextmanager
def record(
    llm: LLM, *, lane: str = "blocks", in_steps: bool = True, max_bytes: int = MAX_BYTES
) -> Iterator[Recording]:
    """Record every step that `llm` takes inside the `with` block.

    with record(llm) as run:
        llm.generate(prompts, params)
    run.save("run.jsonl")

    in_steps: time is counted in steps, so that the same run gives the same lines on every machine; without
        it, in seconds of the engine's clock. lane: "blocks", or "strips" for a run to be shown beside one.
    max_bytes: steps after that many bytes are counted, not recorded; the last line has their number.

    Raises RuntimeError while something else watches the engine's steps.
    """
    engine = llm.engine
    if engine.on_step is not None:
        raise RuntimeError("something else watches the steps of this engine (`Engine.on_step` is set)")
    camera, clock = Camera(engine, lane, llm.name), "steps" if in_steps else "seconds"
    recording = Recording([_line(camera.header() | {"clock": clock})])
    size, left_out = len(recording.lines[0]), 0

    def frame() -> str:
        taken = camera.frame()
        if in_steps and "index" in taken:
            taken |= {"time": float(taken["index"]), "duration": 1.0}
        return _line(taken)

    def on_step(plan: StepPlan) -> None:
        nonlocal size, left_out
        if size >= max_bytes:
            left_out += 1
            return
        recording.lines.append(frame())
        size += len(recording.lines[-1].encode()) + 1

    engine.on_step = on_step
    try:
        yield recording
    finally:
        engine.on_step = None
        end = json.loads(frame())  # what the last step left, as if it were one more
        if in_steps and "index" in end:
            end["time"] += 1.0
        recording.lines.append(_line(end | ({"left_out": left_out} if left_out else {})))


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def from_trace(llm: LLM, trace: Iterable[StepRecord] | None = None) -> Recording:
    """`llm.trace`, or a part of it, as a recording of a run that is over: counts and curves, no blocks."""
    lines, generated = [_line(Camera(llm.engine, "blocks", llm.name).header())], 0
    for step in llm.trace if trace is None else trace:
        generated += step.decode_tokens
        lines.append(_line({"lane": "blocks", **asdict(step), "generated": generated}))
    return Recording(lines)


# Reading


@dataclass
class Sequence:
    """What a reader knows of one sequence; the fields are those of docs/recordings.md."""

    status: str = ""
    prompt: int = 0
    stored: int = 0
    blocks: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """Something that happened to a sequence: "fork", "copy", "hit" or "preempted"."""

    kind: str
    sequence: str
    blocks: tuple[int, ...] = ()
    """fork, hit: the blocks it found; copy: the block it left and the one it has instead."""


class Lane:
    """Follows the frames of one engine, as docs/recordings.md says."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header, self.frame = header, dict[str, Any]()
        self.sequences: dict[str, Sequence] = {}
        self.published: dict[int, str] = {}
        self.events: list[Event] = []
        """Of the last frame."""

    @property
    def refs(self) -> Counter[int]:
        """Block -> how many tables list it."""
        return Counter(block for sequence in self.sequences.values() for block in sequence.blocks)

    def apply(self, frame: dict[str, Any]) -> None:
        self.events = []
        tables = {name: list(one.blocks) for name, one in self.sequences.items()}
        for name, change in frame.get("sequences", {}).items():
            one = self.sequences.setdefault(name, Sequence())
            one.tokens += change.get("tokens", [])
            if "blocks" in change:
                one.blocks[change["from"] :] = change["blocks"]
            for key in ("status", "prompt", "stored"):
                setattr(one, key, change.get(key, getattr(one, key)))
            if change.get("status") in ("preempted", "swapped"):
                self.events.append(Event("preempted", name))
        gone = frame.get("gone", [])
        refs = Counter(b for name, one in self.sequences.items() if name not in gone for b in one.blocks)
        for name, change in frame.get("sequences", {}).items():
            if "blocks" in change:
                self.events += self._table_events(name, tables.get(name, []), change, frame, refs)
        self.published |= {int(block): name for block, name in frame.get("published", {}).items()}
        for block in frame.get("unpublished", []):
            del self.published[block]
        for name in gone:
            del self.sequences[name]
        self.frame |= frame

    def _table_events(
        self, name: str, before: list[int], change: dict[str, Any], frame: dict[str, Any], refs: Counter[int]
    ) -> Iterator[Event]:
        after, request = self.sequences[name].blocks, name.rpartition("/")[0]
        tail = len(before) - 1
        replaced = bool(before) and change["from"] == tail < len(after) and after[tail] != before[tail]
        if replaced and refs[before[tail]]:
            yield Event("copy", name, (before[tail], after[tail]))
        if before or not after:
            return
        siblings = [
            one
            for other, one in self.sequences.items()
            if other != name and other.rpartition("/")[0] == request
        ]
        shared = [block for block in after if any(block in sibling.blocks for sibling in siblings)]
        if shared and not name.endswith("/0"):
            yield Event("fork", name, tuple(shared))
            return
        new = {int(block) for block in frame.get("published", {})} | set(frame.get("unpublished", []))
        hits = []
        for block in after:
            if refs[block] < 2 and (block not in self.published or block in new):
                break
            hits.append(block)
        if hits and not shared:
            yield Event("hit", name, tuple(hits))


Moment = dict[str, Lane]
"""Lane name -> its state."""


def moments(recording: Recording) -> Iterator[Moment]:
    """The recording step by step, as the player counts them: frames up to the next of a lane that has one.

    Each item is the same dictionary, brought up to date.
    """
    lanes: Moment = {}
    seen: set[str] = set()
    for line in recording.lines:
        value = json.loads(line)
        name = value["lane"]
        if "format" in value:
            lanes[name] = Lane(value)
            continue
        if name in seen:
            yield lanes
            seen.clear()
        lanes[name].apply(value)
        seen.add(name)
    yield lanes
