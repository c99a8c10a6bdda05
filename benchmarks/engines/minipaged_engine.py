"""minipaged. --option torch: without the compiled decode kernel."""

import torch
from common import arguments, output_lengths, read_mix, report, serve

args = arguments()
torch.set_num_threads(args.threads)

from minipaged import LLM, SamplingParams  # noqa: E402
from minipaged.attention import cpu_kernel  # noqa: E402

if args.option == "torch":
    cpu_kernel.load = lambda: None
requests = read_mix(args.mix)
llm = LLM(
    str(args.model),
    dtype=args.dtype,
    kv_memory="512MiB",
    max_model_len=2048,
    max_num_seqs=64,
    enable_prefix_caching=False,
)
outputs, seconds = serve(llm, SamplingParams, requests)
report(requests, output_lengths(outputs), seconds, [output.metrics.ttft for output in outputs])
