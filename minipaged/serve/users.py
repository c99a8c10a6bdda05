"""The users that the live page sends: the lengths of the course's request mixes, and words to fill them."""

from __future__ import annotations

from functools import lru_cache

from minipaged.engine.llm import LLM

# mix -> "prompt tokens:generated tokens" of each request, in order of arrival
LENGTHS = {
    "chat48": """
        53:36 70:384 42:127 24:22 35:68 22:108 56:54 178:118 34:60 31:117 83:234 74:35 59:77 23:42
        52:72 100:22 16:38 35:54 10:144 17:179 10:19 43:31 17:115 68:11 61:42 45:59 6:198 33:119
        51:48 59:46 13:51 35:252 22:44 26:49 139:88 26:57 52:54 118:23 32:63 48:43 59:183 57:115
        18:63 57:117 181:47 13:165 116:64 59:108""",
    "instruct64": """
        16:32 41:14 37:38 11:23 13:35 11:17 23:54 15:38 26:22 4:39 47:60 15:88 25:8 14:46 12:35
        22:23 28:12 14:60 14:10 25:37 9:62 5:8 21:20 10:10 4:30 9:72 11:103 7:7 6:17 16:41 29:76
        13:34 9:15 20:31 26:25 13:22 23:15 32:33 14:31 9:23 20:21 19:10 34:18 6:58 10:22 9:9 5:64
        17:36 23:110 9:26 41:18 28:9 24:63 21:128 31:14 6:16 24:38 24:14 5:21 20:20 13:29 27:54
        12:25 15:48""",
}
MIXES = {
    name: tuple((int(prompt), int(output)) for prompt, output in (pair.split(":") for pair in text.split()))
    for name, text in LENGTHS.items()
}
# The same lengths, after an introduction that all prompts share.
MIXES["shared prefix"] = tuple((64 + prompt, output) for prompt, output in MIXES["instruct64"])
WORDS = """A library keeps its books on many short shelves, and a card in the catalogue lists the shelves that
hold each book. When a reader asks for a book, nobody clears one long shelf for it in advance. The next free
shelf will do, wherever it stands, because the card remembers. Two readers who begin with the same chapters
share the shelves of these chapters, until one of them writes notes in the margin and gets a copy of his own.
When every shelf is taken, the youngest reader gives his shelves back and starts again later. """


@lru_cache(maxsize=4)
def _words(llm: LLM) -> list[int]:
    """Token ids of WORDS; numbers for a model without a tokenizer."""
    if llm.tokenizer is None:
        return list(range(min(97, llm.model_config.vocab_size)))
    return llm.tokenizer.encode(WORDS)


def user_prompt(llm: LLM, mix: str, number: int, length: int) -> list[int]:
    """`length` token ids for user `number`. Users begin in different places, so that they share nothing,
    but with the introduction where the mix has one."""
    words = _words(llm)
    shared = [words[i % len(words)] for i in range(min(64, length))] if mix == "shared prefix" else []
    start = number * 7 % len(words)
    return shared + [words[(start + i) % len(words)] for i in range(length - len(shared))]
