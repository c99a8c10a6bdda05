"""Dispatcher: runs the engine until the outputs that a caller waits for are there.

Streams and a `generate` call may be under way at once: whoever steps the engine moves all of them on, and
each finds its own outputs in its inbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tqdm.auto import tqdm

from minipaged.engine.engine import Engine
from minipaged.engine.outputs import RequestOutput
from minipaged.engine.request import Request


class Dispatcher:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Queue the requests, wait for all, and return their outputs in the order given.

        Whatever ends it early (Ctrl-C, an error of the model), none of them stays in the engine.
        """
        inbox: deque[RequestOutput] = deque()
        done: dict[str, RequestOutput] = {}
        try:
            self._add(requests, inbox)
            with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
                while len(done) < len(requests):
                    if not self.engine.has_unfinished_requests():
                        lost = [r.request_id for r in requests if r.request_id not in done]
                        raise RuntimeError(f"requests {lost} were aborted while their caller waited")
                    self._step()
                    bar.update(len(inbox))
                    while inbox:
                        output = inbox.popleft()
                        done[output.request_id] = output
        finally:
            self._remove(requests)
        return [done[request.request_id] for request in requests]

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Queue the request at the first `next`; abort it when the iterator is closed before its end."""
        inbox: deque[RequestOutput] = deque()
        try:
            self._add([request], inbox)
            finished = False
            while not finished:
                while not inbox:
                    if request.request_id not in self.engine.requests:
                        return  # somebody else aborted it: nothing more will come
                    self._step()
                output = inbox.popleft()
                finished = output.finished
                yield output
        finally:
            self._remove([request])

    def _add(self, requests: list[Request], inbox: deque[RequestOutput]) -> None:
        self.engine.add(requests)
        self._inboxes.update((request.request_id, inbox) for request in requests)

    def _remove(self, requests: list[Request]) -> None:
        for request in requests:
            self._inboxes.pop(request.request_id, None)
            self.engine.abort_request(request.request_id)

    def _step(self) -> None:
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)
