"""An offline job in one screen, prompts in, answers out; one line of it says whose engine runs it.

    python examples/offline_batch.py prompts.jsonl answers.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct

A line of the input is {"id": …, "prompt": …}. Stopped and started again, it goes on with the lines that have
no answer yet. `minipaged batch` does the same and more: it survives bad lines, and runs on many machines.
"""

import argparse
import json
import os
from pathlib import Path

from minipaged import LLM, SamplingParams  # or: from vllm import LLM, SamplingParams

CHUNK = 64  # answers that are written at once, and lost at most


def finished(path: Path) -> set[str]:
    """Ids that have an answer. A last line that was only half written is cut off."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    path.write_bytes(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    done = finished(args.target)
    rows = [json.loads(line) for line in args.source.read_text(encoding="utf-8").splitlines()]
    todo = [row for row in rows if row["id"] not in done]
    llm = LLM(model=args.model, dtype=args.dtype, max_model_len=1024, max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with args.target.open("a", encoding="utf-8") as target:
        for start in range(0, len(todo), CHUNK):
            chunk = todo[start : start + CHUNK]
            outputs = llm.generate([row["prompt"] for row in chunk], params)
            for row, output in zip(chunk, outputs, strict=True):
                best = output.outputs[0]
                answer = {"id": row["id"], "text": best.text, "token_ids": list(best.token_ids)}
                target.write(json.dumps(answer) + "\n")
            target.flush()
            os.fsync(target.fileno())


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    main()
