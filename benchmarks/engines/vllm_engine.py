"""vLLM's CPU build. --option eager, or compiled (its default)."""

import time

from common import arguments, read_mix, report

if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    args = arguments()
    from vllm import LLM, SamplingParams

    requests = read_mix(args.mix)
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=args.option == "eager",
        disable_log_stats=False,
    )
    warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": r["prompt_token_ids"]} for r in requests[:4]], warm, use_tqdm=False)

    prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in requests]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    metrics = [output.metrics for output in outputs]
    ttft = [m.first_token_latency for m in metrics] if all(metrics) else None
    report(requests, lengths, seconds, ttft)
