"""A tiny model with a tokenizer and a chat template, made on the fly, and a server of it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.llm import LLM
from minipaged.live.pages import LivePage
from minipaged.model.tiny import TINY, random_llama
from minipaged.model.tokenizer import Tokenizer
from minipaged.serve import ServeSettings
from minipaged.serve.app import Api, make_app
from minipaged.serve.engine_thread import EngineThread
from minipaged.serve.guards import Server, make_server

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]


def tiny_tokenizer() -> Tokenizer:
    """One token a byte, after the special ones: `</s>` is 2, the model's end-of-sequence."""
    names = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(BPE({name: place for place, name in enumerate(names)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, eos_token_ids=(2,), chat_template=TEMPLATE)


def tiny_llm(**settings: Any) -> LLM:
    """An LLM in float32 with room for 128 blocks of 8 tokens, unless told otherwise."""
    tokenizer = tiny_tokenizer()
    config = replace(TINY, vocab_size=tokenizer.vocab_size)
    loaded = LoadedModel(random_llama(config), tokenizer, config, "tiny")
    return LLM(loaded, **{"num_blocks": 128, "block_size": 8, "max_num_seqs": 32} | settings)


def make(llm: LLM, settings: ServeSettings) -> tuple[Server, EngineThread]:
    """A server with its live page, as `minipaged serve` makes it."""
    api = Api(llm, settings)
    page = LivePage(llm, api.thread, settings)
    return make_server(make_app(api, page.routes()), api.thread, settings), api.thread


class Running:
    """A server in a thread of this process; `url` is where it listens."""

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.llm, self.settings = llm, settings
        self.server, self.thread = make(llm, settings)
        self._socket = socket.create_server((settings.host, settings.port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        serve = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self.server.run, kwargs=serve, daemon=True)
        self._thread.start()
        self.wait_until(lambda: self.server.started)

    def wait_until(self, condition: Any, seconds: float = 60.0) -> None:
        """Against hanging only: what is waited for comes, or the test fails."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    @property
    def connections(self) -> set[Any]:
        """Uvicorn's, those that are open."""
        return self.server.server_state.connections

    @property
    def is_idle(self) -> bool:
        return not self.llm.engine.has_unfinished_requests() and self.thread.num_under_way == 0

    def wait_until_idle(self) -> None:
        """Every request has ended: then every block is free, and the books are right."""
        self.wait_until(lambda: self.is_idle)
        self.llm.engine.check_invariants()
        assert self.llm.engine.pool.num_free == self.llm.engine.pool.num_blocks

    def stop(self) -> None:
        self.server.handle_exit(0, None)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def running(llm: LLM | None = None, **settings: Any) -> Iterator[Running]:
    server = Running(llm or tiny_llm(), ServeSettings(port=0, **settings))
    try:
        yield server
    finally:
        server.stop()


def main() -> None:
    """A server as a process of its own, for signals: prints its port, then serves until it is told to end."""
    listener = socket.create_server(("127.0.0.1", 0))
    llm, settings = tiny_llm(), ServeSettings(port=0, drain_seconds=float(sys.argv[1]))
    server, thread = make(llm, settings)
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])
    pool = llm.engine.pool
    print(f"free {pool.num_free} of {pool.num_blocks}, told {thread.num_told}", flush=True)


if __name__ == "__main__":
    main()
