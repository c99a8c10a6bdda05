"""From a request to the `RequestOutput` its caller sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from minipaged.engine.detokenizer import Detokenizer, make_detokenizer
from minipaged.engine.logprobs import Logprob
from minipaged.engine.outputs import CompletionOutput, RequestOutput
from minipaged.engine.prompts import EngineTokenizer
from minipaged.engine.request import Request, Sequence, Status
from minipaged.engine.sampling_params import RequestOutputKind


class Reporter:
    """Makes outputs. When a tokenizer raises, what is made by then, and the rest, come with the next step."""

    def __init__(self, tokenizer: EngineTokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.ended: deque[Request] = deque()
        """Requests that have ended, and nobody has been told."""
        self._outputs: list[RequestOutput] = []

    def end(self, requests: Iterable[Request], now: float) -> None:
        """Note requests that ended at `now`, to be reported."""
        for request in requests:
            request.metrics.finish(now, sum(len(s.output.token_ids) for s in request.sequences))
            self.ended.append(request)

    def report(self, streaming: Iterable[Request], forget: Callable[[Request], None]) -> list[RequestOutput]:
        """Outputs of requests that stream, and of those that ended, for which `forget` is called."""
        for request in streaming:
            self._outputs.append(make_output(request, self.tokenizer))
        while self.ended:
            request = self.ended[0]
            output = make_output(request, self.tokenizer)
            forget(request)
            self.ended.popleft()
            self._outputs.append(output)
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_outputs(self) -> bool:
        """Whether some output was made and is still to be returned."""
        return bool(self._outputs)

    def holds(self, request_id: str) -> bool:
        """Whether an output of this request was made and is still to be returned."""
        return any(output.request_id == request_id for output in self._outputs)

    def drop(self, request: Request) -> None:
        """Report nothing of this request any more."""
        self.ended = deque(other for other in self.ended if other is not request)
        self._outputs = [output for output in self._outputs if output.request_id != request.request_id]


def make_output(request: Request, tokenizer: EngineTokenizer | None) -> RequestOutput:
    """The request as it stands now; of a DELTA stream what is new since the last call.

    `tokenizer` gives the tokens beside log-probabilities their text.
    """
    params = request.params
    asks_for_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    if asks_for_logprobs and tokenizer is not None and params.detokenize:
        _name_prompt_tokens(request, tokenizer)
        for sequence in request.sequences:
            _name_tokens(sequence, tokenizer)
    completion = _new_part if request.output_kind is RequestOutputKind.DELTA else _whole
    return RequestOutput(  # by position, as below: by name, making outputs takes a seventh longer
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        request.prompt_logprobs,
        [completion(sequence) for sequence in request.sequences],
        request.status is Status.FINISHED,
        request.metrics,
        request.num_cached_tokens or 0,
    )


def _name_prompt_tokens(request: Request, tokenizer: EngineTokenizer) -> None:
    """Give each entry of the prompt the text of its tokens, once all entries are there."""
    entries, ids = request.prompt_logprobs or [], request.prompt_token_ids
    if len(entries) == len(ids) and (len(entries) < 2 or _is_named(entries[1])):
        return
    detokenizer = make_detokenizer(tokenizer, False, ids[:1])
    for entry, token_id in zip(entries[1:], ids[1:], strict=False):
        _name_entry(entry or {}, token_id, detokenizer)


def _name_tokens(sequence: Sequence, tokenizer: EngineTokenizer) -> None:
    """Give the entries that are new since the last call the text of their tokens.

    That is what each token adds to the text before it: "" while a character is under way. A character that
    the end cuts is its last token's.
    """
    entries = sequence.logprobs or []
    if not entries or _is_named(entries[-1]):
        return
    if sequence.namer is None:
        sequence.namer = make_detokenizer(tokenizer, False, sequence.request.prompt_token_ids)
    token_ids = sequence.output.token_ids
    first = next(index for index, entry in enumerate(entries) if not _is_named(entry))
    for entry, token_id in zip(entries[first:], token_ids[first:], strict=False):
        _name_entry(entry, token_id, sequence.namer)
    if sequence.output.finish_reason is not None:
        last = entries[-1][token_ids[len(entries) - 1]]
        last.decoded_token = (last.decoded_token or "") + sequence.namer.flush()


def _is_named(entry: dict[int, Logprob] | None) -> bool:
    return all(logprob.decoded_token is not None for logprob in (entry or {}).values())


def _name_entry(entry: dict[int, Logprob], chosen: int, detokenizer: Detokenizer) -> None:
    names = {token_id: detokenizer.preview(token_id) for token_id in entry}
    detokenizer.feed(chosen)
    for token_id, name in names.items():
        entry[token_id].decoded_token = name


def _whole(sequence: Sequence) -> CompletionOutput:
    output, logprobs = sequence.output, sequence.logprobs
    return CompletionOutput(
        sequence.index,
        output.text,
        output.token_ids.copy(),
        sequence.cumulative_logprob,
        None if logprobs is None else logprobs.copy(),
        output.finish_reason,
        output.stop_reason,
    )


def _new_part(sequence: Sequence) -> CompletionOutput:
    output, logprobs = sequence.output, sequence.logprobs
    text = output.delta()  # a tokenizer that raises leaves all to the next time
    start, sequence.num_reported = sequence.num_reported, len(output.token_ids)
    return CompletionOutput(
        sequence.index,
        text,
        output.token_ids[start:],
        sequence.cumulative_logprob,
        None if logprobs is None else logprobs[start:],
        output.finish_reason,
        output.stop_reason,
    )
