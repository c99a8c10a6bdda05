"""What every engine of the comparison shares: arguments, and serving one mix after the other for its parent.

Imports nothing but the standard library: each engine runs under its own interpreter.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

READY, RESULT = "READY", "RESULT "
WARM_REQUESTS, WARM_TOKENS = 4, 4


class Served(NamedTuple):
    """One request as it came back. Seconds; None where the engine does not tell."""

    num_tokens: int
    ttft: float | None
    """Time to first token, from the arrival of the whole mix."""
    decode_time: float | None
    """From the first token to the last."""


Serve = Callable[[list[dict]], list[Served]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True, help="memory for keys and values")
    parser.add_argument("--max-len", type=int, required=True, help="longest prompt and answer together")
    parser.add_argument("--option", default="", help="variant of the engine")
    return parser.parse_args()


def run(serve: Serve) -> None:
    """Say that the engine is loaded; then serve each line of stdin (requests as JSON), print the result.

    serve: takes requests {"id", "prompt_token_ids", "max_tokens"} that all arrive at once.
    """
    print(READY, flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        serve([request | {"max_tokens": WARM_TOKENS} for request in requests[:WARM_REQUESTS]])
        start = time.perf_counter()
        served = serve(requests)
        seconds = time.perf_counter() - start
        print(RESULT + json.dumps(result_of(requests, served, seconds)), flush=True)


def result_of(requests: Sequence[dict], served: Sequence[Served], seconds: float) -> dict[str, Any]:
    """Totals and means of one run. Exits with a message when an answer is not as long as was asked for."""
    for request, answer in zip(requests, served, strict=True):
        if answer.num_tokens != request["max_tokens"]:
            asked = f"{request['max_tokens']} were asked for"
            sys.exit(f"request {request['id']} got {answer.num_tokens} tokens, {asked}")
    decoded = [s.decode_time / (s.num_tokens - 1) for s in served if s.decode_time and s.num_tokens > 1]
    return {
        "seconds": seconds,
        "output_tokens": sum(answer.num_tokens for answer in served),
        "ttft_mean": mean([s.ttft for s in served if s.ttft is not None]),
        "tpot_mean": mean(decoded),
    }


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def generate(llm: Any, sampling_params: type, requests: Sequence[dict]) -> list[Any]:
    """The outputs of minipaged's or vLLM's LLM, which are called alike: greedy, to the exact length."""
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
    params = [
        sampling_params(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        for request in requests
    ]
    return llm.generate(prompts, params, use_tqdm=False)
