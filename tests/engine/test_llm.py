"""The front end: settings, prompts in any form, order of results, streams that are left behind."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tqdm.auto import tqdm

from minipaged.checkpoints.loading import LoadedModel
from minipaged.config import ModelConfig
from minipaged.engine import dispatcher
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class ByteTokenizer:
    """One token per byte; ids 256 and up are special."""

    eos_token_ids = (2,)
    special_token_ids = frozenset({256, 257})
    vocab_size = 258

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else b""

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> str:
        said = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return said + "assistant: " * add_generation_prompt


@cache
def tiny() -> LoadedModel:
    return LoadedModel(random_llama(), ByteTokenizer(), TINY, "tiny")  # type: ignore[arg-type]


def make_llm(**settings: Any) -> LLM:
    return LLM(tiny(), **{"num_blocks": 64, "block_size": 4, "max_model_len": 64, "device": "cpu"} | settings)


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BYTES_PER_TOKEN = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_size * 4


def assert_idle(llm: LLM) -> None:
    llm.engine.check_invariants()
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks
    assert not llm.engine.has_unfinished_requests()


# Settings


@pytest.mark.parametrize("memory", [BYTES_PER_TOKEN * 4 * 10, BYTES_PER_TOKEN * 4 * 11 - 1])
def test_the_cache_never_exceeds_the_budget(memory: int) -> None:
    """Whole blocks only: what is left over is not used."""
    llm = make_llm(kv_memory=memory, num_blocks=None)
    assert llm.engine.pool.num_blocks == 10
    assert llm.engine.storage.nbytes <= memory


def test_a_budget_below_one_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"kv_memory is 100 bytes, a block of 4 tokens takes 1024"):
        make_llm(kv_memory=100, num_blocks=None)


def test_two_ways_to_size_the_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        make_llm(kv_memory="1MiB", num_blocks=5)


def test_the_default_cache_is_no_larger_than_its_requests_could_use() -> None:
    llm = make_llm(num_blocks=None, max_num_seqs=2)
    assert llm.engine.pool.num_blocks == 2 * 64 // 4


def test_the_models_context_is_the_limit() -> None:
    assert make_llm(max_model_len=None).max_model_len == TINY.max_position_embeddings
    with pytest.raises(ValueError, match="max_model_len is 513, the model's positions end at 512"):
        make_llm(max_model_len=513)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype is 'int3'"),
        ({"gpu_memory_utilization": 1.5, "num_blocks": None}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": "0.9", "num_blocks": None}, "gpu_memory_utilization is '0.9'"),
        ({"preemption": "never"}, "preemption is 'never'"),
        ({"attention_backend": "flash"}, "flash"),
        ({"swap_space": "0", "preemption": "swap"}, "swap_space is 0"),
        ({"swap_space": 1e-08, "preemption": "swap"}, "swap_space is 10 bytes, a block of 4 tokens takes"),
        ({"swap_space": float("nan"), "preemption": "swap"}, "swap_space is nan GiB"),
        ({"swap_space": None, "preemption": "swap"}, "swap_space is None GiB"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 0, "num_blocks": None}, "block_size is 0"),
        ({"block_size": "16", "num_blocks": None, "kv_memory": "64MiB"}, "block_size is '16'"),
        ({"max_model_len": "64"}, "max_model_len is '64', a whole number"),
        ({"max_model_len": "64", "enable_chunked_prefill": False}, "max_model_len is '64', a whole number"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_batched_tokens": "512"}, "max_num_batched_tokens is '512', a whole number"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no', True or False"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill is None, True or False"),
        ({"num_blocks": 10**12}, "1000000000000 blocks of 4 tokens take [0-9]+ MiB, [0-9]+ MiB are free"),
        ({"num_blocks": None, "kv_memory": "900000 GiB"}, "MiB are free"),
        ({"swap_space": "900000 GiB", "preemption": "swap"}, "MiB are free"),
        ({"watermark": "1%"}, "watermark is '1%'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda:99"}, "device is 'cuda:99', torch sees [0-9]+ GPUs"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(**settings)


def test_a_small_step_budget_lowers_the_default_of_max_num_seqs() -> None:
    assert make_llm(max_num_batched_tokens=8).engine.config.max_num_seqs == 8
    assert make_llm().engine.config.max_num_seqs == 256


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float16", "bfloat16", "int8", "fp8"])
def test_the_cache_may_have_its_own_dtype(kv_cache_dtype: str) -> None:
    llm = make_llm(kv_cache_dtype=kv_cache_dtype)
    (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


# Generation


def test_prompts_come_in_many_forms() -> None:
    """Text gets the tokenizer's special tokens, ids are taken as they are; one prompt or a list of them."""
    llm = make_llm()
    ids = [256, *b"abc"]
    forms = ["abc", {"prompt": "abc"}, ids, {"prompt_token_ids": ids}, tuple(ids)]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert outputs[0].prompt == "abc" and outputs[2].prompt is None
    for single in forms:
        assert len(llm.generate(single, GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_rows_of_arrays_and_tensors_are_prompts() -> None:
    llm = make_llm()
    for rows in (np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]])):
        outputs = llm.generate(rows, GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3, 4]]
        (output,) = llm.generate(rows[0], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [1, 2]


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {1, 2}, [b"abc"], ["a", None]])
def test_what_is_no_prompt_is_refused_and_not_read_as_token_ids(prompts: Any) -> None:
    llm = make_llm()
    with pytest.raises(TypeError, match="a prompt is text or token ids, got"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], [None], "greedy", 3])
def test_settings_that_are_no_sampling_params_are_refused(params: Any) -> None:
    llm = make_llm()
    with pytest.raises(TypeError, match="sampling_params is SamplingParams"):
        llm.generate(["a"], params, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params is SamplingParams"):
        llm.stream("a", params)
    with pytest.raises(TypeError, match="beam search takes BeamSearchParams"):
        llm.beam_search(["a"], params)
    assert_idle(llm)


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    """Shorter requests finish earlier; the list is in the order given, each with its own settings."""
    llm = make_llm()
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([[n] * 3 for n in lengths], params, use_tqdm=False)
    assert [output.prompt_token_ids[0] for output in outputs] == lengths
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    with pytest.raises(ValueError, match="4 prompts, 2 sampling_params"):
        llm.generate([[1]] * 4, params[:2], use_tqdm=False)
    assert_idle(llm)


def test_one_bad_prompt_leaves_nothing_half_added() -> None:
    """The bad one is last; nothing is queued, and the next call is not disturbed."""
    llm = make_llm()
    with pytest.raises(ValueError, match="prompt has 64 tokens, max_model_len is 64"):
        llm.generate([[1, 2], [3], [4] * 64], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == 1


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: what it queued is aborted, and others go on."""
    llm = make_llm()
    llm.engine.add_request("other", [5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    forward = llm.engine.runner.forward
    calls = []

    def interrupted(plan: Any) -> torch.Tensor:
        calls.append(plan)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(plan)

    monkeypatch.setattr(llm.engine.runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False)
    assert list(llm.engine.requests) == ["other"]
    llm.engine.check_invariants()
    while llm.engine.has_unfinished_requests():
        finished = llm.engine.step()
    assert len(finished[0].outputs[0].token_ids) == 20
    assert_idle(llm)


def test_paged_and_contiguous_say_the_same() -> None:
    """One strip per request is the same engine with block_size = max_model_len; only the memory differs."""
    prompts = [[n, n + 1, n + 2] for n in range(10, 18)]
    budget = BYTES_PER_TOKEN * 64 * 2
    paged = make_llm(kv_memory=budget, num_blocks=None)
    strips = make_llm(kv_memory=budget, num_blocks=None, block_size=64)
    outputs = [
        [o.outputs[0].token_ids for o in x.generate(prompts, GREEDY, use_tqdm=False)] for x in (paged, strips)
    ]
    assert outputs[0] == outputs[1]
    assert max(record.running for record in strips.trace) == 2
    assert max(record.running for record in paged.trace) == 8


def test_chat_applies_the_template_once() -> None:
    """Special tokens come from the template, not from the tokenizer on top of it."""
    llm = make_llm()
    turn = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(turn, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == list(b"user: hi\nassistant: ")
    assert len(llm.chat([turn, turn], GREEDY, use_tqdm=False)) == 2


def test_text_and_finish_reason() -> None:
    llm = make_llm()
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False)
    assert output.outputs[0].text == ByteTokenizer().decode(output.outputs[0].token_ids)
    assert output.finished and output.outputs[0].finish_reason == "length"


def test_logprobs_name_their_tokens() -> None:
    """Every entry, of the prompt as well, in a stream and in the whole output; none without text."""
    llm = make_llm()
    settings = {"temperature": 0, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    decode = ByteTokenizer().decode
    outputs = llm.generate("abc", SamplingParams(**settings), use_tqdm=False)
    outputs += llm.stream("abc", SamplingParams(**settings, output_kind=RequestOutputKind.DELTA))
    for output in outputs:
        entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        assert output.prompt_logprobs and output.outputs[0].logprobs
        for token, logprob in (pair for entry in entries if entry for pair in entry.items()):
            alone = decode([token])  # a byte that is no character alone may be one with those before it
            if "\ufffd" not in alone:
                assert logprob.decoded_token == alone
            assert logprob.decoded_token is not None
    silent = llm.generate("abc", SamplingParams(**settings, detokenize=False), use_tqdm=False)[0]
    assert silent.outputs[0].logprobs is not None
    assert {p.decoded_token for entry in silent.outputs[0].logprobs for p in entry.values()} == {None}


def test_a_model_without_a_tokenizer_serves_ids() -> None:
    llm = LLM(LoadedModel(random_llama(), None, TINY, "bare"), num_blocks=8, max_model_len=32, device="cpu")
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 8
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"), use_tqdm=False)
    assert_idle(llm)


# Streams


def test_a_stream_yields_every_token() -> None:
    llm = make_llm()
    expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0]
    items = list(llm.stream("abc", GREEDY))
    assert [len(item.outputs[0].token_ids) for item in items] == list(range(1, 9))
    assert items[-1].outputs[0].text == expected.text and items[-1].finished
    delta = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    assert "".join(item.outputs[0].text for item in llm.stream("abc", delta)) == expected.text
    assert_idle(llm)


@pytest.mark.parametrize("way", ["close", "break", "raise", "drop"])
def test_a_stream_left_behind_frees_its_blocks_at_once(way: str) -> None:
    """After two items close it, break out, raise inside the loop, or lose the last reference."""
    llm = make_llm(enable_prefix_caching=False)
    stream = llm.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True, n=3))
    next(stream)
    next(stream)
    assert llm.engine.pool.num_free < llm.engine.pool.num_blocks
    if way == "close":
        stream.close()  # type: ignore[attr-defined]
    elif way == "drop":
        del stream
    else:

        def read() -> None:
            for number, _ in enumerate(llm.stream("xyz", SamplingParams(max_tokens=50, ignore_eos=True))):
                if number == 2 and way == "break":
                    break
                if number == 2:
                    raise RuntimeError("reader gave up")

        del stream
        if way == "break":
            read()
        else:
            with pytest.raises(RuntimeError, match="gave up"):
                read()
    assert_idle(llm)
    assert llm.engine.step() == []


def test_a_stream_that_is_never_read_takes_nothing() -> None:
    llm = make_llm()
    llm.stream("abc", GREEDY)
    assert_idle(llm)
    with pytest.raises(ValueError, match="max_model_len is 64"):
        llm.stream([1] * 64, GREEDY)  # refused when it is called, not when it is read


@pytest.mark.parametrize("moment", ["while planning", "after the model ran"])
def test_a_stream_that_is_closed_in_the_middle_of_a_step_ends_with_the_step(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close a stream that was left behind at any moment."""
    llm = make_llm(enable_prefix_caching=False)
    expected = llm.generate("ab", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("xyz", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    if moment == "after the model ran":
        llm.engine.on_step = lambda plan: stream.close()  # type: ignore[attr-defined]
    else:
        find_hits = llm.engine.manager.find_hits

        def close_and_find(*arguments: Any) -> list[int]:
            stream.close()  # type: ignore[attr-defined]
            return find_hits(*arguments)

        monkeypatch.setattr(llm.engine.manager, "find_hits", close_and_find)
    (output,) = llm.generate("ab", GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected
    assert_idle(llm)


def test_nobody_waits_for_outputs_inside_a_step() -> None:
    llm = make_llm()
    llm.engine.on_step = lambda plan: llm.generate("ab", GREEDY, use_tqdm=False) and None
    with pytest.raises(RuntimeError, match="a step is under way"):
        llm.generate("cd", GREEDY, use_tqdm=False)
    llm.engine.on_step = None
    assert_idle(llm)


def test_threads_share_the_engine() -> None:
    """Each of several threads gets the outputs of its own call, and all of them."""
    llm = make_llm()
    texts = ["ab", "cd", "ef", "gh"]
    expected = [o.outputs[0].token_ids for o in llm.generate(texts, GREEDY, use_tqdm=False)]

    def serve(number: int) -> list[Any]:
        if number % 2:
            return [list(llm.stream(text, GREEDY))[-1].outputs[0].token_ids for text in texts]
        return [o.outputs[0].token_ids for o in llm.generate(texts, GREEDY, use_tqdm=False)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(serve, range(8))) == [expected] * 8
    assert_idle(llm)


def test_streams_and_generate_share_the_engine() -> None:
    """Two streams read in turns and a generate call between: each gets its own outputs, all of them."""
    llm = make_llm()
    expected = {
        p: llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in ("ab", "cd", "ef")
    }
    first, second = llm.stream("ab", GREEDY), llm.stream("cd", GREEDY)
    a, b = [next(first)], [next(second)]
    (middle,) = llm.generate("ef", GREEDY, use_tqdm=False)
    a += list(first)
    b += list(second)
    assert middle.outputs[0].token_ids == expected["ef"]
    assert a[-1].outputs[0].token_ids == expected["ab"] and len(a) == 8
    assert b[-1].outputs[0].token_ids == expected["cd"] and len(b) == 8


# Beam search through the front end


def test_beam_search_leaves_the_pool_as_it_was() -> None:
    llm = make_llm()
    outputs = llm.beam_search(["abcdefgh", [1, 2, 3]], BeamSearchParams(beam_width=3, max_tokens=5))
    assert [len(output.sequences) for output in outputs] == [3, 3]
    assert_idle(llm)


def test_beam_search_that_may_not_fit_is_refused_before_it_starts() -> None:
    llm = make_llm(num_blocks=8)
    with pytest.raises(
        ValueError, match="beam_width is 4, max_tokens is 20: that may need 24 blocks, the pool has 8"
    ):
        llm.beam_search([[1, 2], [3] * 5], BeamSearchParams(beam_width=4, max_tokens=20))
    assert_idle(llm)


def test_beam_search_waits_for_nobody() -> None:
    llm = make_llm()
    llm.engine.add_request("a", [1], GREEDY)
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        llm.beam_search("ab", BeamSearchParams(beam_width=2, max_tokens=2))


def test_impossible_engine_settings_name_the_field() -> None:
    config = ModelConfig(**{**vars(TINY), "max_position_embeddings": 16})
    with pytest.raises(ValueError, match="positions end at 16"):
        LLM(
            LoadedModel(random_llama(config), None, config, "x"), num_blocks=4, max_model_len=17, device="cpu"
        )


@pytest.mark.parametrize(("use_tqdm", "asked"), [(True, {}), (False, {"disable": True})])
def test_a_bar_is_asked_for_without_overriding_tqdm_disable(monkeypatch, use_tqdm, asked):
    """What is passed as `disable`, be it False, wins over the environment variable."""
    given = []
    monkeypatch.setattr(dispatcher, "tqdm", lambda **options: given.append(options) or tqdm(**options))
    make_llm().generate([1, 2], SamplingParams(max_tokens=1), use_tqdm=use_tqdm)
    assert [{k: v for k, v in options.items() if k == "disable"} for options in given] == [asked]
