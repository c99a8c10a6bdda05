"""One answer, however it is served: float32, a tiny random Llama, token for token, logits within 1e-4."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from fake_model import assert_idle, greedy, make_engine, run, serve, step, tokens_of

from minipaged.attention import get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import KVStorage
from minipaged.config import CacheConfig, EngineConfig
from minipaged.cpu.accelerate import use_compiled_kernels
from minipaged.cpu.backend import CpuBackend
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import CompletionOutput
from minipaged.memory import KVSpec
from minipaged.model.llama import LlamaModel
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import SamplingParams

PROMPTS = [list(range(10, 20)), [7], list(range(30, 38)), [99, 98, 97, 96, 95], list(range(50, 67))]
PARAMS = greedy(12, ignore_eos=True, logprobs=5)
WIDE = replace(TINY, hidden_size=64, head_size=32)
SAMPLED = SamplingParams(n=3, seed=8, temperature=1.0, max_tokens=9, ignore_eos=True, logprobs=5)


@cache
def llama() -> LlamaModel:
    return random_llama(seed=3)


def tiny_engine(**settings: Any) -> Engine:
    return make_engine(model=llama(), **settings)


@cache
def calm(prompt: tuple[int, ...], params: SamplingParams = PARAMS) -> list[CompletionOutput]:
    """The reference: alone, prompt in one step, no cache hits, blocks longer than everything."""
    engine = tiny_engine(block_size=64, num_blocks=16)
    engine.add_request("calm", list(prompt), params)
    return run(engine)["calm"].outputs


def assert_same(
    outputs: Sequence[CompletionOutput], prompt: Sequence[int], params: SamplingParams = PARAMS
) -> None:
    """Token for token, and the log-probabilities of the five best tokens at every position."""
    for output, expected in zip(outputs, calm(tuple(prompt), params), strict=True):
        assert output.token_ids == expected.token_ids
        assert (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert output.logprobs is not None and expected.logprobs is not None
        for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
            common = ours.keys() & theirs.keys()  # equal values may swap places at the border of the five
            assert len(common) >= 4
            for token in common:
                assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def serve_all(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> None:
    """All prompts at once; each answer must be the calm one."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), list(prompt), params)
    outputs = run(engine)
    for i, prompt in enumerate(prompts):
        assert_same(outputs[str(i)].outputs, prompt, params)


def test_the_reference_is_the_model_without_an_engine() -> None:
    """Recompute the whole sequence for every token, in one dense pass each: the plainest way to decode."""
    model, backend = llama(), get_backend("reference")
    for prompt in PROMPTS:
        tokens = list(prompt)
        for expected in calm(tuple(prompt))[0].token_ids:
            storage = KVStorage(KVSpec.from_model(model.config, torch.float32), 1, 64)
            batch = AttentionBatch.build([[0]], [len(tokens)], [len(tokens)], 64)
            hidden = model(torch.tensor(tokens), batch, storage, backend)
            assert int(model.compute_logits(hidden[-1:]).argmax()) == expected
            tokens.append(expected)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_batched_equals_alone(block_size: int) -> None:
    """64 is the contiguous baseline: one block of the longest length per request, on the same code."""
    serve_all(tiny_engine(block_size=block_size, num_blocks=256), PROMPTS)


@pytest.mark.parametrize("chunk", [*range(1, 18), 40])
def test_chunked_equals_whole(chunk: int) -> None:
    """At every chunk size, beside other requests."""
    serve_all(tiny_engine(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4)), PROMPTS)


@pytest.mark.parametrize("chunks", [[10], [4, 4, 2], [1] * 10])
def test_logits_and_stored_keys_do_not_depend_on_the_chunks(chunks: list[int]) -> None:
    """A prompt of 10 as 10, as 4 + 4 + 2 and token by token: logits and K/V agree within 1e-5."""

    def prefill(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model, tokens = llama(), torch.tensor(PROMPTS[0])
        storage = KVStorage(KVSpec.from_model(model.config, torch.float32), 5, 4)
        rows, done = [], 0
        for size in sizes:
            batch = AttentionBatch.build([[3, 0, 4]], [size], [done + size], 4)
            hidden = model(tokens[done : done + size], batch, storage, get_backend("torch"))
            rows.append(model.compute_logits(hidden))
            done += size
        blocks = torch.tensor([3, 0, 4])
        key, value = (t[:, blocks].flatten(1, 2)[:, :10] for t in (storage.key, storage.value))
        return torch.cat(rows), key, value

    for ours, whole in zip(prefill(chunks), prefill([10]), strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("after", range(12))
def test_preempted_at_every_point_equals_undisturbed(after: int, preemption: str) -> None:
    """At output length 0 … 11, beside a neighbour, with small chunks."""
    engine = tiny_engine(max_num_batched_tokens=6, max_num_seqs=2, preemption=preemption)
    engine.add_request("neighbour", PROMPTS[3], PARAMS)
    engine.add_request("a", PROMPTS[0], PARAMS)
    (request,), outputs, done = engine.requests["a"].samples, {}, False
    while engine.has_unfinished_requests():
        if not done and request in engine.scheduler.running and len(request.output.token_ids) == after:
            engine.scheduler.preempt_youngest()
            done = True
        outputs.update((o.request_id, o) for o in step(engine) if o.finished)
    assert done
    assert_same(outputs["a"].outputs, PROMPTS[0])
    assert_same(outputs["neighbour"].outputs, PROMPTS[3])
    assert_idle(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pressed_equals_calm(preemption: str) -> None:
    """A pool that holds two of five requests."""
    engine = tiny_engine(num_blocks=12, preemption=preemption)
    serve_all(engine, PROMPTS)
    assert engine.stats.num_preemptions > 0


def test_prefix_cached_equals_cold() -> None:
    """Cold, whole prompt cached, one token more, and the prompt with its answer as the next
    prompt."""
    engine = tiny_engine(enable_prefix_caching=True)
    serve_all(engine, PROMPTS)
    serve_all(engine, PROMPTS)
    serve_all(engine, [[*prompt, 5] for prompt in PROMPTS])
    serve_all(engine, [[*prompt, *calm(tuple(prompt))[0].token_ids, 6] for prompt in PROMPTS])
    assert engine.stats.prefix.hits >= 2 * sum(
        len(prompt) // 4 * 4 - 4 for prompt in PROMPTS if len(prompt) > 3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("backend", ["cpu", "torch", "triton", "reference"])
def test_shared_in_flight_equals_alone(backend: str, dtype: torch.dtype) -> None:
    """Requests of one step read the keys that the first of them writes in it, one as its single query."""
    model = use_compiled_kernels(random_llama(WIDE))  # heads wide enough for them
    attention = CpuBackend() if backend == "cpu" else get_backend(backend)
    prompts = [[*range(10, 18), *tail] for tail in ([1, 2, 3], [4], [5, 6, 7, 8, 9])]
    limits = EngineConfig(max_model_len=64, max_num_seqs=5, max_num_batched_tokens=64)

    def engine(*, sharing: bool) -> Engine:
        cache = CacheConfig(num_blocks=32, dtype=dtype, block_size=4, enable_prefix_caching=sharing)
        return Engine(model, cache, limits, backend=attention)

    together = engine(sharing=True)
    answers = serve(together, prompts, greedy(4, ignore_eos=True))
    assert together.stats.prefix.hits == 2 * 8
    assert together.trace[0].prefill_tokens == 11 + 1 + 5
    assert answers == [serve(engine(sharing=False), [p], greedy(4, ignore_eos=True))[0] for p in prompts]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_forked_equals_alone(length: int) -> None:
    """Three samples from one prompt, its last block full or partly full: each as a request of its own would
    be."""
    prompt = PROMPTS[0][:length]
    engine = tiny_engine(max_num_batched_tokens=5, max_num_seqs=5)
    serve_all(engine, [prompt, PROMPTS[1]], SAMPLED)
    for index, output in enumerate(calm(tuple(prompt), SAMPLED)):
        one = SamplingParams(n=index + 1, seed=8, max_tokens=9, ignore_eos=True)
        engine.add_request("one", prompt, one)
        assert tokens_of(run(engine)["one"])[index] == output.token_ids


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("after", range(1, 9))
def test_forked_and_preempted_equals_undisturbed(after: int, preemption: str) -> None:
    engine = tiny_engine(max_num_batched_tokens=5, max_num_seqs=5, preemption=preemption)
    engine.add_request("a", PROMPTS[0], SAMPLED)
    request = engine.requests["a"]
    while len(request.samples[0].output.token_ids) < after:
        step(engine)
    engine.scheduler.preempt_youngest()
    assert_same(run(engine)["a"].outputs, PROMPTS[0], SAMPLED)


def test_quantised_cache_gives_the_same_answer_batched_and_alone() -> None:
    """int8 rounds every token by itself: chunks and neighbours do not change what is stored."""

    def tokens(prompts: list[list[int]], budget: int) -> list[list[int]]:
        cache = CacheConfig(num_blocks=64, dtype=torch.int8, block_size=4, enable_prefix_caching=False)
        limits = EngineConfig(max_model_len=128, max_num_seqs=5, max_num_batched_tokens=budget)
        return serve(Engine(llama(), cache, limits), prompts, greedy(8, ignore_eos=True))

    assert tokens(PROMPTS, 40) == [tokens([prompt], 7)[0] for prompt in PROMPTS]
