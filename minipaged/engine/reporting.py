"""From a request to the `RequestOutput` its caller sees."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from minipaged.engine.logprobs import Logprob
from minipaged.engine.outputs import CompletionOutput, RequestOutput
from minipaged.engine.prompts import EngineTokenizer
from minipaged.engine.request import Request, Sequence, Status
from minipaged.engine.sampling_params import RequestOutputKind


def make_outputs(requests: SequenceOf[Request], tokenizer: EngineTokenizer | None) -> list[RequestOutput]:
    """The requests as they stand now; of a DELTA stream what is new since the last call.

    `tokenizer` gives the tokens beside log-probabilities their text.
    """
    return [_make_output(request, tokenizer) for request in requests]


def _make_output(request: Request, tokenizer: EngineTokenizer | None) -> RequestOutput:
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
    output, logprobs, start = sequence.output, sequence.logprobs, sequence.num_reported
    sequence.num_reported = len(output.token_ids)
    return CompletionOutput(
        sequence.index,
        output.delta(),
        output.token_ids[start:],
        sequence.cumulative_logprob,
        None if logprobs is None else logprobs[start:],
        output.finish_reason,
        output.stop_reason,
    )
