"""Users to look at: requests of a mix that come at random moments, in every lane of the live page."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from functools import partial
from importlib.resources import files
from itertools import count, cycle, islice
from typing import Any

from pydantic import Field

from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams
from minipaged.serve.engine_thread import SERVED, EngineThread
from minipaged.serve.protocol import ApiError, Body

# "words" to fill prompts with, and mixes: prompt and generated tokens of each request, in order of arrival
MIXES: dict[str, Any] = json.loads((files("minipaged.live") / "page" / "mixes.json").read_text())
WORDS = MIXES.pop("words")
SHARED, NUM_SHARED = "shared prefix", 64  # a mix in which all prompts begin alike, and how many tokens do
MIXES[SHARED] = [(NUM_SHARED + prompt, output) for prompt, output in MIXES["instruct64"]]


class Users(Body):
    """Users who come at random moments, `rate` a second, each with a request of the mix."""

    count: int = Field(30, ge=1, le=200)
    rate: float = Field(8.0, gt=0, le=1000)
    mix: str = "chat48"


class Arrivals:
    """Sends users. They have no client: what they are answered is only looked at."""

    def __init__(self, llm: LLM, thread: EngineThread, max_requests: int) -> None:
        self._thread, self._max_requests = thread, max_requests
        tokenizer, numbers = llm.tokenizer, range(min(97, llm.model_config.vocab_size))
        self._words = list(numbers) if tokenizer is None else tokenizer.encode(WORDS)
        self._numbers, self._random = count(1), random.Random(0)
        self._under_way: set[asyncio.Task[None]] = set()

    def begin(self, ask: Users) -> None:
        """Let them come from now on. Raises ApiError for a mix that there is not."""
        if ask.mix not in MIXES:
            raise ApiError(400, f"mix is {ask.mix!r}, there are {sorted(MIXES)}", "mix")
        task = asyncio.create_task(self._arrive(ask))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _arrive(self, ask: Users) -> None:
        with suppress(ApiError):  # the queue is full: the others stay away
            for num_prompt, num_output in islice(cycle(MIXES[ask.mix]), ask.count):
                number = next(self._numbers)
                prompt = self._prompt(number, num_prompt, NUM_SHARED if ask.mix == SHARED else 0)
                for lane, engine in list(self._thread.lanes.items()):
                    self._send(number, prompt, num_output, lane, engine)
                await asyncio.sleep(self._random.expovariate(ask.rate))

    def _prompt(self, number: int, num_tokens: int, num_shared: int) -> list[int]:
        """Users begin in different places of the text, after what they share."""
        words = self._words
        own = islice(cycle(words), number * 7 % len(words), None)
        return [*islice(cycle(words), num_shared), *islice(own, num_tokens - num_shared)]

    def _send(self, number: int, prompt: list[int], num_output: int, lane: str, engine: Engine) -> None:
        """Queue one request, cut to what the lane takes."""
        longest = engine.config.max_model_len
        num_output = min(num_output, longest - 1)
        ids = prompt[: longest - num_output]
        params = SamplingParams(seed=number, max_tokens=num_output, ignore_eos=True)
        request = engine.make_request(f"user-{number}", {"prompt_token_ids": ids}, params)
        if lane == SERVED:
            self._thread.submit([request])
        elif len(engine.requests) < self._max_requests:
            self._thread.run_soon(partial(engine.add, [request]))
