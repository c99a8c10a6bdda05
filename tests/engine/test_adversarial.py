"""A stranger's attempts on the engine: models that break, streams left behind, stops in half characters,
requests that outgrow a pool without chunked prefill. Nothing may stall, leak or change what is said."""

import contextlib
import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fake_model import HashModel, assert_idle, greedy, make_engine, poison, run, step, tokens_of

from minipaged.checkpoints.loading import LoadedModel
from minipaged.core.request import Request
from minipaged.core.sampler import BadLogitsError
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import CompletionOutput, RequestOutput
from minipaged.memory import blocks_for
from minipaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_tokenizers import PieceTokenizer

FUZZ = int(os.environ.get("MINIPAGED_FUZZ", "1"))
SCHEDULES = 20 * FUZZ
GROUPS = min(FUZZ, 6)
MAX_MODEL_LEN = 40
NUM_REQUESTS = 6


class ModelFailure(Exception):
    pass


class FlakyModel(HashModel):
    """Breaks at random: before it stores anything, after it stored everything, or in the head."""

    def __init__(self, rng: random.Random, share: float) -> None:
        super().__init__()
        self.rng, self.share = rng, share

    def _maybe_fail(self) -> None:
        if self.rng.random() < self.share:
            raise ModelFailure

    def __call__(self, *inputs: Any) -> torch.Tensor:
        self._maybe_fail()
        hidden = super().__call__(*inputs)
        self._maybe_fail()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._maybe_fail()
        return super().compute_logits(hidden)


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams


class Listener:
    """What a caller of `step` has seen of each request; objects to things said twice, late or taken back."""

    def __init__(self, asked: dict[str, Asked]) -> None:
        self.asked = asked
        self.deltas: dict[tuple[str, int], tuple[str, list[int], list[Any]]] = {}
        self.shown: dict[tuple[str, int], CompletionOutput] = {}
        self.finished: dict[str, RequestOutput] = {}

    def hear(self, output: RequestOutput) -> None:
        name, kind = output.request_id, self.asked[output.request_id].params.output_kind
        assert name not in self.finished
        if output.finished:
            self.finished[name] = output
        assert output.finished or kind is not RequestOutputKind.FINAL_ONLY
        for completion in output.outputs:
            if kind is RequestOutputKind.DELTA:
                text, ids, logprobs = self.deltas.get((name, completion.index), ("", [], []))
                whole = (text + completion.text, [*ids, *completion.token_ids])
                self.deltas[name, completion.index] = (*whole, [*logprobs, *(completion.logprobs or [])])
            elif (before := self.shown.get((name, completion.index))) is not None:
                assert completion.text.startswith(before.text)
                assert completion.token_ids[: len(before.token_ids)] == before.token_ids
            self.shown[name, completion.index] = completion

    def whole(self, name: str, completion: CompletionOutput) -> tuple[str, list[int], list[Any] | None]:
        """Text, token ids and logprobs of a sequence, a delta stream's pieces joined."""
        if self.asked[name].params.output_kind is RequestOutputKind.DELTA:
            text, ids, logprobs = self.deltas[name, completion.index]
            return text, ids, logprobs or None
        return completion.text, list(completion.token_ids), completion.logprobs


def random_settings(rng: random.Random) -> dict[str, Any]:
    block_size, seqs = rng.choice([1, 2, 3, 4]), rng.randint(3, 8)
    return {
        "block_size": block_size,
        "num_blocks": rng.randint(5, 10) + MAX_MODEL_LEN // block_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.randint(seqs, seqs + 10),
        "enable_prefix_caching": rng.random() < 0.6,
        "preemption": rng.choice(["recompute", "swap"]),
        "num_host_blocks": rng.choice([1, 3, 10, 60]),
        "watermark": rng.choice([0.0, 0.3]),
    }


def random_request(rng: random.Random) -> Asked:
    is_greedy = rng.random() < 0.3
    params = SamplingParams(
        n=1 if is_greedy else rng.randint(1, 3),
        temperature=0.0 if is_greedy else 1.0,
        seed=rng.randint(0, 9),
        max_tokens=rng.randint(1, 20),
        ignore_eos=rng.random() < 0.6,
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.choice([None, None, 2]),
        stop=rng.choice([None, ["bab", "cc"], "é"]),
        include_stop_str_in_output=rng.random() < 0.3,
        repetition_penalty=rng.choice([1.0, 1.3]),
        output_kind=rng.choice(list(RequestOutputKind)),
    )
    return Asked([rng.randint(1, 3) for _ in range(rng.randint(1, 19))], params)


def play(seed: int) -> tuple[Listener, dict[str, Any], int]:
    """Random requests on a model that breaks; everything heard, the settings, and how often it broke."""
    rng = random.Random(seed)
    settings = random_settings(rng)
    model = FlakyModel(rng, rng.choice([0.0, 0.05, 0.1]))
    engine = make_engine(model=model, tokenizer=PieceTokenizer(), **settings)
    listener, failures = Listener({}), 0
    for _ in range(20_000):
        if len(listener.asked) < NUM_REQUESTS and rng.random() < 0.4:
            name = str(len(listener.asked))
            asked = listener.asked[name] = random_request(rng)
            engine.add_request(name, asked.prompt, asked.params)
        try:
            outputs = step(engine)
        except ModelFailure:
            failures += 1
            engine.check_invariants()
            poison(engine)
            continue
        for output in outputs:
            listener.hear(output)
        if len(listener.asked) == NUM_REQUESTS and not engine.has_unfinished_requests():
            break
    assert_idle(engine)
    return listener, settings, failures


def undisturbed(asked: dict[str, Asked]) -> dict[str, RequestOutput]:
    engine = make_engine(
        num_blocks=800,
        block_size=7,
        max_num_seqs=64,
        max_num_batched_tokens=999,
        tokenizer=PieceTokenizer(),
        max_model_len=MAX_MODEL_LEN,
    )
    for name, one in asked.items():
        engine.add_request(name, one.prompt, replace(one.params, output_kind=RequestOutputKind.FINAL_ONLY))
    return run(engine)


def may_lack_blocks(asked: Asked, settings: dict[str, Any]) -> bool:
    block_size, prompt = settings["block_size"], len(asked.prompt)
    shared = prompt // block_size
    longest = min(prompt + (asked.params.max_tokens or 0), MAX_MODEL_LEN) - 1
    most = shared + asked.params.n * (blocks_for(longest, block_size) - shared)
    return most > settings["num_blocks"]


@pytest.mark.fuzz
@pytest.mark.parametrize("group", range(GROUPS))
def test_whatever_breaks_nothing_is_said_twice_lost_or_different(group: int) -> None:
    broken = 0
    for seed in range(group, SCHEDULES, GROUPS):
        listener, settings, failures = play(seed)
        broken += failures
        expected = undisturbed(listener.asked)
        for name, asked in listener.asked.items():
            output = listener.finished[name]
            assert output.prompt_logprobs == expected[name].prompt_logprobs, f"seed {seed}, request {name}"
            for found, right in zip(output.outputs, expected[name].outputs, strict=True):
                text, ids, logprobs = listener.whole(name, found)
                where = f"seed {seed}, request {name}, sample {found.index}"
                if may_lack_blocks(asked, settings) and found.finish_reason == "length":
                    assert ids == right.token_ids[: len(ids)], where
                    continue
                assert (text, ids, logprobs) == (right.text, right.token_ids, right.logprobs), where
                assert found.cumulative_logprob == right.cumulative_logprob, where
                ends = (found.finish_reason, found.stop_reason), (right.finish_reason, right.stop_reason)
                assert ends[0] == ends[1], where
    assert broken > 20


@pytest.mark.fuzz
def test_no_mix_of_tiny_pools_samples_aborts_and_resets_stalls() -> None:
    """With and without chunked prefill; prompts up to the pool's size, n up to 4, blocks of one token."""
    preemptions = 0
    for seed in range(2 * SCHEDULES):
        rng = random.Random(seed)
        seqs, longest, chunked = rng.randint(3, 8), rng.choice([12, 20, 40]), rng.random() < 0.4
        engine = make_engine(
            block_size=rng.choice([1, 1, 2, 3, 4]),
            num_blocks=rng.randint(4, 14),
            max_model_len=longest,
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.randint(seqs, seqs + 6) if chunked else max(longest, seqs),
            enable_chunked_prefill=chunked,
            enable_prefix_caching=rng.random() < 0.5,
            preemption=rng.choice(["recompute", "swap"]),
            num_host_blocks=rng.choice([1, 3, 10]),
            watermark=rng.choice([0.0, 0.3]),
        )
        added = 0
        for _ in range(400):
            if added < 6 and rng.random() < 0.5:
                params = SamplingParams(n=rng.randint(1, min(4, seqs)), seed=added, max_tokens=longest)
                prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, min(8, longest - 1)))]
                with contextlib.suppress(ValueError):  # larger than the pool
                    engine.add_request(str(added), prompt, params)
                added += 1
            if engine.requests and rng.random() < 0.05:
                engine.abort_request(rng.choice(list(engine.requests)), rng.choice([None, 0, 1, 2]))
            if rng.random() < 0.05:
                engine.reset_prefix_cache(reset_running_requests=rng.random() < 0.7)
            engine.check_invariants()
            step(engine)
            if added == 6 and not engine.has_unfinished_requests():
                break
        assert not engine.has_unfinished_requests(), f"seed {seed}"
        assert_idle(engine)
        preemptions += engine.stats.num_preemptions
    assert preemptions > 100


@pytest.mark.fuzz
def test_in_tight_pools_no_sequence_gives_way_more_than_four_times() -> None:
    """What bounds it: only the youngest gives way, and it comes back before anything younger enters."""
    most, preemptions = 0, 0
    for seed in range(2 * SCHEDULES):
        rng = random.Random(seed)
        block_size, longest, samples = rng.choice([1, 2, 4]), rng.randint(10, 30), rng.randint(1, 3)
        engine = make_engine(
            block_size=block_size,
            num_blocks=blocks_for(longest, block_size) * samples + rng.randint(1, 8),
            max_model_len=longest,
            max_num_seqs=8,
            max_num_batched_tokens=rng.randint(8, 40),
            enable_prefix_caching=rng.random() < 0.5,
            preemption=rng.choice(["recompute", "swap"]),
            num_host_blocks=rng.choice([1, 10, 40]),
        )
        gave_way: Counter[Request] = Counter()
        engine.on_step = lambda plan, found=gave_way: found.update(plan.preempted)
        for number in range(12):
            prompt = [rng.randint(1, 9) for _ in range(rng.randint(1, longest - 2))]
            params = SamplingParams(n=samples, seed=number, max_tokens=longest, ignore_eos=True)
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        most = max(most, *gave_way.values(), 0)
        preemptions += gave_way.total()
    assert preemptions > 4 * SCHEDULES
    assert most <= 4


def test_a_request_that_outgrew_the_pool_ends_when_it_comes_back_without_chunked_prefill() -> None:
    engine = make_engine(num_blocks=6, block_size=1, enable_chunked_prefill=False, max_model_len=40)
    engine.add_request("r", [1, 2, 3], greedy(20, ignore_eos=True))
    outputs: list[RequestOutput] = []
    while len(engine.requests["r"].samples[0].tokens) < 7:  # the seventh finds no slot
        outputs = step(engine)
    assert engine.reset_prefix_cache(reset_running_requests=True)
    while engine.has_unfinished_requests():
        outputs = step(engine)
    assert outputs[0].outputs[0].finish_reason == "length"
    assert_idle(engine)


def make_llm(model: HashModel, **settings: Any) -> LLM:
    model.dtype, model.device = torch.float32, torch.device("cpu")  # type: ignore[attr-defined]
    settings = {"num_blocks": 32, "block_size": 4, "max_model_len": 64} | settings
    return LLM(LoadedModel(model, None, model.config, "hash"), **settings)  # type: ignore[arg-type]


@pytest.mark.timeout(120)
def test_a_stream_whose_request_somebody_else_aborts_comes_to_its_end() -> None:
    llm = make_llm(HashModel())
    stream = llm.stream([1, 2, 3], greedy(20, ignore_eos=True))
    first = next(stream)
    assert llm.engine.abort_request(first.request_id)
    assert list(stream) == []
    assert_idle(llm.engine)


def test_a_generate_call_inside_a_stream_moves_both_on() -> None:
    llm, alone = make_llm(HashModel()), make_llm(HashModel())
    params = greedy(9, ignore_eos=True)
    seen = []
    for output in llm.stream([1, 2, 3], params):
        seen.append(output)
        if len(seen) == 2:
            inner = llm.generate([[4, 5], [1, 2, 3]], params, use_tqdm=False)
    expected = alone.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    assert tokens_of(seen[-1]) == tokens_of(inner[1]) == tokens_of(expected[0])
    assert tokens_of(inner[0]) == tokens_of(expected[1])
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 10))
    assert_idle(llm.engine)


class PoisonedModel(HashModel):
    """Gives NaN logits for the row of a sequence whose last state it is told."""

    poisoned_row: int | None = None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        if self.poisoned_row is not None:
            logits[self.poisoned_row] = torch.nan
        return logits


def test_nan_logits_name_their_request_and_the_others_go_on_without_it() -> None:
    model = PoisonedModel()
    engine = make_engine(model=model)
    for name in "abc":
        engine.add_request(name, [1, 2, ord(name) % 30], greedy(6, ignore_eos=True))
    step(engine)
    model.poisoned_row = 1
    with pytest.raises(BadLogitsError, match="'b'"):
        engine.step()
    engine.check_invariants()
    model.poisoned_row = None
    assert engine.abort_request("b")
    outputs = run(engine)
    healthy = make_engine()
    for name in "ac":
        healthy.add_request(name, [1, 2, ord(name) % 30], greedy(6, ignore_eos=True))
    expected = run(healthy)
    assert {name: tokens_of(output) for name, output in outputs.items()} == {
        name: tokens_of(output) for name, output in expected.items()
    }


@pytest.mark.timeout(120)
def test_a_generate_call_whose_request_somebody_else_aborts_says_so(monkeypatch) -> None:
    llm = make_llm(HashModel())
    undisturbed_step = llm.engine.step

    def step_and_abort() -> list[RequestOutput]:
        outputs = undisturbed_step()
        llm.engine.abort_request("llm-1")
        return outputs

    monkeypatch.setattr(llm.engine, "step", step_and_abort)
    with pytest.raises(RuntimeError, match=r"requests \['llm-1'\] were aborted"):
        llm.generate([[1, 2], [3, 4]], greedy(5, ignore_eos=True), use_tqdm=False)
    assert_idle(llm.engine)
