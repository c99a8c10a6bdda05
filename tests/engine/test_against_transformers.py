"""The engine against transformers: SmolLM2-135M in float32 from the same file, greedy, eight chats."""

from functools import cache
from typing import Any

import pytest

from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import CompletionOutput
from minipaged.sampling_params import SamplingParams
from tests.model.hf_reference import hf_greedy, hf_logits, model_is_installed, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not model_is_installed(), reason="the SmolLM2 file is not installed"),
]

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is 7 times 8? Answer with a number, then explain in a few words.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue? Explain it to a child in two sentences, please, and do not use the word light.",
    "List two animals that live in the forest.",
    "Hi",
]
MAX_TOKENS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=3)


@cache
def prompts() -> list[list[int]]:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.encode(tokenizer.apply_chat_template(chat)) for chat in chats]


@cache
def reference(index: int) -> tuple[list[int], Any]:
    """The answer of transformers, and its log-probabilities of every next token along prompt and answer."""
    prompt = prompts()[index]
    answer = hf_greedy(prompt, MAX_TOKENS, smollm2().config.eos_token_ids)
    return answer, hf_logits(prompt + answer)[len(prompt) - 1 : -1].log_softmax(dim=-1)


def make_llm(block_size: int, **settings: Any) -> LLM:
    settings = {"num_blocks": 2048 // block_size, "max_model_len": 256, "device": "cpu"} | settings
    return LLM(smollm2(), block_size=block_size, **settings)


def assert_equals_reference(output: CompletionOutput, index: int) -> None:
    """Token for token; log-probabilities of the three most likely tokens within 1e-3."""
    answer, logprobs = reference(index)
    assert output.token_ids == answer
    assert output.logprobs is not None
    for entry, row in zip(output.logprobs, logprobs, strict=True):
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("block_size", [16, 256], ids=["paged", "contiguous"])
def test_eight_chats_at_once_equal_transformers(block_size: int) -> None:
    """Both memory policies, with chunks that cut prompts, and again with every prompt in the prefix cache."""
    llm = make_llm(block_size, max_num_batched_tokens=100)
    for cached in (False, True):
        outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
        for index, output in enumerate(outputs):
            assert_equals_reference(output.outputs[0], index)
            if cached:  # the first time, too, later chats hit the system prompt of earlier ones
                usable = (len(output.prompt_token_ids) - 1) // block_size * block_size
                assert output.num_cached_tokens == usable


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 256], ids=["paged", "contiguous"])
def test_each_chat_alone_equals_transformers(block_size: int) -> None:
    """Slow: sixteen chats, one after the other."""
    llm = make_llm(block_size, enable_prefix_caching=False)
    for index, prompt in enumerate(prompts()):
        (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
        assert_equals_reference(output.outputs[0], index)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_chats_in_a_pool_too_small_for_them_equal_transformers(preemption: str) -> None:
    """20 blocks of 16: some of the eight are preempted on the way. Slow, being so many tokens in float32."""
    llm = make_llm(16, num_blocks=20, preemption=preemption, enable_prefix_caching=False)
    for index, output in enumerate(llm.generate(prompts(), PARAMS, use_tqdm=False)):
        assert_equals_reference(output.outputs[0], index)
    assert llm.stats.num_preemptions > 0


def test_answers_are_text_a_reader_accepts() -> None:
    (output,) = make_llm(16).chat([{"role": "user", "content": QUESTIONS[0]}], PARAMS, use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
