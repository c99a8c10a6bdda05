"""transformers. --option static: batches of 16 in arrival order, each as long as its longest answer;
--option continuous: its own continuous batching over a paged cache."""

import time

import torch
from common import Served, arguments, run

args = arguments()
torch.set_num_threads(args.threads)

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

BATCH = 16
PAGE_SIZE = 256  # tokens, its default
# Tokens of a step. By default 8192: it then builds and fills a mask of so many rows over the whole cache. Of
# 128, 512 and 2048 this was the fastest.
MAX_BATCH_TOKENS = 512


class Static:
    """Left-padded batches, greedy, without an end: answers are cut at the length that was asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def serve(self, requests: list[dict]) -> list[Served]:
        start = time.perf_counter()
        batches = [requests[i : i + BATCH] for i in range(0, len(requests), BATCH)]
        return [served for batch in batches for served in self._serve_batch(batch, start)]

    def _serve_batch(self, batch: list[dict], start: float) -> list[Served]:
        width = max(len(r["prompt_token_ids"]) for r in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            prompt = request["prompt_token_ids"]
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(r["max_tokens"] for r in batch)
        times: list[float] = []  # of each step
        self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
            stopping_criteria=[lambda ids, scores: self._note(times, ids)],
        )
        counts = [min(len(times), r["max_tokens"]) for r in batch]
        return [Served(count, times[0] - start, times[count - 1] - times[0]) for count in counts]

    @staticmethod
    def _note(times: list[float], ids: torch.Tensor) -> torch.Tensor:
        """Called after each step: stops nothing, keeps the time."""
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


class Continuous:
    """One manager for all mixes: making it allocates and fills the cache and the mask."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        token_bytes = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                # Without it the cache takes nine tenths of the machine's memory and is filled with zeros.
                num_blocks=args.kv_bytes // (token_bytes * config.num_hidden_layers * PAGE_SIZE),
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_requests_per_batch=64,
                allow_block_sharing=False,
            ),
        )
        self.manager.start()

    def serve(self, requests: list[dict]) -> list[Served]:
        """Lengths differ, and one call takes one length: requests are queued one by one."""
        start = time.perf_counter()
        for r in requests:
            self.manager.add_request(
                r["prompt_token_ids"],
                request_id=r["id"],
                max_new_tokens=r["max_tokens"],
                record_timestamps=True,
            )
        found: dict[str, Served] = {}
        while len(found) < len(requests):
            output = self.manager.get_result(timeout=10)
            if output is None and self.manager.is_running():
                continue
            if output is None or output.error:
                raise RuntimeError(f"request failed: {output.error if output else 'the manager has ended'}")
            times = output.timestamps
            found[output.request_id] = Served(
                len(output.generated_tokens), times[0] - start, times[-1] - times[0]
            )
        return [found[r["id"]] for r in requests]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()
    with torch.inference_mode():
        if args.option == "static":
            run(Static(model).serve)
            return
        engine = Continuous(model)
        try:
            run(engine.serve)
        finally:
            engine.manager.stop(block=True, hard_stop=True)


if __name__ == "__main__":
    main()
