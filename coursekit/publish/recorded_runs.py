"""The recorded runs that the site plays: the engine of the lessons, serving what the lessons serve.

    python -m coursekit.publish.recorded_runs FOLDER     writes 04.jsonl and so on

The model is SmolLM2 in float32, answers are greedy or seeded, and time is counted in steps, so that a run is
the same each time it is made on one machine. They are made when the site is built, and not stored.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coursekit.library import QUESTIONS
from coursekit.recording import Recording, record
from coursekit.workloads import load_mix
from minipaged.engine.input_processor import Prompt
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "smollm2-135m"
STRIP = 512
NUM_STRIPS = 5
"""As in `minipaged demo`: 64 MiB of keys and values in 16 bits are five strips of 512 tokens."""
NUM_BLOCKS = 182
"""Of 16 tokens, in the same 64 MiB."""

LIBRARY = (
    "You are the assistant of a small public library. Answer in one or two short sentences. Be friendly, "
    "and never invent a book. The library is open from nine to six on weekdays and from ten to four on "
    "Saturdays. Books may be kept for four weeks, films for one week. A book that comes back late costs ten "
    "cents a day."
)
LONG = (
    "A library keeps its books on many short shelves, and a card in the catalogue lists the shelves that "
    "hold each book. When a reader asks for a book, nobody clears one long shelf for it in advance. The "
    "next free shelf will do, wherever it stands, because the card remembers. "
)


@dataclass(frozen=True)
class Call:
    """One request of a run, and the step before which it arrives."""

    name: str
    prompt: Prompt
    max_tokens: int
    arrives: int = 0
    n: int = 1


def serve(llm: LLM, calls: Sequence[Call], *, lane: str = "blocks", steps: int = 1000) -> Recording:
    """Serve the calls, each to its full length, for at most so many steps; the recording."""
    waiting = list(calls)
    with record(llm, lane=lane) as run:
        for step in range(steps):
            for call in [call for call in waiting if call.arrives <= step]:
                waiting.remove(call)
                temperature, seed = (1.0, 9) if call.n > 1 else (0.0, None)
                params = SamplingParams(
                    n=call.n, temperature=temperature, seed=seed, max_tokens=call.max_tokens, ignore_eos=True
                )
                llm.engine.add_request(call.name, call.prompt, params)
            if not waiting and not llm.engine.has_unfinished_requests():
                break
            llm.engine.step()
    return run


def smollm2(**settings: Any) -> LLM:
    plain: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": STRIP,
        "max_num_batched_tokens": 2048,
        "watermark": 0.0,
    }
    return LLM(MODEL, **(plain | settings))


def chats(count: int) -> list[Call]:
    """The first of the 48 chats that the lessons and the demo serve."""
    return [
        Call(request.id, {"prompt_token_ids": request.prompt_token_ids}, request.max_tokens)
        for request in load_mix("chat48")[:count]
    ]


def one_request() -> Recording:
    """Lessons 01 and 02: one prompt and its answer."""
    llm = smollm2(num_blocks=12, enable_prefix_caching=False)
    return serve(llm, [Call("poem", "Write a short poem about the sea.", 60)])


def block_tables() -> Recording:
    """Lesson 04: ten chats in forty blocks."""
    return serve(smollm2(num_blocks=40, enable_prefix_caching=False), chats(10), steps=140)


def chunks() -> Recording:
    """Lesson 08: a long prompt arrives while two requests decode."""
    llm = smollm2(num_blocks=48, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=8)
    short = [Call("short-1", QUESTIONS[0], 24), Call("short-2", QUESTIONS[1], 24)]
    return serve(llm, [*short, Call("long", LONG * 5, 12, arrives=4)])


def four_samples() -> Recording:
    """Lesson 09: one prompt, four samples."""
    llm = smollm2(num_blocks=32, enable_prefix_caching=False)
    prompt = "Write a short sentence about the sea and the people who live beside it, for a child to read."
    return serve(llm, [Call("sea", prompt, 32, n=4)])


def prefixes() -> Recording:
    """Lesson 10: six questions behind one system prompt; the first is being answered when the others come."""
    llm = smollm2(num_blocks=40)

    def prompt(question: str) -> str:
        messages = [{"role": "system", "content": LIBRARY}, {"role": "user", "content": question}]
        return llm.get_tokenizer().apply_chat_template(messages)

    asked = [Call(f"reader-{i}", prompt(q), 20, arrives=0 if i == 0 else 4) for i, q in enumerate(QUESTIONS)]
    return serve(llm, [*asked, Call("late", prompt(QUESTIONS[0]), 8, arrives=30)])


def preemption() -> Recording:
    """Lesson 11: three requests that all fit at first, and do not as they grow."""
    llm = smollm2(num_blocks=12, block_size=4, enable_prefix_caching=False)
    tokenizer = llm.get_tokenizer()
    calls = [
        Call(name, {"prompt_token_ids": tokenizer.encode(question)[:7]}, 17)
        for name, question in zip("ABC", QUESTIONS, strict=False)
    ]
    return serve(llm, calls)


def whole_engine() -> Recording:
    """Lessons 03 and 12: the 48 chats from blocks, and from strips in as much memory."""
    settings = {"enable_prefix_caching": False, "max_num_seqs": 64}
    blocks = serve(smollm2(num_blocks=NUM_BLOCKS, **settings), chats(48), steps=150)
    strips = smollm2(num_blocks=NUM_STRIPS, block_size=STRIP, **settings)
    return blocks.beside(serve(strips, chats(48), lane="strips", steps=150))


RUNS: dict[str, Callable[[], Recording]] = {
    "01": one_request,
    "04": block_tables,
    "08": chunks,
    "09": four_samples,
    "10": prefixes,
    "11": preemption,
    "12": whole_engine,
}


def recorded_runs(folder: Path) -> dict[str, Recording]:
    """Every run, from `folder` where it was made with this code, or made now and written there."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp, code = folder / "code.sha256", _code()
    if not stamp.exists() or stamp.read_text() != code:
        for name, make in RUNS.items():
            make().save(folder / f"{name}.jsonl")
        stamp.write_text(code)
    return {name: Recording.load(folder / f"{name}.jsonl") for name in RUNS}


def _code() -> str:
    """A digest of all that a run depends on."""
    digest = hashlib.sha256()
    for path in [
        *sorted((ROOT / "minipaged").rglob("*.py")),
        ROOT / "coursekit/recording.py",
        Path(__file__),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    recorded_runs(Path(sys.argv[1]))
