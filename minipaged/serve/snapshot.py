"""Pictures of the engine's memory, as lines of JSON: for the live page, and for recordings of a run.

A recording is a header and then one frame for each step; docs/recordings.md describes the format. A frame has
only what changed since the one before, so that a page costs the engine little and a file stays small.
This is the one module of the server that reads requests and block tables. It changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from minipaged.core.request import Status
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import StepRecord

FORMAT, VERSION = "minipaged-recording", 1


class Row(NamedTuple):
    """One sequence as it stands: the engine's own lists, to be read and not kept."""

    name: str
    status: str
    num_prompt_tokens: int
    tokens: list[int]
    num_stored: int
    """Tokens whose keys and values have a slot."""
    blocks: list[int]


def rows(engine: Engine) -> Iterator[Row]:
    """Every sequence that has not ended, requests in order of arrival."""
    for parent in engine.requests.values():
        for request in parent.unfinished:
            name, status = f"{request.request_id}/{request.index}", request.status.name.lower()
            table, prompt = request.table, parent.num_prompt_tokens
            if request.status is Status.SWAPPED:  # its blocks are the host's
                yield Row(name, status, prompt, request.tokens, 0, [])
            else:
                yield Row(name, status, prompt, request.tokens, table.num_tokens, table.blocks)


@dataclass
class _Known:
    """What the reader of the frames knows of a sequence."""

    status: str = ""
    num_stored: int = 0
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class Camera:
    """Makes frames of one engine for one reader, who has seen every frame before."""

    def __init__(self, engine: Engine, lane: str, model: str) -> None:
        self._engine, self._lane, self._model = engine, lane, model
        self._known: dict[str, _Known] = {}
        self._published: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def header(self) -> dict[str, Any]:
        storage, pool = self._engine.storage, self._engine.pool
        return {
            "format": FORMAT,
            "version": VERSION,
            "lane": self._lane,
            "model": self._model,
            "num_blocks": pool.num_blocks,
            "block_size": storage.block_size,
            "bytes_per_block": storage.spec.bytes_per_block(storage.block_size),
            "max_model_len": self._engine.config.max_model_len,
        }

    def frame(self) -> dict[str, Any]:
        """What changed since the last frame, and the counts of the last step."""
        engine = self._engine
        changes, present = {}, set()
        for row in rows(engine):
            present.add(row.name)
            if change := self._change(row):
                changes[row.name] = change
        gone = [name for name in self._known if name not in present]
        for name in gone:
            del self._known[name]
        step = asdict(engine.trace[-1]) if engine.trace else {}
        held = engine.pool.num_blocks - engine.pool.num_free
        frame = {"lane": self._lane, **step, "blocks_held": held}
        frame["generated"] = engine.stats.num_generation_tokens
        frame |= {"sequences": changes, "gone": gone}
        return frame | self._index_changes()

    def _change(self, row: Row) -> dict[str, Any]:
        known = self._known.get(row.name)
        change: dict[str, Any] = {}
        if known is None:
            known = self._known[row.name] = _Known()
            change["prompt"] = row.num_prompt_tokens
        if row.status != known.status:
            change["status"] = known.status = row.status
        if row.num_stored != known.num_stored:
            change["stored"] = known.num_stored = row.num_stored
        if row.blocks != known.blocks:
            pairs = zip(row.blocks, known.blocks, strict=False)
            same = next((i for i, (new, old) in enumerate(pairs) if new != old), None)
            if same is None:
                same = min(len(row.blocks), len(known.blocks))
            change["from"], change["blocks"] = same, row.blocks[same:]
            known.blocks = row.blocks.copy()
        if len(row.tokens) > known.num_tokens:
            change["tokens"] = [self._text(token_id) for token_id in row.tokens[known.num_tokens :]]
            known.num_tokens = len(row.tokens)
        return change

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            tokenizer = self._engine.inputs.tokenizer
            ids = [token_id]
            text = f"#{token_id}" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
            self._texts[token_id] = text
        return text

    def _index_changes(self) -> dict[str, Any]:
        """Blocks that became findable, with the start of their prefix hash, and those that are no more."""
        now, before = self._engine.pool.published, self._published
        new = {block: name for block, name in now.items() if before.get(block) != name}
        lost = [block for block in before if block not in now]
        if new or lost:
            before.update(new)
            for block in lost:
                del before[block]
        return {"published": {str(b): name.hex()[:12] for b, name in new.items()}, "unpublished": lost}


class Recorder:
    """Writes a recording: the header now, a frame with each `write_step`."""

    def __init__(self, engine: Engine, model: str, file: TextIO) -> None:
        self._camera, self._file = Camera(engine, "blocks", model), file
        self._write(self._camera.header())

    def write_step(self) -> None:
        self._write(self._camera.frame())

    def close(self) -> None:
        """Write how the run ended, and close the file."""
        self.write_step()
        self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        print(json.dumps(value, ensure_ascii=False, separators=(",", ":")), file=self._file)


@contextmanager
def recording(llm: LLM, path: str | Path) -> Iterator[None]:
    """Record every step that `llm` takes inside the `with` block into the file `path`.

    with recording(llm, "run.jsonl"):
        llm.generate(prompts, params)
    """
    engine, before = llm.engine, llm.engine.on_step
    file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  the recorder closes it
    recorder = Recorder(engine, llm.name, file)

    def on_step(plan: Any) -> None:
        recorder.write_step()
        if before is not None:
            before(plan)

    engine.on_step = on_step
    try:
        yield
    finally:
        engine.on_step = before
        recorder.close()


def write_trace(llm: LLM, path: str | Path, trace: Iterable[StepRecord] | None = None) -> None:
    """Write `llm.trace`, or a part of it, as a recording: the curves of a run that is over, no blocks."""
    generated = 0
    with Path(path).open("w", encoding="utf-8") as file:
        print(json.dumps(Camera(llm.engine, "blocks", llm.name).header(), ensure_ascii=False), file=file)
        for step in llm.trace if trace is None else trace:
            generated += step.decode_tokens
            print(json.dumps({"lane": "blocks", **asdict(step), "generated": generated}), file=file)
