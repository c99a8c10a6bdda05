"""The engine on the tiny random Llama, for lessons that count steps, tokens and blocks.

What the model says makes no sense. But it says the same thing every time, and every wrong key changes it.
"""

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import Any

from coursekit.timeline import Timeline
from coursekit.workloads import Request, load_mix
from minipaged import LLM, SamplingParams
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama


def small_llm(**settings: Any) -> LLM:
    """`LLM` on the CPU in float32, with nothing switched on that is not asked for in `settings`."""
    plain: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False, "watermark": 0.0}
    plain |= {"device": "cpu", "max_num_batched_tokens": 2048}
    return LLM(LoadedModel(random_llama(), None, TINY, "tiny"), **(plain | settings))


def small_mix() -> list[Request]:
    """The 48 chats, their prompts in words that the tiny model has."""
    return [
        replace(request, prompt_token_ids=[token % TINY.vocab_size for token in request.prompt_token_ids])
        for request in load_mix("chat48")
    ]


def serve_to_end(llm: LLM, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Add all requests, then step until none is left: name -> tokens of its answer."""
    for request in requests:
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        llm.engine.add_request(request.id, request.prompt_token_ids, params)
    answers = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    return answers


def serve_lengths(
    lengths: Sequence[tuple[int, int]], **settings: Any
) -> tuple[Timeline, dict[str, list[int]]]:
    """Serve requests A, B, C … of (prompt, answer) tokens in a small pool: what happened, and the answers.

    Twelve blocks of four tokens, 32 tokens a step, eight requests at once; `settings` change that.
    """
    small = {"block_size": 4, "num_blocks": 12, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    llm = small_llm(**(small | settings))
    timeline = Timeline(llm.engine)
    requests = [
        Request(name, [(7 * index + 3 * i + 5) % 300 for i in range(prompt)], answer)
        for index, (name, (prompt, answer)) in enumerate(zip(ascii_uppercase, lengths, strict=False))
    ]
    return timeline, serve_to_end(llm, requests)
