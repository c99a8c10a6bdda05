"""Measure, and draw the pictures of the documents in English and Chinese: what `make pictures` runs.

    docs/images/kv_growth[.zh].svg          KV memory against sequence length
    docs/images/strip_and_blocks[.zh].svg   one long strip beside the same memory in blocks
    docs/images/measured.json               what was measured for them, and for the figures that README states

Measured on SmolLM2-135M in bfloat16, so that every machine gives the same data. Takes about a minute.
"""

import json
import random
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib import font_manager

from coursekit.comparison import serve
from coursekit.figures import save
from coursekit.figures.book import COLUMNS, growth, lanes, strip_and_blocks
from coursekit.workloads import load_mix
from minipaged import AttentionBatch, BlockPool, BlockTable, KVSpec, KVStorage, load_model
from minipaged.attention import get_backend
from minipaged.memory import blocks_for

IMAGES = Path(__file__).resolve().parent.parent / "docs/images"
LENGTHS = (1, 128, 256, 384, 512, 640, 768, 896, 1024)
BLOCK_SIZE, NUM_BLOCKS = 16, 16
SEED = 26
FEWEST_BLOCKS = 5

WORDS = {
    "": {
        "tokens": "sequence length (tokens)",
        "memory": "KV cache (MiB)",
        "formula": "{bytes_per_token} bytes per token",
        "measured": "measured on SmolLM2-135M",
        "strip": "one contiguous strip",
        "blocks": "the same memory in blocks of {block_size} tokens",
        "held": "{num_tokens} tokens",
        "reserved": "{empty} slots\nreserved,\nempty",
        "table": "block table",
        "this": "this request",
        "other": "other requests",
        "free": "free",
    },
    ".zh": {
        "tokens": "序列长度（词元）",
        "memory": "KV 缓存（MiB）",
        "formula": "每词元 {bytes_per_token} 字节",
        "measured": "在 SmolLM2-135M 上实测",
        "strip": "一整段连续内存",
        "blocks": "同样的内存，切成 {block_size} 词元的块",
        "held": "{num_tokens} 个词元",
        "reserved": "{empty} 个槽位\n已预留，\n空着",
        "table": "块表",
        "this": "本请求",
        "other": "其他请求",
        "free": "空闲",
    },
}
CHINESE_FONTS = (
    "NotoSansCJK-Regular",
    "SourceHanSansSC-Regular",
    "PingFang",
    "msyh",
    "wqy-microhei",
)  # files


def measure_growth(model: Any, spec: KVSpec) -> list[tuple[int, int]]:
    """(tokens, bytes) pairs: bytes of a cache full of NaN that the model has written over (lesson 02)."""
    storage = KVStorage(spec, LENGTHS[-1] // BLOCK_SIZE, BLOCK_SIZE)
    for tensor in storage.tensors:
        tensor.fill_(torch.nan)
    backend, found, start = get_backend("torch"), [], 0
    for stop in LENGTHS:
        blocks = [range(LENGTHS[-1] // BLOCK_SIZE)]
        batch = AttentionBatch.build(blocks, [stop - start], [stop], BLOCK_SIZE)
        model.model(torch.arange(start, stop) + 1000, batch, storage, backend)
        found.append((stop, sum(int((~t.isnan()).sum()) * t.element_size() for t in storage.tensors)))
        start = stop
    return found


def measure_blocks() -> dict[str, Any]:
    """The engine's pool, small, under requests of recorded lengths: the first whose blocks lie scattered.

    Its lines must be drawable without crossings, and other requests and free blocks be there. No model is
    needed: which blocks a request gets depends on the lengths alone.
    """
    requests = [request for mix in ("instruct64", "chat48") for request in load_mix(mix)]
    prompts = [len(request.prompt_token_ids) for request in requests]
    ends = [prompt + request.max_tokens - 1 for prompt, request in zip(prompts, requests, strict=True)]
    waiting = [pair for pair in zip(prompts, ends, strict=True) if pair[1] <= NUM_BLOCKS * BLOCK_SIZE]
    random.Random(SEED).shuffle(waiting)
    pool = BlockPool(NUM_BLOCKS, enable_prefix_caching=False)
    running: list[tuple[BlockTable, tuple[int, int]]] = []
    while waiting or running:
        for ended in [one for one in running if one[0].num_tokens >= one[1][1]]:
            ended[0].free()
            running.remove(ended)
        while waiting and blocks_for(waiting[0][0], BLOCK_SIZE) <= pool.num_free:
            running.append((BlockTable(pool, BLOCK_SIZE), waiting.pop(0)))
            running[-1][0].append(running[-1][1][0])
        for one in list(running):
            while one in running and one[0].append(1) is None:  # the pool is full: the last one gives way
                table, pair = running.pop()
                table.free()
                waiting.insert(0, pair)
        for table, _ in running:
            enough = len(table.blocks) >= FEWEST_BLOCKS and len(running) >= 3 and pool.num_free
            rows = {block // COLUMNS for block in table.blocks}
            apart = all(b - a != 1 for a, b in pairwise(table.blocks))
            scattered = apart and len(rows) == NUM_BLOCKS // COLUMNS
            if enough and scattered and lanes(table.blocks):
                others = sorted({block for one, _ in running if one is not table for block in one.blocks})
                return {"table": table.blocks, "num_tokens": table.num_tokens, "others": others}
    raise RuntimeError(f"with seed {SEED} no request has blocks that can be drawn")


def measure_at_once(model: Any) -> dict[str, int]:
    """Most requests at once in 64 MiB, by policy, as `make demo` shows them."""
    settings = {"kv_memory": "64MiB", "max_model_len": 512, "use_tqdm": False}
    policies = {"strips of 512": 512, "blocks of 16": 16}
    requests = load_mix("chat48")
    return {
        name: serve(name, model, requests, block_size=size, **settings).figures()["running_peak"]
        for name, size in policies.items()
    }


def chinese_font() -> str | None:
    """The family of a font with Chinese signs on this machine, made known to matplotlib."""
    files = {Path(file).stem: file for file in font_manager.findSystemFonts()}
    found = next((files[name] for name in CHINESE_FONTS if name in files), None)
    if found is None:
        return None
    font_manager.fontManager.addfont(found)
    return font_manager.FontProperties(fname=found).get_name()


def draw(measured: dict[str, Any], suffix: str, font: str) -> None:
    numbers = {
        "bytes_per_token": f"{measured['bytes_per_token']:,}".replace(",", " "),
        "block_size": BLOCK_SIZE,
        "num_tokens": measured["blocks"]["num_tokens"],
        "empty": NUM_BLOCKS * BLOCK_SIZE - measured["blocks"]["num_tokens"],
    }
    words = {name: text.format(**numbers) for name, text in WORDS[suffix].items()}
    pictures = {
        "kv_growth": growth(measured["bytes_per_token"], measured["growth"], words, font),
        "strip_and_blocks": strip_and_blocks(
            **measured["blocks"],
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            words=words | {"tokens": words["held"]},
            font=font,
        ),
    }
    with TemporaryDirectory() as folder:
        for name, figure in pictures.items():
            svg, _ = save(figure, Path(folder) / name)
            shutil.copy(svg, IMAGES / f"{name}{suffix}.svg")


def main() -> int:
    chinese = chinese_font()
    if chinese is None:
        print(
            f"pictures: no font with Chinese signs found, looked for {', '.join(CHINESE_FONTS)}",
            file=sys.stderr,
        )
        return 1
    model = load_model("smollm2-135m", dtype=torch.bfloat16)
    spec = KVSpec.from_model(model.config, torch.bfloat16)
    measured = {
        "bytes_per_token": spec.bytes_per_token,
        "growth": measure_growth(model, spec),
        "blocks": measure_blocks(),
        "at_once": measure_at_once(model),
    }
    (IMAGES / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    draw(measured, "", "DejaVu Sans")
    draw(measured, ".zh", chinese)
    print(f"pictures: written to {IMAGES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
