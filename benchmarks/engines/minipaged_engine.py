"""minipaged. --option torch: on a machine without a compiler; caching: with the prefix cache, as a server."""

import os

from common import Served, arguments, generate, run

from minipaged import LLM, SamplingParams  # before torch: it sets how torch's threads wait

import torch  # isort: skip

args = arguments()
torch.set_num_threads(args.threads)
if args.option == "torch":
    os.environ["CXX"] = "false"  # the command: it compiles nothing, and says so
llm = LLM(
    str(args.model),
    dtype=args.dtype,
    kv_memory=args.kv_bytes,
    max_model_len=args.max_len,
    max_num_seqs=64,
    enable_prefix_caching=args.option == "caching",
)


def serve(requests: list[dict]) -> list[Served]:
    served = []
    for output in generate(llm, SamplingParams, requests):
        metrics = output.metrics
        decode_time = metrics.last_token_time - metrics.first_token_time
        served.append(Served(len(output.outputs[0].token_ids), metrics.ttft, decode_time))
    return served


run(serve)
