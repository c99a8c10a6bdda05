"""Reading small files that came with a model: only plain files, and no more of them than makes sense."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from minipaged.model.errors import naming

MOST_TEXT = 2**22  # bytes of a JSON or template; those of real models stay below 1.5 MB
MOST_TOKENIZER = 2**26  # bytes of a tokenizer.json; one of 262 144 tokens has 34 MB


def is_there(path: Path) -> bool:
    """Whether a plain file is there; ModelLoadError that names `path` if something else is.

    A pipe would be waited for, a device read for ever.
    """
    with naming(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(mode):
            raise ValueError("not a plain file")
    return True


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """The file's text; ModelLoadError that names it for what is no plain file, longer or not UTF-8."""
    if not is_there(path):
        with naming(path):
            raise ValueError("no such file")
    with naming(path):
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"longer than {most} bytes, which no model needs here")
        return content.decode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelLoadError that names the file."""
    text = read_text(path)
    with naming(path):
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"holds {type(content).__name__}, a JSON object is needed")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}
