"""The HTTP server of `minipaged serve` in this process, for a notebook that measures it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from minipaged.engine.llm import LLM
from minipaged.extras import how_to_install
from minipaged.serve import ServeSettings

T = TypeVar("T")


@contextmanager
def serving(llm: LLM) -> Iterator[int]:
    """A server on a free port of this machine, given out; at the end it has stopped and every block is free.

    Raises ImportError where the extra `serve` is missing.
    """
    try:
        from minipaged.serve.app import Api, make_app
        from minipaged.serve.guards import make_server
    except ImportError as error:
        raise ImportError(f"a server needs more packages: {how_to_install('serve')} ({error})") from error
    settings = ServeSettings(port=0)
    api = Api(llm, settings)
    server = make_server(make_app(api), api.thread, settings)
    with socket.create_server((settings.host, 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server did not start")
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.handle_exit(0, None)
            thread.join()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also in a notebook, whose own loop is running: in a thread for as long as it takes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
