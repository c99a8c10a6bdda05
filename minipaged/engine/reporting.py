"""From a request to the `RequestOutput` its caller sees."""

from __future__ import annotations

from minipaged.engine.outputs import CompletionOutput, RequestOutput
from minipaged.engine.request import Request, Sequence, Status
from minipaged.engine.sampling_params import RequestOutputKind


def make_output(request: Request) -> RequestOutput:
    """The request as it stands now; of a DELTA stream what is new since the last call."""
    is_delta = request.streams and request.params.output_kind is RequestOutputKind.DELTA
    completion = _new_part if is_delta else _whole
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        outputs=[completion(sequence) for sequence in request.sequences],
        finished=request.status is Status.FINISHED,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens or 0,
    )


def _whole(sequence: Sequence) -> CompletionOutput:
    output = sequence.output
    return CompletionOutput(
        index=sequence.index,
        text=output.text,
        token_ids=output.token_ids.copy(),
        cumulative_logprob=sequence.cumulative_logprob,
        logprobs=None if sequence.logprobs is None else sequence.logprobs.copy(),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _new_part(sequence: Sequence) -> CompletionOutput:
    output, start = sequence.output, sequence.num_reported
    sequence.num_reported = len(output.token_ids)
    return CompletionOutput(
        index=sequence.index,
        text=output.delta(),
        token_ids=output.token_ids[start:],
        cumulative_logprob=sequence.cumulative_logprob,
        logprobs=None if sequence.logprobs is None else sequence.logprobs[start:],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
