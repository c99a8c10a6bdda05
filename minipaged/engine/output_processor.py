"""OutputProcessor: from requests and steps to what a caller sees, `RequestOutput` and `StepRecord`.

Names and meanings of the outputs are vLLM's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from minipaged.core.request import ParentRequest, Request, RequestMetrics, Status, StepPlan
from minipaged.core.sampler import Logprob
from minipaged.core.scheduler import Scheduler
from minipaged.engine.text import Detokenizer, OutputState, TextTokenizer, make_detokenizer
from minipaged.sampling_params import RequestOutputKind

TRACE_LENGTH = 100_000  # steps kept; older ones are dropped


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` samples of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    """None while it runs; "stop" (end-of-sequence, stop token or stop string), "length" (max_tokens,
    max_model_len, or a pool that is full although nothing else runs) or "abort"."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for end-of-sequence."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as it stands: so far while it runs, whole once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache when the request first ran."""


class OutputProcessor:
    """Finds out whose output has ended, and makes the outputs of a step.

    Both may ask a tokenizer, which may raise. Then the other requests go on as if nothing had happened: the
    error is raised once they have their outputs, and these come with the next step. The request whose text
    could not be made is asked for it again.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.unchecked: list[Request] = []
        """Requests of which is not known whether their newest token ends them."""
        self._ended: dict[ParentRequest, None] = {}  # still to be reported
        self._outputs: list[RequestOutput] = []  # made, and not returned yet
        self._errors: list[Exception] = []

    def find_ended(self, requests: Iterable[Request]) -> list[Request]:
        """Those that their newest token ends; if their text cannot be made they become `unchecked`."""
        ended = []
        for request in requests:
            try:
                if request.output.check_end():
                    ended.append(request)
            except Exception as error:
                self._errors.append(error)
                self.unchecked.append(request)
        return ended

    def check_again(self) -> list[Request]:
        """Ask the unchecked ones once more, before they get another token; what then fails goes unchecked."""
        unchecked, self.unchecked = self.unchecked, []
        ended = self.find_ended([request for request in unchecked if request.status is not Status.FINISHED])
        ended += [request for request in self.unchecked if request.output.finish_reason]
        self.unchecked = []
        return ended

    def end(self, parent: ParentRequest, now: float) -> None:
        """Note a request that ended at `now`, to be reported."""
        parent.metrics.finish(now, sum(len(sample.output.token_ids) for sample in parent.samples))
        self._ended[parent] = None

    def make_outputs(
        self, streaming: Iterable[ParentRequest], forget: Callable[[ParentRequest], None]
    ) -> None:
        """Outputs of requests that stream, and of those that ended, for which `forget` is called.

        Raises the first error of a tokenizer in this step, after all the others.
        """
        for parent in (*streaming, *self._ended):
            try:
                output = make_output(parent, self.tokenizer)
            except Exception as error:
                self._errors.append(error)
                continue
            if output.finished:
                forget(parent)
                del self._ended[parent]
            self._outputs.append(output)
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]

    def take_outputs(self) -> list[RequestOutput]:
        """Those that were made since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_outputs(self) -> bool:
        """Whether some output was made and is still to be returned."""
        return bool(self._outputs)

    def holds(self, request_id: str) -> bool:
        """Whether an output of this request was made and is still to be returned."""
        return any(output.request_id == request_id for output in self._outputs)

    def drop(self, parent: ParentRequest) -> None:
        """Report nothing of this request any more."""
        self._ended.pop(parent, None)
        self._outputs = [output for output in self._outputs if output.request_id != parent.request_id]


def make_output(parent: ParentRequest, tokenizer: TextTokenizer | None) -> RequestOutput:
    """The request as it stands now; of a DELTA stream what is new since the last call.

    `tokenizer` gives the tokens beside log-probabilities their text.
    """
    params = parent.params
    asks_for_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    if asks_for_logprobs and tokenizer is not None and params.detokenize:
        _name_prompt_tokens(parent, tokenizer)
        for sample in parent.samples:
            _name_tokens(sample, tokenizer)
    if parent.output_kind is RequestOutputKind.DELTA:
        for sample in parent.samples:
            _text_of(sample).settle()  # a tokenizer that raises does so before any part counts as given
    make_completion = _new_part if parent.output_kind is RequestOutputKind.DELTA else _whole
    return RequestOutput(
        request_id=parent.request_id,
        prompt=parent.prompt,
        prompt_token_ids=parent.prompt_token_ids,
        prompt_logprobs=parent.prompt_logprobs,
        outputs=[make_completion(sample) for sample in parent.samples],
        finished=not parent.unfinished,
        metrics=parent.metrics,
        num_cached_tokens=parent.num_cached_tokens or 0,
    )


def _name_prompt_tokens(parent: ParentRequest, tokenizer: TextTokenizer) -> None:
    """Give each entry of the prompt the text of its tokens, once all entries are there."""
    entries, ids = parent.prompt_logprobs or [], parent.prompt_token_ids
    if len(entries) == len(ids) and (len(entries) < 2 or _is_named(entries[1])):
        return
    detokenizer = make_detokenizer(tokenizer, False, ids[:1])
    for entry, token_id in zip(entries[1:], ids[1:], strict=False):
        _name_entry(entry or {}, token_id, detokenizer)


def _name_tokens(request: Request, tokenizer: TextTokenizer) -> None:
    """Give the entries that are new since the last call the text of their tokens.

    That is what each token adds to the text before it: "" while a character is incomplete. One that stays
    incomplete at the end belongs to the last token.
    """
    entries, output = request.logprobs or [], _text_of(request)
    if not entries or _is_named(entries[-1]):
        return
    if output.namer is None:
        output.namer = make_detokenizer(tokenizer, False, request.parent.prompt_token_ids)
    first = next(index for index, entry in enumerate(entries) if not _is_named(entry))
    for entry, token_id in zip(entries[first:], output.token_ids[first:], strict=False):
        _name_entry(entry, token_id, output.namer)
    if output.finish_reason is not None:
        last = entries[-1][output.token_ids[len(entries) - 1]]
        last.decoded_token = (last.decoded_token or "") + output.namer.flush()


def _is_named(entry: dict[int, Logprob] | None) -> bool:
    return all(logprob.decoded_token is not None for logprob in (entry or {}).values())


def _name_entry(entry: dict[int, Logprob], chosen: int, detokenizer: Detokenizer) -> None:
    names = {token_id: detokenizer.preview(token_id) for token_id in entry}
    detokenizer.feed(chosen)
    for token_id, name in names.items():
        entry[token_id].decoded_token = name


def _text_of(request: Request) -> OutputState:
    return cast("OutputState", request.output)  # what `InputProcessor` gave it


def _whole(request: Request) -> CompletionOutput:
    output, logprobs = _text_of(request), request.logprobs
    return CompletionOutput(
        index=request.index,
        text=output.text,
        token_ids=output.token_ids.copy(),
        cumulative_logprob=request.cumulative_logprob,
        logprobs=None if logprobs is None else logprobs.copy(),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _new_part(request: Request) -> CompletionOutput:
    output, logprobs = _text_of(request), request.logprobs
    text = output.delta()
    start, request.num_reported = request.num_reported, len(output.token_ids)
    return CompletionOutput(
        index=request.index,
        text=text,
        token_ids=output.token_ids[start:],
        cumulative_logprob=request.cumulative_logprob,
        logprobs=None if logprobs is None else logprobs[start:],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Memory is measured after the model ran, before what ended in this step was freed."""

    index: int
    time: float
    """Seconds of the engine's clock when the step began."""
    duration: float
    """Seconds from planning to sampled tokens."""
    running: int
    """Requests that held blocks."""
    waiting: int
    """Requests without blocks, swapped ones included."""
    swapped: int
    prefill_tokens: int
    decode_tokens: int
    preempted: int
    """Requests preempted in this step."""
    blocks_held: int
    reserved_bytes: int
    """KV memory of the blocks held."""
    used_bytes: int
    """The part of it that holds tokens."""


class Recorder:
    """Writes one `StepRecord` per step and the times of the requests in it."""

    def __init__(self, bytes_per_block: int, block_size: int) -> None:
        self.bytes_per_block = bytes_per_block
        self.block_size = block_size
        self.trace: deque[StepRecord] = deque(maxlen=TRACE_LENGTH)

    def record(self, plan: StepPlan, scheduler: Scheduler, start: float, now: float) -> None:
        """Note a step that ran from `start` to `now`; call it before its tokens are added."""
        stats = scheduler.stats
        stats.num_steps += 1
        stats.num_prefill_tokens += plan.num_prefill_tokens
        stats.num_generation_tokens += len(plan.sampled)
        self._record_times(plan, start, now)
        self._record_sharing(plan)
        pool = scheduler.manager.pool
        held = pool.num_blocks - pool.num_free
        reserved = held * self.bytes_per_block
        empty_slots = plan.num_empty_slots(self.block_size)
        self.trace.append(
            StepRecord(
                index=stats.num_steps - 1,
                time=start,
                duration=now - start,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                swapped=scheduler.num_swapped,
                prefill_tokens=plan.num_prefill_tokens,
                decode_tokens=sum(plan.query_lens) - plan.num_prefill_tokens,
                preempted=len(plan.preempted),
                blocks_held=held,
                reserved_bytes=reserved,
                used_bytes=reserved - empty_slots * self.bytes_per_block // self.block_size,
            )
        )

    def _record_times(self, plan: StepPlan, start: float, now: float) -> None:
        for request in plan.admitted:
            if request.parent.metrics.first_scheduled_time is None:
                request.parent.metrics.first_scheduled_time = start
        for request in [r for r in plan.sampled if not r.output.token_ids]:
            if request.parent.metrics.first_token_time is None:
                request.parent.metrics.first_token_time = now

    def _record_sharing(self, plan: StepPlan) -> None:
        """Of calls with several samples, from the step after the fork on."""
        for parent in {r.parent for r in plan.requests if len(r.parent.samples) > 1}:
            tables = [r.table for r in parent.samples if r.status is Status.RUNNING and r.output.token_ids]
            if len(tables) > 1:
                parent.metrics.sharing.count(tables)
