"""What the course says from code, in the language of the notebook that it is said in.

The English message is the key. `zh.toml` beside this file holds the Chinese of it, with the same fields in
braces; a message that it lacks is said in English.
"""

import tomllib
from functools import cache
from pathlib import Path

LANGUAGES = ("zh",)


def of_notebook() -> str:
    """`zh` in a notebook under a folder of that name, where its kernel runs; else `en`."""
    return next((part for part in Path.cwd().parts[-2:] if part in LANGUAGES), "en")


def said(message: str, language: str | None = None, /, **fields: object) -> str:
    """`message` with its fields filled in, in `language` (that of the notebook unless one is named)."""
    return messages(language or of_notebook()).get(message, message).format(**fields)


@cache
def messages(language: str) -> dict[str, str]:
    """English message -> message in `language`; empty for English."""
    if language not in LANGUAGES:
        return {}
    return tomllib.loads((Path(__file__).parent / f"{language}.toml").read_text(encoding="utf-8"))
