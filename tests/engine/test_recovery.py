"""A step cut short anywhere, by an error or Ctrl-C: no token is wrong or lost, no block without an owner."""

import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from minipaged.cache.storage import KVStorage
from minipaged.engine.dispatcher import Dispatcher
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import RequestOutput
from minipaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_model import alone, assert_idle, greedy, make_engine, poison, run, tokens_of
from tests.engine.fake_tokenizers import ByteTokenizer

PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [5, 6, 7, 8, 9, 3], "c": [5, 6, 7, 8, 1, 2, 3, 4, 9]}
PARAMS = {
    "a": greedy(14, ignore_eos=True, stop=["zzz"]),
    "b": SamplingParams(n=2, seed=4, max_tokens=9, ignore_eos=True),
    "c": greedy(9, ignore_eos=True, logprobs=1),
}
# Every so many calls one is cut, in `make check` each 13th, in `make fuzz` each; some 2600 are made until
# the requests have ended.
STRIDE = max(1, 78 // int(os.environ.get("MINIPAGED_FUZZ", "1")))


def busy_engine(preemption: str = "recompute") -> Engine:
    """Prefixes are shared, prompts come in chunks, blocks run out, one request forks."""
    engine = make_engine(
        num_blocks=11,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        enable_prefix_caching=True,
        preemption=preemption,
        tokenizer=ByteTokenizer(),
    )
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, PARAMS[name])
    return engine


class CutError(BaseException):
    """As Ctrl-C, it is not an `Exception`."""


class Cut:
    """Raises when the engine makes its n-th call from one of its functions to another."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if "minipaged" not in code.co_filename or code.co_flags & inspect.CO_GENERATOR:
            return  # what a generator raises in its first moment is lost
        self.left -= 1
        if self.left == 0:
            raise CutError


def step_until_cut(engine: Engine, cut: Cut) -> list[RequestOutput]:
    if cut.left > 0:
        sys.settrace(cut)
    try:
        return engine.step()
    except CutError:
        return []
    finally:
        sys.settrace(None)


def what_is_said(output: RequestOutput) -> list[Any]:
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.cumulative_logprob) for c in output.outputs]


@pytest.mark.fuzz
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_wherever_a_step_is_cut_short_the_outputs_are_the_same(preemption: str) -> None:
    expected = {name: what_is_said(output) for name, output in run(busy_engine(preemption)).items()}
    for number in range(1, 10**6, STRIDE):
        engine, cut, finished = busy_engine(preemption), Cut(number), {}
        for _ in range(200):
            if not engine.has_unfinished_requests():
                break
            outputs = step_until_cut(engine, cut)
            engine.check_invariants()
            poison(engine)
            finished.update((o.request_id, what_is_said(o)) for o in outputs if o.finished)
        assert finished == expected, f"cut at call {number}"
        assert_idle(engine)
        if cut.left > 0:
            break
    assert number > 1000, "hardly anything was cut"


@pytest.mark.fuzz
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_recovery_that_is_cut_short_itself_loses_nothing(preemption: str) -> None:
    expected = {name: what_is_said(output) for name, output in run(busy_engine(preemption)).items()}
    cut_in_recovery = 0
    for number in range(5, 2000, 5 * STRIDE):
        engine, cut, finished = busy_engine(preemption), Cut(number), {}
        recover, second = engine._recover, Cut(1 + number // 5 % 20)

        def cut_again(recover: Callable[[], None] = recover, second: Cut = second) -> None:
            if second.left > 0:
                sys.settrace(second)  # the first cut has ended its own tracing
            recover()

        engine._recover = cut_again  # type: ignore[method-assign]
        for _ in range(200):
            if not engine.has_unfinished_requests():
                break
            outputs = step_until_cut(engine, cut)
            if engine._in_doubt:
                cut_in_recovery += 1
            else:
                engine.check_invariants()
                poison(engine)
            finished.update((o.request_id, what_is_said(o)) for o in outputs if o.finished)
        assert finished == expected, f"cut at call {number}"
        assert_idle(engine)
    assert cut_in_recovery >= 3, "hardly any recovery was cut"


def test_a_text_that_can_never_be_made_stops_no_other_request() -> None:
    """Its own steps go on raising, so a caller knows; it stays until it is aborted, and others end."""
    doomed, params = [1, 2, 3], greedy(10, ignore_eos=True, stop="@@")
    fatal = alone(doomed, greedy(10, ignore_eos=True))[0][3]
    healthy = greedy(10, ignore_eos=True, stop_token_ids=[], output_kind=RequestOutputKind.CUMULATIVE)
    prompts = [[n, n + 1] for n in range(5, 30)]
    said = {n: alone(prompt, healthy) for n, prompt in enumerate(prompts)}
    said = {n: tokens for n, tokens in said.items() if fatal not in prompts[n] + tokens[0]}
    assert len(said) >= 2

    class Broken(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes | None:
            if token_id == fatal:
                raise KeyError(token_id)
            return super().token_bytes(token_id)

    engine = make_engine(tokenizer=Broken(), num_blocks=256, max_num_seqs=32)
    engine.add_request("doomed", doomed, params)
    for n in said:
        engine.add_request(str(n), prompts[n], healthy)
    finished, errors = {}, 0
    for _ in range(40):
        try:
            outputs = engine.step()
        except KeyError:
            errors += 1
            outputs = []
        engine.check_invariants()
        poison(engine)
        finished.update((o.request_id, tokens_of(o)) for o in outputs if o.finished)
    assert finished == {str(n): tokens for n, tokens in said.items()}
    assert errors > 10 and list(engine.requests) == ["doomed"]
    assert engine.abort_request("doomed") and engine.step() == []
    assert_idle(engine)


class RaisingOnce(ByteTokenizer):
    """Fails the n-th time it is asked for bytes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def token_bytes(self, token_id: int) -> bytes | None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no such token")
        return super().token_bytes(token_id)


@pytest.mark.parametrize("number", range(7, 31))
def test_a_tokenizer_that_raises_spoils_no_other_request(number: int) -> None:
    """Stop strings are looked for in the middle of the commit. When made, each of 6 sequences asks once."""
    params = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True, stop=["zzz"])
    engine = make_engine(tokenizer=RaisingOnce(number))
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params)
    finished = run_on(engine, "no such token")
    tokenizer = ByteTokenizer()
    assert finished == {name: alone(p, params, tokenizer=tokenizer) for name, p in PROMPTS.items()}


def run_on(engine: Engine, words: str) -> dict[str, list[list[int]]]:
    """Step until all have ended, through one RuntimeError that says `words`."""
    finished, errors = {}, []
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except RuntimeError as error:
            errors.append(str(error))
            outputs = []
        engine.check_invariants()
        poison(engine)
        finished.update((o.request_id, tokens_of(o)) for o in outputs if o.finished)
    assert errors == [words]
    assert_idle(engine)
    return finished


@pytest.mark.parametrize("way", ["out", "in"])
def test_blocks_that_cannot_be_swapped_are_not_lost(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=6, preemption="swap", max_num_seqs=4)
    copy_to, raised = KVStorage.copy_to, []

    def fails_once(self: KVStorage, other: KVStorage, copies: Any) -> None:
        is_swap = self is not other
        if is_swap and (other is engine.storage) == (way == "in") and not raised:
            raised.append(way)
            raise RuntimeError("out of pinned memory")
        copy_to(self, other, copies)

    monkeypatch.setattr(KVStorage, "copy_to", fails_once)
    params = greedy(10, ignore_eos=True)
    prompts = {"a": [5, 6, 7], "b": [8, 9, 1], "c": [4, 4, 2]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    finished = run_on(engine, "out of pinned memory")
    assert finished == {name: alone(prompt, params) for name, prompt in prompts.items()}


def failing_report(number: int) -> tuple[Engine, Callable[[], list[RequestOutput]]]:
    """Two streams and a request with one token; the text of the `number`-th token asked for fails once."""
    engine = make_engine(tokenizer=RaisingOnce(number))
    stream = greedy(4, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("first", [1], stream)
    engine.add_request("second", [2], stream)
    engine.add_request("ends", [3], greedy(1, ignore_eos=True))

    def step() -> list[RequestOutput]:
        try:
            return engine.step()
        except RuntimeError:
            engine.check_invariants()
            return []

    return engine, step


# The first text of each asks three times: for the kind of vocabulary, for the prompt and for the token.
@pytest.mark.parametrize("number", range(1, 16))
def test_what_could_not_be_reported_comes_with_the_next_step(number: int) -> None:
    engine, step = failing_report(number)
    tokens: dict[str, list[int]] = {"first": [], "second": [], "ends": []}
    text = dict.fromkeys(tokens, "")
    for _ in range(10):
        for output in step():
            tokens[output.request_id] += output.outputs[0].token_ids
            text[output.request_id] += output.outputs[0].text
    assert not engine.has_unfinished_requests()
    assert {name: len(ids) for name, ids in tokens.items()} == {"first": 4, "second": 4, "ends": 1}
    assert text == {name: ByteTokenizer().decode(ids) for name, ids in tokens.items()}


def test_a_request_that_ended_unreported_can_be_aborted_and_its_name_is_taken_until_then() -> None:
    engine, step = failing_report(7)  # "ends" has ended, its text fails
    assert step() == [] and "ends" in engine.requests
    with pytest.raises(ValueError, match=r"\['ends', 'first'\] are in use"):
        engine.add([engine.make_request(name, [1], greedy(1)) for name in ("first", "ends")])
    assert engine.abort_request("ends") and not engine.abort_request("ends")
    engine.check_invariants()
    assert {output.request_id for output in step()} == {"first", "second"}
    assert engine.stats.num_aborted == 1 and engine.stats.num_finished == 0


def test_a_stream_gets_its_last_item_though_another_that_ended_with_it_could_not_be_reported() -> None:
    tokenizer = RaisingOnce(-1)
    engine = make_engine(tokenizer=tokenizer)
    dispatcher = Dispatcher(engine)
    requests = [engine.make_request(str(count), [1], greedy(count, ignore_eos=True)) for count in (2, 1)]
    for request in requests:
        request.output_kind = RequestOutputKind.CUMULATIVE
    longer, shorter = map(dispatcher.stream, requests)
    assert not next(longer).finished
    tokenizer.left = 2  # of the two last tokens the text of the second
    with pytest.raises(RuntimeError, match="no such token"):
        next(shorter)
    last = next(longer)
    assert last.finished and len(last.outputs[0].token_ids) == 2
    assert list(longer) == [] and not engine.has_unfinished_requests()
    assert_idle(engine)
