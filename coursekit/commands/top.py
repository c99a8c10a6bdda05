"""Watch the memory of a running `minipaged serve` in the terminal, one cell a block. Ctrl-C ends.

    minipaged top
    minipaged top http://127.0.0.1:9000

The server's live page shows the same and more. Where the output is no terminal, one picture is printed. A
server with a key wants it in MINIPAGED_API_KEY.
"""

import argparse
import json
import os
import time
from collections.abc import Generator
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minipaged.commands import CommandError

if TYPE_CHECKING:
    from rich.console import Console

ADDRESS = "http://127.0.0.1:8000"
PATIENCE = 10.0  # seconds for the server to answer; between two frames it may be silent as long as it likes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address", nargs="?", default=ADDRESS, metavar="URL", help=f"of the server (default: {ADDRESS})"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    watch(args.address, Console())
    return 0


def watch(address: str, console: "Console") -> None:
    """Draw what the server at `address` tells until it ends; once where the console is no terminal."""
    from rich.live import Live

    from coursekit.live import in_colour, pool_lines
    from coursekit.recording import Lane

    lane, before, rate = None, (0.0, 0), 0.0
    with closing(frames(address)) as told, Live(console=console, auto_refresh=False, transient=True) as live:
        for value in told:
            if value["lane"] != "blocks":  # contiguous memory, which a page may have asked for
                continue
            if "format" in value:
                lane, before = Lane(value), (time.monotonic(), 0)
                continue
            assert lane is not None, "a feed begins with its header"
            lane.apply(value)
            now, generated = time.monotonic(), value["generated"]
            if before[1] and now > before[0]:
                rate = (generated - before[1]) / (now - before[0])
            before = now, generated
            lines = pool_lines(lane, rate, console.width, console.height)
            if not console.is_terminal:
                print(*lines, sep="\n", file=console.file)
                return
            live.update(in_colour(lines), refresh=True)
    console.print(f"{address} has ended")


def frames(address: str) -> Generator[dict[str, Any]]:
    """The server's feed, as docs/recordings.md describes it. CommandError where there is none."""
    where, key = urlsplit(address), os.environ.get("MINIPAGED_API_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection = HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE)
        connection.request("GET", "/page/frames", headers=headers)
        answer = connection.getresponse()
    except (OSError, HTTPException, ValueError) as error:
        raise CommandError(
            f"no `minipaged serve` answers at {address} ({error}): start one, or give the address it printed"
        ) from error
    with closing(connection), answer:
        if answer.status != HTTPStatus.OK:
            said = answer.read(500).decode(errors="replace")
            raise CommandError(f"{address} answers with status {answer.status}: {said}")
        if connection.sock is not None:
            connection.sock.settimeout(None)  # a server that rests has nothing to tell
        with suppress(OSError, HTTPException):  # it has ended
            for text in answer:
                yield json.loads(text)
