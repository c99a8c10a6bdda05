"""The second half of `decode_split`: add the parts of each query head up.

A part that averaged its values over scores with the log-sum-exp s has the weight exp(s), so the result is
the average of the averages with these weights, taken relative to the largest s. Sixteen parts are read at a
time, because reading them one after the other would wait for memory each time.
"""

import triton
import triton.language as tl
from torch import Tensor

from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.arguments import output_arguments, padded
from minipaged.attention.launch import Launch


@triton.jit
def decode_combine_kernel(
    output_ptr,  # [num_tokens, num_query_heads, head_size]
    average_ptr,  # [num_tokens, num_query_heads, num_parts, head_size] float32, contiguous
    log_sum_exp_ptr,  # [num_tokens, num_query_heads, num_parts] float32, to the base 2, contiguous
    context_lens_ptr,
    query_start_ptr,
    stride_output_token,
    stride_output_head,
    num_parts,
    part_len,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PARTS: tl.constexpr,  # parts read at a time
):
    head, seq = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) == token:  # no query token in this step
        return
    live_parts = tl.cdiv(tl.load(context_lens_ptr + seq), part_len)
    dims = tl.arange(0, HEAD_PADDED)
    first_stored = (token * tl.num_programs(0) + head) * num_parts

    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for first_part in range(0, live_parts, PARTS):
        part = first_part + tl.arange(0, PARTS)
        live = part < live_parts
        stored = first_stored + part
        log_sum_exp = tl.load(log_sum_exp_ptr + stored, mask=live, other=float("-inf"))
        average = tl.load(
            average_ptr + stored[:, None] * HEAD_SIZE + dims[None, :],
            mask=live[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )  # [PARTS, HEAD_PADDED]
        new_maximum = tl.maximum(maximum, tl.max(log_sum_exp, axis=0))  # finite: a live part has a key
        weights = tl.exp2(log_sum_exp - new_maximum)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(weights[:, None] * average, axis=0)
        maximum = new_maximum

    result = acc / tl.where(total > 0.0, total, 1.0)  # without any key the result is 0
    output_ptr += token * stride_output_token + head * stride_output_head
    tl.store(output_ptr + dims, result.to(output_ptr.dtype.element_ty), mask=dims < HEAD_SIZE)


def decode_combine_launch(
    output: Tensor, average: Tensor, log_sum_exp: Tensor, batch: AttentionBatch, *, part_len: int
) -> Launch:
    """Fill `output` [num_tokens, num_query_heads, head_size] from what `decode_split` stored."""
    num_query_heads, num_parts, head_size = average.shape[1:]
    args = output_arguments(output) | {
        "average_ptr": average,
        "log_sum_exp_ptr": log_sum_exp,
        "context_lens_ptr": batch.context_lens,
        "query_start_ptr": batch.query_start,
        "num_parts": num_parts,
        "part_len": part_len,
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": padded(head_size),
        "PARTS": 16,
    }
    return Launch(decode_combine_kernel, (num_query_heads, batch.num_seqs), args)
