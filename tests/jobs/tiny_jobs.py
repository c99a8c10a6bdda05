"""A small model on disk, a file of prompts for it, and how to read what a job wrote."""

import json
from pathlib import Path
from typing import Any

from minipaged.engine.args import EngineArgs
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import named_weights, save_folder

JOB = {"sampling": {"max_tokens": 9, "ignore_eos": True}, "seed": 0}


def engine_args(folder: Path) -> EngineArgs:
    """For an engine with a tiny random model, saved in `folder`; it has no tokenizer."""
    model = folder / "model"
    if not model.exists():
        save_folder(model, TINY, named_weights(random_llama(seed=3)))
    return EngineArgs(str(model), dtype="float32", device="cpu", num_blocks=200, max_model_len=64)


def prompts(count: int) -> list[dict[str, Any]]:
    """Greedy and drawn lines of many lengths, with prefixes that some share."""
    return [
        {
            "id": f"r{n}",
            "prompt_token_ids": [5 + n % 3] * (17 + n % 5) + [7 + n % 11],
            "max_tokens": 3 + n % 13,
            "temperature": 0.9 * (n % 2),
        }
        for n in range(count)
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The results in the order of the input; every line of the file must be whole."""
    text = path.read_bytes()
    assert not text or text.endswith(b"\n")
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda result: result["line"])


def echo(tasks):
    """Serves without a model: the answer is the prompt."""
    for task in tasks:
        ids = list(task.prompt.get("prompt_token_ids", ()))
        output = {"text": "", "token_ids": ids, "finish_reason": "length"}
        known = {"line": task.line, "id": task.id, "key": task.key}
        yield known | {"prompt_tokens": len(ids), "outputs": [output]}
