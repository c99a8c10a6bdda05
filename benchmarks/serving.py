"""Our server beside `vllm serve`: the same client, the same requests, the same arrivals.

    python benchmarks/serving.py                                # both, where vLLM is installed (`make peers`)
    python benchmarks/serving.py --engines minipaged --repeat 1 # ours alone

For each server: seconds from its start to the first answer; output tokens a second when a mix comes at once
(saturation); time to first token, mean and 99th percentile, when requests come at random moments at half of
the rate at which vLLM is saturated (of the slowest server, where vLLM is missing). For ours also what HTTP
adds: the same mix given to `LLM.generate` in a process of its own. Servers run one at a time; the client is
this process, and takes its share of the processors from every server alike. A try beside other work is
taken again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.mixes import Mix, mix_of, named_mix
from benchmarks.processes import (
    ENGINES,
    KV_BYTES,
    MAX_LEN,
    MODEL,
    OURS,
    ROOT,
    VLLM,
    RunningEngine,
    Settings,
    add_arguments,
    environment,
    export_model,
    settings_from,
)
from benchmarks.quiet import when_quiet

NAME = "bench"  # under which both serve the model
START_SECONDS = 600.0  # vLLM's first start was seen to take 103
RATE_SHARE = 0.5  # of vLLM's saturation


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it. Seconds from when it was sent."""

    num_tokens: int
    ttft: float
    latency: float


def command(engine: str, settings: Settings, port: int) -> list[str]:
    """What starts the server of an engine; both have the same room for keys and values."""
    common = ["--model", str(MODEL), "--dtype", settings.dtype, "--max-model-len", str(MAX_LEN)]
    common += ["--max-num-seqs", "64", "--served-model-name", NAME, "--host", "127.0.0.1"]
    common += ["--port", str(port)]
    if engine == "minipaged":
        return [str(OURS), "-m", "minipaged", "serve", *common, "--kv-memory", str(KV_BYTES)]
    server = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", *common]
    return [*server, "--kv-cache-memory-bytes", str(KV_BYTES), "--disable-uvicorn-access-log"]


@contextmanager
def serving(engine: str, settings: Settings) -> Iterator[tuple[int, float]]:
    """A server of this engine: its port, and the seconds from its start to its first answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        child = subprocess.Popen(
            command(engine, settings, port), env=environment(settings), stdout=log, stderr=log, cwd=ROOT
        )
        try:
            first = {"prompt_token_ids": [1, 2, 3], "max_tokens": 1}
            while True:
                try:
                    asyncio.run(ask(port, first))
                    break
                except OSError:
                    if child.poll() is not None or time.perf_counter() - start > START_SECONDS:
                        log.seek(0)
                        raise RuntimeError(f"{engine} does not serve: {log.read()[-2000:]}") from None
                    time.sleep(0.05)
            yield port, time.perf_counter() - start
        finally:
            end(child)


def end(child: subprocess.Popen[str]) -> None:
    """End a server and its children, if they have not ended already."""
    try:
        server = psutil.Process(child.pid)
        family = [server, *server.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    child.terminate()
    _, left = psutil.wait_procs(family, timeout=60)
    for process in left:
        process.kill()


async def ask(port: int, request: dict[str, Any]) -> Answer:
    """Send one request for a stream and read it to its end. Raises OSError when it is not answered.

    A socket and no HTTP package: on two cores the client's own work counts.
    """
    body = json.dumps({
        "model": NAME, "prompt": request["prompt_token_ids"], "max_tokens": request["max_tokens"],
        "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status = await reader.readline()
        first, last = None, b""
        async for line in reader:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                last = line
        if b" 200 " not in status or first is None:
            raise ConnectionError(f"the server answered {status!r}")
        done = time.perf_counter()
        usage = json.loads(last[6:])["usage"]
        return Answer(usage["completion_tokens"], first - start, done - start)
    finally:
        writer.close()


async def serve_mix(port: int, mix: Mix, arrivals: Sequence[float]) -> tuple[list[Answer], float]:
    """The answers to a mix whose requests are sent at these moments, and the seconds until the last one."""
    start = time.perf_counter()

    async def one(request: dict[str, Any], moment: float) -> Answer:
        await asyncio.sleep(start + moment - time.perf_counter())
        return await ask(port, request)

    answers = await asyncio.gather(*[one(r, at) for r, at in zip(mix, arrivals, strict=True)])
    for request, answer in zip(mix, answers, strict=True):
        if answer.num_tokens != request["max_tokens"]:
            raise RuntimeError(f"{answer.num_tokens} tokens came, {request['max_tokens']} were asked for")
    return answers, time.perf_counter() - start


def fresh(mix: Mix, number: int) -> Mix:
    """The same lengths with other tokens, so that no try finds the prompts of another in the prefix cache."""
    return [
        request | {"prompt_token_ids": [token + number for token in request["prompt_token_ids"]]}
        for request in mix
    ]


def poisson(number: int, rate: float, seed: int = 1) -> list[float]:
    """Moments at which `number` requests come, `rate` a second."""
    chance, now, moments = random.Random(seed), 0.0, []
    for _ in range(number):
        now += chance.expovariate(rate)
        moments.append(now)
    return moments


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def at_once(port: int, mix: Mix) -> float:
    """Output tokens a second when all requests come at once."""
    answers, seconds = asyncio.run(serve_mix(port, mix, [0.0] * len(mix)))
    return sum(answer.num_tokens for answer in answers) / seconds


def at_rate(port: int, mix: Mix, rate: float) -> dict[str, float]:
    """Times to first token when the requests come at random moments, `rate` a second."""
    answers, seconds = asyncio.run(serve_mix(port, mix, poisson(len(mix), rate)))
    ttfts = [answer.ttft for answer in answers]
    return {
        "ttft_mean": sum(ttfts) / len(mix),
        "ttft_p99": percentile(ttfts, 0.99),
        "tokens_per_second": sum(answer.num_tokens for answer in answers) / seconds,
    }


def generated(engine: RunningEngine, mix: Mix) -> float:
    """Output tokens a second of `LLM.generate` on the same mix."""
    result = engine.sample("generate", mix)
    return result["output_tokens"] / result["seconds"]


def measure(engines: Sequence[str], settings: Settings, mix: Mix, args: argparse.Namespace) -> dict[str, Any]:
    """What each server does, by name. vLLM comes first: its saturation sets the rate."""
    found: dict[str, Any] = {}
    rate = args.rate
    for engine in sorted(engines, key=lambda name: name != "vllm"):
        found[engine] = measure_one(engine, settings, mix, rate, args)
        rate = found[engine]["rate"]
        print(f"{engine}: {json.dumps(found[engine])}", file=sys.stderr, flush=True)
    return found


def measure_one(
    engine: str, settings: Settings, mix: Mix, rate: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    """What one server does, at `rate` or at half of its saturation.

    `LLM.generate` takes turns with our server, and the best try of each counts: what HTTP adds is little, and
    the machine of one minute is not that of the next.
    """
    numbers = count(1)

    def serve_at_once() -> float:
        return at_once(port, fresh(mix, next(numbers)))

    def serve_at_rate() -> dict[str, float]:
        requests = islice(cycle(mix), args.requests)
        return at_rate(port, [fresh([request], next(numbers))[0] for request in requests], rate)

    tries, alone = [], []
    with ExitStack() as stack:
        port, seconds = stack.enter_context(serving(engine, settings))
        if engine == "minipaged":
            without_http = RunningEngine(replace(ENGINES[engine], option="caching"), settings)
            stack.callback(without_http.close)
            without_http.serve(mix[:8])
        at_once(port, mix[:8])
        for _ in range(args.repeat):
            tries.append(when_quiet(serve_at_once, settings.foreign_limit)[0])
            if engine == "minipaged":
                alone.append(generated(without_http, fresh(mix, next(numbers))))
        rate = rate or RATE_SHARE * max(tries) * len(mix) / sum(request["max_tokens"] for request in mix)
        found = {"start": seconds, "saturation": max(tries), "rate": rate}
        found |= when_quiet(serve_at_rate, settings.foreign_limit)[0]
    if alone:
        found |= {"generate": max(alone), "http_adds": 1 - max(tries) / max(alone)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    known = ("minipaged", "vllm")
    parser.add_argument("--engines", nargs="+", choices=known, default=known)
    parser.add_argument("--mix", default="64+64", help="chat48, instruct64, or 48 times 64+64")
    parser.add_argument("--repeat", type=int, default=3, help="tries at saturation, the best counts")
    parser.add_argument("--requests", type=int, default=96, help="that come at random moments")
    parser.add_argument("--rate", type=float, help="requests a second instead of half of vLLM's saturation")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    engines = [name for name in args.engines if name != "vllm" or VLLM.exists()]
    if len(engines) < len(args.engines):
        print("vllm is skipped: `make peers` installs it", file=sys.stderr)
    export_model()
    mix = mix_of([64] * 48, [64] * 48) if args.mix == "64+64" else named_mix(args.mix)
    found = measure(engines, settings_from(args), mix, args)
    rows = {
        "start": "start to first answer, s",
        "saturation": "output tokens/s at saturation",
        "rate": "requests/s, of which:",
        "ttft_mean": "  mean time to first token, s",
        "ttft_p99": "  99th percentile, s",
        "generate": "LLM.generate, output tokens/s",
        "http_adds": "HTTP adds, share",
    }
    print(f"{'':32}" + "".join(f"{engine:>12}" for engine in found))
    for name, text in rows.items():
        values = [figures.get(name) for figures in found.values()]
        print(f"{text:32}" + "".join(f"{'–' if v is None else format(v, '.3f'):>12}" for v in values))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
