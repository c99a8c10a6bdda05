"""vLLM's CPU build. --option eager, or compiled (its default)."""

from common import arguments, output_lengths, read_mix, report, serve

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
    outputs, seconds = serve(llm, SamplingParams, requests)
    metrics = [output.metrics for output in outputs]
    ttft = [m.first_token_latency for m in metrics] if all(metrics) else None
    report(requests, output_lengths(outputs), seconds, ttft)
