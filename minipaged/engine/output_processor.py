"""From a request to the `RequestOutput` its caller sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from minipaged.core.request import Request, Sequence, Status
from minipaged.engine.logprobs import Logprob
from minipaged.engine.outputs import CompletionOutput, RequestOutput
from minipaged.engine.prompts import EngineTokenizer
from minipaged.sampling_params import RequestOutputKind


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
        for entry in (request.prompt_logprobs, *[sequence.logprobs for sequence in request.sequences]):
            _name_tokens(entry or (), tokenizer)
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


def _name_tokens(entries: SequenceOf[dict[int, Logprob] | None], tokenizer: EngineTokenizer) -> None:
    """Give the entries that are new since the last call, at the end of the list, the text of their tokens."""
    for entry in reversed(entries):
        for token_id, logprob in (entry or {}).items():
            if logprob.decoded_token is not None:
                return
            logprob.decoded_token = tokenizer.decode([token_id], skip_special_tokens=False)


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
