"""Frames of the engine's memory, as lines of JSON: for the live page, and for a recording of a run.

docs/recordings.md describes the format. A frame has only what changed since the one before, so that a page
costs the engine little and a file stays small. A camera looks into requests and block tables, and changes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minipaged.core.request import Request, Status, StepPlan
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM

FORMAT, VERSION = "minipaged-recording", 1


class Camera:
    """Makes frames of one engine for a reader who has seen every frame before."""

    def __init__(self, engine: Engine, lane: str, model: str) -> None:
        self._engine, self._lane, self._model = engine, lane, model
        self._known: dict[str, dict[str, Any]] = {}  # sequence -> what its reader knows
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
        engine, changes, present = self._engine, {}, set()
        for parent in engine.requests.values():
            for request in parent.unfinished:
                name = f"{request.request_id}/{request.index}"
                present.add(name)
                if change := self._change(name, request):
                    changes[name] = change
        gone = [name for name in self._known if name not in present]
        for name in gone:
            del self._known[name]
        step = asdict(engine.trace[-1]) if engine.trace else {}
        counts = {
            "blocks_held": engine.pool.num_blocks - engine.pool.num_free,
            "generated": engine.scheduler.stats.num_generation_tokens,
        }
        found = {"lane": self._lane, **step, **counts, "sequences": changes, "gone": gone}
        return found | self._index_changes()

    def _change(self, name: str, request: Request) -> dict[str, Any]:
        if (known := self._known.get(name)) is None:
            known = {"status": "", "stored": 0, "prompt": 0, "blocks": [], "num_tokens": 0}
            self._known[name] = known
        swapped = request.status is Status.SWAPPED  # its blocks are the host's
        now: dict[str, Any] = {
            "status": request.status.name.lower(),
            "stored": 0 if swapped else request.table.num_tokens,
            "prompt": request.parent.num_prompt_tokens,
        }
        change = {key: value for key, value in now.items() if known[key] != value}
        known |= now
        blocks, before = [] if swapped else request.table.blocks, known["blocks"]
        if blocks != before:
            pairs = enumerate(zip(blocks, before, strict=False))
            same = next((i for i, (new, old) in pairs if new != old), min(len(blocks), len(before)))
            change |= {"from": same, "blocks": blocks[same:]}
            known["blocks"] = blocks.copy()
        if len(request.tokens) > known["num_tokens"]:
            change["tokens"] = [self._text(token_id) for token_id in request.tokens[known["num_tokens"] :]]
            known["num_tokens"] = len(request.tokens)
        return change

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            tokenizer, ids = self._engine.inputs.tokenizer, [token_id]
            text = f"#{token_id}" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
            self._texts[token_id] = text
        return self._texts[token_id]

    def _index_changes(self) -> dict[str, Any]:
        """Blocks that became findable, with the start of their prefix hash, and those that are no more."""
        now, before = self._engine.pool.published, self._published
        new = {block: name.hex()[:12] for block, name in now.items() if before.get(block) != name}
        lost = [block for block in before if block not in now]
        if not new and not lost:
            return {}
        self._published = dict(now)
        return {"published": new, "unpublished": lost}


def line(value: dict[str, Any]) -> str:
    """A header or a frame as a line of a recording."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


@contextmanager
def recording(llm: LLM, path: Path) -> Iterator[None]:
    """Write a frame of each step that `llm` takes inside the `with` block, and one of how it ended."""
    camera = Camera(llm.engine, "blocks", llm.name)
    with path.open("w", encoding="utf-8") as file:
        file.write(line(camera.header()))

        def on_step(plan: StepPlan) -> None:
            file.write(line(camera.frame()))

        llm.engine.on_step = on_step
        try:
            yield
        finally:
            llm.engine.on_step = None
            file.write(line(camera.frame()))
