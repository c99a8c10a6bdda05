"""What an open live page costs the engine: tokens a second with it and without, in turn, on one server.

    python benchmarks/page_cost.py [--rounds 6]

`minipaged serve` with 1,000 blocks gets 64 requests at once, of 64 prompt and 64 output tokens. In every
other round a client reads the page's feed, ten frames a second, as a browser would. It prints each round
and the ratio of the medians; the page's own drawing happens in the browser and is not in it.
"""

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

REQUESTS, PROMPT, OUTPUT = 64, 64, 64
SERVER = ["--kv-memory", "352MiB", "--max-model-len", "512", "--max-num-seqs", str(REQUESTS)]
"""1,001 blocks of 16 tokens in 16 bits."""


class Watcher:
    """Reads the feed inside a `with` block and counts its frames."""

    def __init__(self, port: int) -> None:
        self.frames = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def __enter__(self) -> "Watcher":
        self._connection.request("GET", "/page/frames")
        self._answer = self._connection.getresponse()
        self._answer.readline()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        try:
            while self._answer.readline():
                self.frames += 1
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it was closed

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def ask(port: int, number: int) -> None:
    """One answer of exactly OUTPUT tokens to a prompt that shares no block with another."""
    body = {"prompt": [(number * 97 + i * 31) % 40_000 + 100 for i in range(PROMPT)], "max_tokens": OUTPUT,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = json.loads(answer.read())
    if answer.status != 200 or said["usage"]["completion_tokens"] != OUTPUT:
        raise RuntimeError(f"{answer.status}: {said}")
    connection.close()


def measure(port: int, start: int) -> float:
    """Output tokens a second of REQUESTS requests that arrive together."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda number: ask(port, number), range(start, start + REQUESTS)))
        return REQUESTS * OUTPUT / (time.perf_counter() - begun)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server ended with {server.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="with the page, and as many without (default 6)"
    )
    rounds = parser.parse_args().rounds
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "minipaged", "serve", "--port", str(port), *SERVER]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(port, server)
            measure(port, 0)
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for number in range(2 * rounds):
                watched = number % 4 in (1, 2)  # off, on, on, off: a drift hits both alike
                start = (number + 1) * REQUESTS
                if watched:
                    with Watcher(port) as page:
                        speeds[True].append(measure(port, start))
                    print(f"page open: {speeds[True][-1]:7.1f} tokens/s, {page.frames} frames", flush=True)
                else:
                    speeds[False].append(measure(port, start))
                    print(f"no page:   {speeds[False][-1]:7.1f} tokens/s", flush=True)
        finally:
            server.terminate()
    cost = 1 - statistics.median(speeds[True]) / statistics.median(speeds[False])
    print(f"an open page costs {cost:.1%} of the tokens a second (medians of {rounds} rounds each)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
