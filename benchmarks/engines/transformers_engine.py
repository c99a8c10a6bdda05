"""transformers. --option static: batches of 16 in arrival order, each as long as its longest answer;
--option continuous: its own continuous batching over a paged cache."""

import time

import torch
from common import arguments, read_mix, report

args = arguments()
torch.set_num_threads(args.threads)

from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402

BATCH = 16
requests = read_mix(args.mix)
continuous = args.option == "continuous"
model = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=getattr(torch, args.dtype),
    attn_implementation="paged|sdpa" if continuous else "sdpa",
).eval()


def serve_static(batch: list[dict]) -> list[int]:
    """Left-padded, greedy, without an end: answers are cut at the length that was asked for."""
    width = max(len(r["prompt_token_ids"]) for r in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        prompt = request["prompt_token_ids"]
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(r["max_tokens"] for r in batch)
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=longest,
        min_new_tokens=longest,
        pad_token_id=0,
    )
    return [min(out.shape[1] - width, r["max_tokens"]) for r in batch]


def serve_continuous(batch: list[dict]) -> list[int]:
    """Lengths differ, and one call takes one length: requests are queued one by one."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        for r in batch:
            manager.add_request(r["prompt_token_ids"], request_id=r["id"], max_new_tokens=r["max_tokens"])
        lengths: dict[str, int] = {}
        while len(lengths) < len(batch):
            output = manager.get_result(timeout=60)
            if output is not None and output.is_finished():
                lengths[output.request_id] = len(output.generated_tokens)
    finally:
        manager.stop(block=True)
    return [lengths[r["id"]] for r in batch]


with torch.inference_mode():
    warm = [dict(r, max_tokens=4) for r in requests[:4]]
    (serve_continuous if continuous else serve_static)(warm)
    start = time.perf_counter()
    if continuous:
        lengths = serve_continuous(requests)
    else:
        lengths = [n for i in range(0, len(requests), BATCH) for n in serve_static(requests[i : i + BATCH])]
    seconds = time.perf_counter() - start
report(requests, lengths, seconds, None)
