"""vLLM's CPU build. --option eager, or compiled (its default)."""

from common import Served, arguments, generate, run

if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    args = arguments()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        kv_cache_memory_bytes=args.kv_bytes,
        max_model_len=args.max_len,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=args.option == "eager",
        disable_log_stats=False,
    )

    def serve(requests: list[dict]) -> list[Served]:
        served = []
        for output in generate(llm, SamplingParams, requests):
            metrics = output.metrics
            decode_time = metrics.last_token_ts - metrics.first_token_ts
            served.append(Served(len(output.outputs[0].token_ids), metrics.first_token_latency, decode_time))
        return served

    run(serve)
