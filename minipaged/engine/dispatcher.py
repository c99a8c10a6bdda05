"""Dispatcher: runs the engine until the outputs that a caller waits for are there.

Streams and `generate` calls may be under way at once, also in several threads. Each step of the engine moves
all of them on, whichever of them asked for it, and each finds its own outputs in its inbox.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

from minipaged.core.request import ParentRequest
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import RequestOutput


class Dispatcher:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._lock = threading.RLock()  # around everything that changes the engine
        self._in_step = False
        self._left: list[tuple[ParentRequest, deque[RequestOutput]]] = []  # to abort when the step has ended

    def run(self, requests: list[ParentRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Queue the requests, wait for all, and return their outputs in the order given.

        Whatever ends it early (Ctrl-C, an error of the model), none of them stays in the engine.
        """
        inbox: deque[RequestOutput] = deque()
        done: dict[str, RequestOutput] = {}
        quiet: dict[str, Any] = {} if use_tqdm else {"disable": True}  # False would override TQDM_DISABLE
        try:
            self._add(requests, inbox)
            # Without `miniters` tqdm draws nothing between two requests that end; tokens come all the time.
            with tqdm(total=len(requests), desc="Processed prompts", miniters=0, **quiet) as bar:
                before = self.engine.scheduler.stats.num_generation_tokens
                while len(done) < len(requests):
                    with self._lock:
                        if not inbox and not self.engine.has_unfinished_requests():
                            lost = [r.request_id for r in requests if r.request_id not in done]
                            raise RuntimeError(f"requests {lost} were aborted while their caller waited")
                        if not inbox:  # another thread's step may have filled it
                            self._step()
                    tokens = self.engine.scheduler.stats.num_generation_tokens - before
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                    bar.update(len(inbox))
                    while inbox:
                        output = inbox.popleft()
                        done[output.request_id] = output
        finally:
            self._remove(requests, inbox)
        return [done[request.request_id] for request in requests]

    def stream(self, request: ParentRequest) -> Iterator[RequestOutput]:
        """Queue the request at the first `next`; abort it when the iterator is closed before its end."""
        inbox: deque[RequestOutput] = deque()
        try:
            self._add([request], inbox)
            finished = False
            while not finished:
                while not inbox:
                    with self._lock:
                        if inbox:  # another thread's step filled it
                            break
                        if not self.engine.is_unfinished(request.request_id):
                            return  # it was aborted elsewhere: nothing more will come
                        self._step()
                output = inbox.popleft()
                finished = output.finished
                yield output
        finally:
            self._remove([request], inbox)

    @contextmanager
    def alone(self, purpose: str) -> Iterator[None]:
        """The engine's pool, storage and backend for `purpose` alone: other threads wait.

        Raises RuntimeError while requests are unfinished, for they hold blocks.
        """
        with self._lock:
            unfinished = len(self.engine.requests)
            if unfinished:
                raise RuntimeError(f"{unfinished} requests are unfinished, {purpose} needs the pool")
            yield

    def reset_prefix_cache(self) -> bool:
        """`Engine.reset_prefix_cache` between two steps, not while one is planned from what is cached."""
        with self._lock:
            return self.engine.reset_prefix_cache()

    def _add(self, requests: list[ParentRequest], inbox: deque[RequestOutput]) -> None:
        with self._lock:
            self.engine.add(requests)
            self._inboxes.update((request.request_id, inbox) for request in requests)

    def _remove(self, requests: list[ParentRequest], inbox: deque[RequestOutput]) -> None:
        """Abort what is unfinished, after the current step if one is under way.

        Requests that were refused are not in the engine, but others of the same id may be: they stay. The
        garbage collector may close an abandoned stream in the middle of a step.
        """
        with self._lock:
            self._left += [(request, inbox) for request in requests]
            if not self._in_step:
                self._abort_left()

    def _abort_left(self) -> None:
        while self._left:
            request, inbox = self._left.pop()
            if self._inboxes.get(request.request_id) is inbox:
                del self._inboxes[request.request_id]
            if self.engine.requests.get(request.request_id) is request:
                self.engine.abort_request(request.request_id)

    def _step(self) -> None:
        if self._in_step:
            raise RuntimeError("a step is under way: what it calls cannot wait for outputs")
        self._in_step = True
        try:
            outputs = self.engine.step()
        finally:
            self._in_step = False
            self._abort_left()
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)
