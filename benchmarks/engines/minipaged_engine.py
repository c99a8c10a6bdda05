"""minipaged. --option torch: without the compiled decode kernel."""

import time

import torch
from common import arguments, read_mix, report

args = arguments()
torch.set_num_threads(args.threads)

from minipaged import LLM, SamplingParams  # noqa: E402
from minipaged.attention import cpu_kernel  # noqa: E402

if args.option == "torch":
    cpu_kernel.load = lambda: None
requests = read_mix(args.mix)
llm = LLM(
    str(args.model), dtype=args.dtype, kv_memory="512MiB", max_model_len=2048, max_num_seqs=64,
    enable_prefix_caching=False,
)  # fmt: skip
warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
llm.generate([{"prompt_token_ids": r["prompt_token_ids"]} for r in requests[:4]], warm, use_tqdm=False)

prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in requests]
params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
start = time.perf_counter()
outputs = llm.generate(prompts, params, use_tqdm=False)
seconds = time.perf_counter() - start
lengths = [len(output.outputs[0].token_ids) for output in outputs]
report(requests, lengths, seconds, [output.metrics.ttft for output in outputs])
