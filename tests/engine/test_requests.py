"""What a caller may ask of the engine, what is refused, and how requests end: by themselves or by an
abort."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_model import (
    EOS,
    HashModel,
    alone,
    assert_idle,
    greedy,
    make_engine,
    run,
    serve,
    step,
    tokens_of,
)

from minipaged.core.request import Status
from minipaged.engine.engine import Engine
from minipaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class Scripted(HashModel):
    """Says what it is told: the n-th output token is `script[n]`. It has two end tokens, 0 and 2."""

    def __init__(self, prompt_length: int, script: list[int]) -> None:
        super().__init__(vocab_size=50)
        self.config = replace(self.config, eos_token_ids=(EOS, 2))
        self.prompt_length = prompt_length
        self.script = script

    def __call__(self, token_ids: Any, batch: Any, storage: Any, backend: Any) -> Any:
        hidden = super().__call__(token_ids, batch, storage, backend)
        hidden[:, 0] = batch.positions.float() - (self.prompt_length - 1)
        return hidden

    def compute_logits(self, hidden: Any) -> Any:
        logits = super().compute_logits(hidden) * 0
        for row, place in enumerate(hidden[:, 0].long().tolist()):
            logits[row, self.script[min(place, len(self.script) - 1)]] = 9.0
        return logits


def scripted(script: list[int], params: SamplingParams) -> tuple[list[int], str | None, int | str | None]:
    engine = make_engine(model=Scripted(3, script))
    engine.add_request("a", [1, 2, 3], params)
    output = run(engine)["a"].outputs[0]
    return list(output.token_ids), output.finish_reason, output.stop_reason


def test_how_an_output_ends() -> None:
    """EOS stays in the output; a stop id ends it with that id as reason; max_tokens caps; ignore_eos
    goes on."""
    assert scripted([10, EOS, 11], greedy()) == ([10, EOS], "stop", None)
    assert scripted([10, 42, 12], greedy(stop_token_ids=[42])) == ([10, 42], "stop", 42)
    assert scripted([10, 11, 12], greedy(2)) == ([10, 11], "length", None)
    assert scripted([10, EOS, 11], greedy(4, ignore_eos=True)) == ([10, EOS, 11, 11], "length", None)
    assert scripted([EOS], greedy()) == ([EOS], "stop", None)  # EOS as the first token
    assert scripted([10, 2, 11], greedy()) == ([10, 2], "stop", None)  # any of several ends


def test_neither_eos_nor_stop_id_ends_an_output_before_min_tokens() -> None:
    """min_tokens 5."""
    for script in ([10, EOS, 11, 12, 13, 14], [10, 42, 11, 12, 13, 14]):
        tokens, reason, _ = scripted(script, greedy(6, min_tokens=5, stop_token_ids=[42]))
        assert len(tokens) == 6 and reason == "length"
        assert EOS not in tokens and 42 not in tokens


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(1, 1, 1), (1, 5, 5), (15, 5, 1), (1, None, 15), (1, 1000, 15), (15, None, 1), (8, 8, 8), (8, 9, 8)],
)
def test_prompt_and_output_never_exceed_max_model_len(
    length: int, max_tokens: int | None, expected: int
) -> None:
    """max_model_len 16, block size 4; never more than 4 blocks, and a healthy neighbour is not
    touched."""
    engine = make_engine(max_model_len=16)
    engine.add_request("healthy", [7, 8], greedy(10, ignore_eos=True))
    engine.add_request(
        "a", [3] * length, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    )
    table = engine.requests["a"].samples[0].table
    most = 0
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in step(engine) if o.finished)
        most = max(most, len(table.blocks))
    assert most <= 4
    assert len(outputs["a"].outputs[0].token_ids) == expected
    assert outputs["a"].outputs[0].finish_reason == "length"
    assert tokens_of(outputs["healthy"]) == alone([7, 8], greedy(10, ignore_eos=True))


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "prompt has 0 tokens, at least 1 is needed"),
        ([1] * 16, ValueError, "prompt has 16 tokens, max_model_len is 16"),
        ([1] * 17, ValueError, "prompt has 17 tokens, max_model_len is 16"),
        ([40], ValueError, "token id 40 is outside the vocabulary, 0 to 39"),
        ([-1], ValueError, "token id -1 is outside the vocabulary"),
        ([1.5], TypeError, "a token id is a whole number, got 1.5"),
        ([True], TypeError, "a token id is a whole number, got True"),
        ("text", ValueError, "the model has no tokenizer"),
        (None, TypeError, "a prompt is text or token ids, got NoneType"),
        ({"prompt_ids": [1]}, ValueError, "unknown keys \\['prompt_ids'\\]"),
        ({}, ValueError, "neither 'prompt' nor 'prompt_token_ids'"),
        (b"abc", TypeError, "a prompt is text or token ids, got bytes"),
        ({1, 2}, TypeError, "a prompt is text or token ids, got set"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, TypeError, "a cache_salt is text, got 5"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, ValueError, "surrogates not allowed"),
    ],
)
def test_a_bad_prompt_is_refused_when_it_is_added(prompt: Any, error: type[Exception], message: str) -> None:
    """With the value and the limit in the message, and a healthy request beside it is served."""
    engine = make_engine(max_model_len=16)
    engine.add_request("healthy", [1, 2], greedy(4))
    with pytest.raises(error, match=message):
        engine.add_request("bad", prompt, greedy())
    assert list(engine.requests) == ["healthy"]
    assert tokens_of(run(engine)["healthy"]) == alone([1, 2], greedy(4))


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", BeamSearchParams(2, 3)])
def test_settings_that_are_no_sampling_params_are_refused_when_they_are_given(params: Any) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="sampling_params is SamplingParams, got"):
        engine.add_request("bad", [1, 2], params)
    assert_idle(engine)


def test_zero_max_tokens_is_refused() -> None:
    """As in vLLM."""
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        SamplingParams(max_tokens=0)


def test_numpy_and_torch_integers_are_token_ids() -> None:
    numpy = pytest.importorskip("numpy")
    assert serve(make_engine(), [numpy.array([1, 2, 3])], greedy(4)) == alone([1, 2, 3], greedy(4))


def test_request_ids_are_unique_while_in_use() -> None:
    engine = make_engine()
    engine.add_request("a", [1], greedy(2))
    with pytest.raises(ValueError, match=r"request ids \['a'\] are in use"):
        engine.add_request("a", [2], greedy(2))
    run(engine)
    engine.add_request("a", [2], greedy(2))  # finished: free again
    assert tokens_of(run(engine)["a"]) == alone([2], greedy(2))


# Aborts. Each scene brings request "x" into one state, beside a neighbour "n" that must not notice.

Scene = Callable[[], Engine]
NEIGHBOUR = greedy(14, ignore_eos=True)


def scene(num_blocks: int = 8, steps: int = 0, **settings: Any) -> Engine:
    engine = make_engine(num_blocks=num_blocks, **settings)
    engine.add_request("n", [9, 8, 7], NEIGHBOUR)
    engine.add_request("x", [1] * 10, greedy(14, ignore_eos=True))
    for _ in range(steps):
        step(engine)
    return engine


def preempted_scene(preemption: str) -> Engine:
    engine = scene(preemption=preemption)
    while engine.requests["x"].samples[0].status not in (Status.PREEMPTED, Status.SWAPPED):
        step(engine)
    return engine


SCENES: dict[str, tuple[Scene, Status]] = {
    "waiting": (lambda: scene(), Status.WAITING),
    "mid chunked prefill": (
        lambda: scene(steps=2, max_num_batched_tokens=6, max_num_seqs=4),
        Status.RUNNING,
    ),
    "running": (lambda: scene(steps=4), Status.RUNNING),
    "preempted": (lambda: preempted_scene("recompute"), Status.PREEMPTED),
    "swapped": (lambda: preempted_scene("swap"), Status.SWAPPED),
}


@pytest.mark.parametrize("state", SCENES)
def test_an_abort_in_any_state_frees_everything_at_once(state: str) -> None:
    """Blocks, host blocks and rows come home, nothing is emitted, the neighbour's output is the
    same."""
    make, status = SCENES[state]
    engine = make()
    request = engine.requests["x"]
    assert request.samples[0].status is status
    tables = [s.table for s in request.samples]
    assert engine.abort_request("x") is True
    engine.check_invariants()
    assert not any(table.blocks for table in tables)
    held = sum(len(s.table.blocks) for s in engine.requests["n"].samples)
    assert engine.pool.num_free == engine.pool.num_blocks - held
    assert request.samples[0].output.finish_reason == "abort"
    outputs = run(engine)
    assert set(outputs) == {"n"}
    assert tokens_of(outputs["n"]) == alone([9, 8, 7], NEIGHBOUR)
    assert engine.stats.num_aborted == 1


def test_aborting_an_unknown_or_finished_request_is_false() -> None:
    """No error, whether the id was never there, has finished, or was aborted before."""
    engine = make_engine()
    assert engine.abort_request("nobody") is False
    engine.add_request("a", [1], greedy(2))
    run(engine)
    assert engine.abort_request("a") is False
    engine.add_request("b", [1], greedy(2))
    assert engine.abort_request("b", index=5) is False
    assert engine.abort_request("b") is True
    assert engine.abort_request("b") is False
    assert_idle(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_aborting_one_sample_leaves_its_siblings_as_they_are(index: int, steps: int) -> None:
    """One child of n = 3, before the prompt is computed, in the middle of it, and after the fork."""
    params = SamplingParams(n=3, seed=4, max_tokens=9, ignore_eos=True)
    engine = make_engine(max_num_batched_tokens=6, max_num_seqs=4)
    engine.add_request("x", [1] * 10, params)
    for _ in range(steps):
        step(engine)
    assert engine.abort_request("x", index) is True
    engine.check_invariants()
    outputs = run(engine)["x"].outputs
    whole = alone([1] * 10, params)
    for output, expected in zip(outputs, whole, strict=True):
        if output.index == index:
            assert output.finish_reason == "abort"
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected


def test_ten_waiting_requests_leave_one_by_one() -> None:
    """Each abort takes exactly one from the queue and from the unfinished requests."""
    engine = make_engine()
    for i in range(10):
        engine.add_request(str(i), [i + 1], greedy())
    for i, name in enumerate([3, 1, 4, 0, 5, 9, 2, 6, 8, 7], start=1):
        assert engine.abort_request(str(name))
        assert len(engine.requests) == len(engine.scheduler.waiting) == 10 - i
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("when", ["forward", "sample", "on_step"])
def test_a_failing_step_loses_no_token_and_no_block(
    when: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model, the sampler or the callback raises, Ctrl-C too: the step has not happened and
    can be tried again."""
    engine = make_engine(num_blocks=12, enable_prefix_caching=True, preemption=preemption)
    params = SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True)
    prompts = {"a": [1] * 6, "b": [2] * 9}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    outputs = {}
    for number in range(100):
        if not engine.has_unfinished_requests():
            break
        if number % 4 == 2:
            with monkeypatch.context() as patch:

                def fail(*args: Any) -> None:
                    raise KeyboardInterrupt

                if when == "forward":
                    patch.setattr(engine.runner, "model", fail)
                elif when == "on_step":
                    patch.setattr(engine, "on_step", fail)
                else:
                    patch.setattr("minipaged.engine.engine.sample", fail)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            engine.check_invariants()
        else:
            outputs.update((o.request_id, o) for o in step(engine) if o.finished)
    assert {name: tokens_of(o) for name, o in outputs.items()} == {
        name: alone(prompt, params) for name, prompt in prompts.items()
    }
    assert_idle(engine)


def test_bad_logits_name_the_request() -> None:
    class Broken(HashModel):
        def compute_logits(self, hidden: Any) -> Any:
            return super().compute_logits(hidden) * float("nan")

    engine = make_engine(model=Broken())
    engine.add_request("a", [1], greedy())
    with pytest.raises(ValueError, match="request 'a'"):
        engine.step()
    engine.abort_request("a")
    assert_idle(engine)


# What `step` reports


def test_output_kinds() -> None:
    """CUMULATIVE: all so far; DELTA: what is new, and joined it is all; FINAL_ONLY: once, at the end."""
    expected = alone([1, 2], greedy(5, ignore_eos=True))[0]
    seen: dict[RequestOutputKind, list[list[int]]] = {}
    for kind in RequestOutputKind:
        engine = make_engine()
        engine.add_request("a", [1, 2], greedy(5, ignore_eos=True, output_kind=kind))
        seen[kind] = []
        while engine.has_unfinished_requests():
            seen[kind] += [tokens_of(output)[0] for output in step(engine)]
    assert seen[RequestOutputKind.CUMULATIVE] == [expected[: i + 1] for i in range(5)]
    assert seen[RequestOutputKind.DELTA] == [[token] for token in expected]
    assert seen[RequestOutputKind.FINAL_ONLY] == [expected]


def test_a_delivered_output_does_not_change_later() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], greedy(5, ignore_eos=True, logprobs=1))
    (first,) = step(engine)
    run(engine)
    assert len(first.outputs[0].token_ids) == len(first.outputs[0].logprobs or []) == 1


def test_logprobs_belong_to_the_tokens() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], SamplingParams(seed=1, max_tokens=4, logprobs=3, ignore_eos=True))
    output = run(engine)["a"].outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 4
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.parametrize("preempt_after", [None, 1, 2])
@pytest.mark.parametrize("chunk", [2, 5, 64])
def test_prompt_logprobs_cover_the_prompt_once(chunk: int, preempt_after: int | None) -> None:
    """None for the first token, then one entry per prompt token, whatever the chunks and with a
    preemption."""
    prompt = list(range(1, 12))
    params = greedy(2, prompt_logprobs=0, ignore_eos=True)
    engine = make_engine(max_num_batched_tokens=chunk, max_num_seqs=2)
    engine.add_request("a", prompt, params)
    number = 0
    while engine.has_unfinished_requests():
        if number == preempt_after and engine.scheduler.running:
            engine.scheduler.preempt_youngest()
        outputs = step(engine)
        number += 1
    found = outputs[0].prompt_logprobs
    assert found is not None and found[0] is None
    assert [next(iter(entry)) for entry in found[1:] if entry] == prompt[1:]
    calm = make_engine()
    calm.add_request("a", prompt, params)
    assert found == run(calm)["a"].prompt_logprobs


def test_seeds_do_not_depend_on_neighbours() -> None:
    """The same seed draws the same tokens alone, in a batch, and among requests that draw without a seed."""
    params = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)
    expected = alone([1, 2], params)
    engine = make_engine()
    engine.add_request("before", [5], SamplingParams(max_tokens=8))
    engine.add_request("a", [1, 2], params)
    engine.add_request("after", [6], SamplingParams(max_tokens=3, n=2))
    assert tokens_of(run(engine)["a"]) == expected


def test_the_samples_of_a_request_differ() -> None:
    samples = alone([1, 2, 3], SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True))
    assert len({tuple(tokens) for tokens in samples}) == 4


def test_unseeded_requests_draw_differently_and_a_run_can_be_repeated() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, again = (serve(make_engine(), [[1]] * 3, params) for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3
