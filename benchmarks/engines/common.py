"""What every engine of the comparison shares: arguments, the requests, and the one line of JSON it prints.

Imports nothing but the standard library: each engine runs under its own interpreter.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--mix", type=Path, required=True, help="JSON list of requests")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--option", default="", help="variant of the engine")
    return parser.parse_args()


def read_mix(path: Path) -> list[dict]:
    """[{"id", "prompt_token_ids", "max_tokens"}, …], in order of arrival; all arrive at once."""
    return json.loads(path.read_text())


def report(
    requests: Sequence[dict], lengths: Sequence[int], seconds: float, ttft: Sequence[float] | None
) -> None:
    """Print the result. Exits with a message when an output is not exactly as long as was asked for.

    ttft: seconds from the start to the first token of each request, where the engine tells.
    """
    wanted = [request["max_tokens"] for request in requests]
    if list(lengths) != wanted:
        first = next(i for i, (a, b) in enumerate(zip(lengths, wanted, strict=True)) if a != b)
        sys.exit(
            f"request {requests[first]['id']} got {lengths[first]} tokens, {wanted[first]} were asked for"
        )
    result = {
        "seconds": seconds,
        "output_tokens": sum(wanted),
        "ttft_mean": sum(ttft) / len(ttft) if ttft else None,
    }
    print("RESULT " + json.dumps(result), flush=True)


def serve(llm: Any, sampling_params: type, requests: Sequence[dict]) -> tuple[list[Any], float]:
    """Warm up, then serve all requests to their exact lengths: the outputs, and the seconds that took.

    llm, sampling_params: minipaged's or vLLM's, which are called alike.
    """
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
    warm = sampling_params(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate(prompts[:4], warm, use_tqdm=False)
    params = [sampling_params(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, time.perf_counter() - start


def output_lengths(outputs: Sequence[Any]) -> list[int]:
    return [len(output.outputs[0].token_ids) for output in outputs]
