"""Chats that are answering while one long prompt arrives: what every step of the engine then computes."""

from collections.abc import Sequence
from typing import Any

from minipaged import LLM, SamplingParams
from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.output_processor import StepRecord


def serve_and_interrupt(
    loaded: LoadedModel,
    chats: Sequence[Sequence[int]],
    long_prompt: Sequence[int],
    *,
    after: int = 6,
    tokens: int = 24,
    **options: Any,
) -> tuple[dict[str, list[int]], list[StepRecord]]:
    """All answers by request, "chat 0" … and "long", and the records of all steps.

    Args:
        loaded: the model.
        chats: prompts that are there from the start, as token ids.
        long_prompt: arrives after `after` steps.
        after: steps.
        tokens: of each answer, greedy.
        options: of `LLM`, such as max_num_batched_tokens.
    """
    options |= {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 16, "device": "cpu"}
    llm = LLM(loaded, enable_prefix_caching=False, **options)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers: dict[str, list[int]] = {}
    for i, prompt in enumerate(chats):
        llm.engine.add_request(f"chat {i}", list(prompt), params)
    step = 0
    while llm.engine.has_unfinished_requests():
        if step == after:
            llm.engine.add_request("long", list(long_prompt), params)
        for done in llm.engine.step():
            answers[done.request_id] = list(done.outputs[0].token_ids)
        step += 1
    return answers, list(llm.trace)
