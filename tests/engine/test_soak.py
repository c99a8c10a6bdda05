"""Random schedules: arrivals, samples, stop tokens and strings, aborts, interrupts, beam searches, tiny
pools, both ways to preempt. After every step the bookkeeping is proven; in the end every request has what it
would have said in an engine with room for all."""

import contextlib
import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_model import HashModel, assert_idle, make_engine, poison, run

from minipaged.cache import hash_blocks, usable_hits
from minipaged.core.request import Request, Status, StepPlan
from minipaged.engine.beam import beam_search
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import CompletionOutput, RequestOutput
from minipaged.memory import blocks_for
from minipaged.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.fake_tokenizers import PieceTokenizer

FUZZ = int(os.environ.get("MINIPAGED_FUZZ", "1"))
SCHEDULES = 100 if FUZZ == 1 else min(840 * FUZZ, 50_400)  # 5,040 in `make check`
GROUPS = min(2 * FUZZ, 12)


@dataclass
class Arrival:
    step: int
    request_id: str
    prompt: list[int]
    params: SamplingParams


@dataclass
class Schedule:
    """One random world. Everything follows from the seed."""

    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    aborts: list[tuple[int, str, int | None]] = field(default_factory=list)
    interrupts: set[int] = field(default_factory=set)
    """Steps in which Ctrl-C comes while the model runs, or right after it."""
    beam: BeamSearchParams | None = None
    """A beam search of the first prompt, when all else has ended."""

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        block_size = rng.choice([1, 2, 3, 4, 5, 8])
        seqs = rng.randint(2, 7)
        chunked = rng.random() < 0.8
        self.settings = {
            "block_size": block_size,
            "num_blocks": rng.randint(3, 6) + 30 // block_size,
            "max_model_len": 60,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": rng.randint(seqs, seqs + 12) if chunked else 60 + rng.randint(0, 20),
            "enable_chunked_prefill": chunked,
            "enable_prefix_caching": rng.random() < 0.6,
            "preemption": rng.choice(["recompute", "swap"]),
            "watermark": rng.choice([0.0, 0.01, 0.2]),
            "num_host_blocks": rng.choice([0, 2, 10, 60]),
        }
        stems = [[rng.randint(1, 39) for _ in range(rng.randint(1, 20))] for _ in range(2)]
        for i in range(rng.randint(3, 9)):
            stem = rng.choice(stems)
            prompt = stem[: rng.randint(1, len(stem))] + [
                rng.randint(1, 39) for _ in range(rng.randint(0, 5))
            ]
            self.arrivals.append(Arrival(rng.randint(0, 12), f"{i}", prompt, self._params(rng, seqs)))
            if rng.random() < 0.2:
                self.aborts.append((rng.randint(0, 30), f"{i}", rng.choice([None, None, 0, 1])))

        if rng.random() < 0.3:
            self.interrupts = {rng.randint(0, 40) for _ in range(rng.randint(1, 3))}
        if rng.random() < 0.2:
            self.beam = BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=rng.randint(1, 4))

    @staticmethod
    def _params(rng: random.Random, seqs: int) -> SamplingParams:
        drawn = rng.random() < 0.5
        max_tokens = rng.randint(1, 20)
        return SamplingParams(
            n=rng.randint(1, min(3, seqs)) if drawn else 1,
            temperature=1.0 if drawn else 0.0,
            seed=rng.randint(0, 99),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(1, 40), rng.choice([0, 3])),
            stop=rng.choice([None, None, "abba", ["bb", "cab"]]),
            logprobs=rng.choice([None, None, 0, 2]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
        )

    def engine(self) -> Engine:
        return make_engine(model=HashModel(), tokenizer=PieceTokenizer(), **self.settings)

    def unpressured(self) -> dict[str, RequestOutput]:
        """The same requests with room for all of them, no sharing between them and no chunks."""
        engine = roomy_engine()
        for arrival in self.arrivals:
            engine.add_request(arrival.request_id, arrival.prompt, arrival.params)
        return run(engine)

    def may_lack_blocks(self, arrival: Arrival) -> bool:
        """Whether a sample at its full length exceeds the pool."""
        longest = min(len(arrival.prompt) + (arrival.params.max_tokens or 0), 60) - 1
        return blocks_for(longest, self.settings["block_size"]) > self.settings["num_blocks"]


def roomy_engine() -> Engine:
    return make_engine(
        model=HashModel(),
        num_blocks=800,
        block_size=7,
        max_num_seqs=64,
        max_num_batched_tokens=999,
        tokenizer=PieceTokenizer(),
    )


def search(engine: Engine, prompt: list[int], params: BeamSearchParams) -> Any:
    found = beam_search(
        engine.runner.model, engine.pool, engine.storage, engine.runner.backend, prompt, params,
        eos_token_ids=(0,), max_model_len=60,
    )  # fmt: skip
    return [(sequence.output_token_ids, sequence.finish_reason) for sequence in found.sequences]


class Watch:
    """What is seen of each step of an engine, before its tokens are added."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slots: list[int] = []
        """Of each step the number of different slots that hold a token."""
        self.from_flight = 0
        """Blocks that requests took while another computed them."""
        self.in_vain: list[str] = []
        """Requests that computed a full block which was cached, or which another computed before them."""
        self.swapped: set[Request] = set()
        """Those that were swapped out when the step before had been planned."""
        engine.on_step = self.look

    def look(self, plan: StepPlan) -> None:
        tables = [request.table for request in self.engine.scheduler.running]
        self.slots.append(len({slot for t in tables for slot in t.slots(0, t.num_tokens).tolist()}))
        if self.engine.pool.enable_prefix_caching:
            self._look_at_sharing(plan)
        self.swapped = {r for r in self.engine.scheduler.waiting if r.status is Status.SWAPPED}

    def _look_at_sharing(self, plan: StepPlan) -> None:
        pool, block_size = self.engine.pool, self.engine.manager.block_size
        in_flight: set[int] = set()  # blocks that requests planned by now fill in this step
        for request, query_len in zip(plan.requests, plan.query_lens, strict=True):
            blocks, first = request.table.blocks, request.num_computed // block_size
            stop = (request.num_computed + query_len) // block_size
            if request in plan.admitted and request not in self.swapped:
                self.from_flight += len(in_flight.intersection(blocks[:first]))
                if min(stop, usable_hits(len(request.tokens), block_size)) > first:
                    found = pool.lookup(hash_blocks(request.tokens, block_size)[first : first + 1])
                    self.in_vain += [request.request_id] * (found != [blocks[first]])
            in_flight.update(blocks[first:stop])


def interrupt(engine: Engine, seed: int) -> None:
    """Let the next call of the model be cut by Ctrl-C, before it stores anything or after it stored all."""
    model = engine.runner.model

    def cut(*inputs: Any) -> Any:
        engine.runner.model = model
        if seed % 2:
            model(*inputs)
        raise KeyboardInterrupt

    engine.runner.model = cut  # type: ignore[assignment]


def play(schedule: Schedule) -> tuple[Watch, dict[str, RequestOutput], set[str]]:
    """Run a schedule under pressure; the final outputs, and who was refused or, in part, aborted."""
    engine = schedule.engine()
    watch, model = Watch(engine), engine.runner.model
    finished: dict[str, RequestOutput] = {}
    gone: set[str] = set()
    waiting = sorted(schedule.arrivals, key=lambda arrival: arrival.step)
    for number in range(2000):
        while waiting and waiting[0].step <= number:
            arrival = waiting.pop(0)
            try:
                engine.add_request(arrival.request_id, arrival.prompt, arrival.params)
            except ValueError:
                assert arrival.params.n > 1 or schedule.may_lack_blocks(arrival)
                gone.add(arrival.request_id)
        for when, request_id, index in schedule.aborts:
            if when == number and engine.abort_request(request_id, index):
                gone.add(request_id)
                engine.check_invariants()
        if number in schedule.interrupts:
            interrupt(engine, schedule.seed)
        outputs: list[RequestOutput] = []
        with contextlib.suppress(KeyboardInterrupt):
            outputs = engine.step()
        for output in outputs:
            assert output.request_id in engine.requests or output.finished
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
        engine.check_invariants()
        poison(engine)
        assert [record.used_bytes for record in engine.trace] == [16 * count for count in watch.slots]
        if not waiting and not engine.has_unfinished_requests():
            break
    assert_idle(engine)
    engine.runner.model = model  # the last interrupt may have met a step that did not call it
    return watch, finished, gone


def agrees(output: CompletionOutput, expected: CompletionOutput, *, may_be_cut: bool) -> bool:
    if output.finish_reason == "abort" or (may_be_cut and output.finish_reason == "length"):
        return output.token_ids == expected.token_ids[: len(output.token_ids)]
    same_end = (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
    return (output.token_ids, output.text, output.logprobs) == (
        expected.token_ids,
        expected.text,
        expected.logprobs,
    ) and same_end


@pytest.mark.fuzz
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules_end_and_say_what_they_would_say_unpressured(group: int) -> None:
    """Each token is kept, sampled and said once, whatever was chunked, preempted or aborted on the way."""
    preemptions = hits = from_flight = 0
    for seed in range(group, SCHEDULES, GROUPS):
        schedule = Schedule(seed)
        watch, finished, gone = play(schedule)
        expected = schedule.unpressured()
        assert not watch.in_vain, f"seed {seed}: {watch.in_vain} computed what they could have shared"
        preemptions += watch.engine.stats.num_preemptions
        hits += watch.engine.stats.prefix.hits
        from_flight += watch.from_flight
        for arrival in schedule.arrivals:
            name = arrival.request_id
            if name not in finished:
                assert name in gone, f"seed {seed}: {name} is lost"
                continue
            for output, right in zip(finished[name].outputs, expected[name].outputs, strict=True):
                cut = schedule.may_lack_blocks(arrival)
                assert agrees(output, right, may_be_cut=cut), f"seed {seed}, request {name}: {output} {right}"
        if schedule.beam is not None:
            engine, prompt = watch.engine, schedule.arrivals[0].prompt
            most = blocks_for(len(prompt) + 4, engine.manager.block_size) * schedule.beam.beam_width
            if most <= engine.pool.num_blocks:
                found = search(engine, prompt, schedule.beam)
                assert found == search(roomy_engine(), prompt, schedule.beam), f"seed {seed}"
                assert_idle(engine)
    assert min(preemptions, hits, from_flight) > 0, "the schedules test too little"
