"""What every engine of the comparison shares: arguments, the requests, and the one line of JSON it prints.

Imports nothing but the standard library: each engine runs under its own interpreter.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


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
