"""The computed tables of docs/scaling.md: what a card holds of the keys and values, and vLLM's flags.

python -m coursekit.publish.scaling     writes them into the document; a test holds it to them
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from coursekit.vllm_today import SETTINGS
from minipaged.memory import KVSpec

DOCUMENT = Path("docs/scaling.md")
# A model of 70 billion parameters in 16 bits on cards of 80 GB, as in lesson 02 and beside lesson 14.
SPEC = KVSpec(num_layers=80, num_kv_heads=8, head_size=128, dtype=torch.float16)
WEIGHT_BYTES, CARD_BYTES, CONTEXT, BLOCK_SIZE = 140 * 10**9, 80 * 10**9, 4096, 16
CARDS = (1, 2, 4, 8, 16)


def tensor_parallel(spec: KVSpec, cards: int) -> KVSpec:
    """What one of `cards` stores of each token: its share of the KV heads. Where there are fewer heads than
    cards they are repeated, as in vLLM's `get_num_kv_heads`."""
    return replace(spec, num_kv_heads=max(1, spec.num_kv_heads // cards))


def pipeline_parallel(spec: KVSpec, cards: int) -> KVSpec:
    """What the fullest of `cards` stores of each token: all heads of its layers."""
    return replace(spec, num_layers=-(-spec.num_layers // cards))


def requests_that_fit(spec: KVSpec, cards: int) -> int:
    """Requests of CONTEXT tokens in the room beside one card's share of the weights."""
    room = CARD_BYTES - WEIGHT_BYTES // cards
    return max(0, room // spec.bytes_for(CONTEXT, BLOCK_SIZE))


def cards_table() -> str:
    """One row for a number of cards, for both ways to split the model."""
    header = ["cards"]
    for way in ("tensor parallel", "pipeline parallel"):
        header += [f"{way}: bytes per token and card", f"requests of {CONTEXT} tokens"]
    rows = []
    for cards in CARDS:
        row = [str(cards)]
        for split in (tensor_parallel, pipeline_parallel):
            spec = split(SPEC, cards)
            row += [f"{spec.bytes_per_token:,}".replace(",", " "), str(requests_that_fit(spec, cards))]
        rows.append(row)
    return markdown(header, rows)


def flags_table() -> str:
    """vLLM's command-line flag for each of its settings that the course meets."""
    rows = []
    for setting in SETTINGS:
        (lesson,) = Path("notebooks").glob(f"{setting.lesson:02}_*.ipynb")
        ours = f"`{setting.ours}`" if setting.ours else "–"
        flag = f"`--{setting.name.replace('_', '-')}`"
        rows.append([flag, ours, f"[{setting.lesson:02}](../{lesson.as_posix()})", setting.subject])
    return markdown(["vLLM", "minipaged", "lesson", "what it sets"], rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES = {"cards": cards_table, "flags": flags_table}


def with_tables(text: str) -> str:
    """The document with its computed tables as they are now; ValueError if a mark for one is missing."""
    for name, table in TABLES.items():
        mark = re.compile(rf"(<!-- computed: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if len(mark.findall(text)) != 1:
            raise ValueError(f"the document needs one `<!-- computed: {name} -->` with its `<!-- end -->`")
        text = mark.sub(lambda found, table=table: found[1] + table() + found[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
