"""A tiny Llama answers greedily through both backends; the token ids must be equal.

In float32, where the two differ by rounding only: a random model's best token is ahead of the next by far
more.
"""

from dataclasses import replace

import torch

from benchmarks.gpu.part import Part
from minipaged.attention import AttentionBackend, get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache.storage import KVStorage
from minipaged.memory import KVSpec, blocks_for
from minipaged.model.llama import LlamaModel
from minipaged.model.tiny import TINY, random_llama

PROMPT_LENS, BLOCK_SIZE = (5, 16, 33, 100), 8
NEW_TOKENS, TINY_NEW_TOKENS = 32, 3


def run(part: Part) -> None:
    """Compare the answers; one entry under "checks"."""
    config = replace(TINY, head_size=16, num_query_heads=6)
    model = random_llama(config, seed=int(torch.randint(1000, ())), device=part.device)
    lengths = PROMPT_LENS[:2] if part.dry_run else PROMPT_LENS
    prompts = [torch.randint(config.vocab_size, (length,)).tolist() for length in lengths]
    count = TINY_NEW_TOKENS if part.dry_run else NEW_TOKENS
    answers = [
        generate(model, get_backend(name, part.device), prompts, count) for name in ("torch", "triton")
    ]
    differing = sum(
        a != b for ours, theirs in zip(*answers, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    part.add(
        "checks", kernel="end to end", query="float32", kv="float32", passed=differing == 0, error=differing
    )


def generate(
    model: LlamaModel, backend: AttentionBackend, prompts: list[list[int]], num_new_tokens: int
) -> list[list[int]]:
    """Greedy continuations of all prompts as one batch: one prefill step, then one token a step."""
    config, device = model.config, model.device
    counts = [blocks_for(len(prompt) + num_new_tokens, BLOCK_SIZE) for prompt in prompts]
    tables = [part.tolist() for part in torch.arange(sum(counts)).flip(0).split(counts)]
    storage = KVStorage(KVSpec.from_model(config, model.dtype), sum(counts), BLOCK_SIZE, device=device)
    step = [list(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    lengths = [0] * len(prompts)
    for _ in range(num_new_tokens):
        lengths = [length + len(new) for length, new in zip(lengths, step, strict=True)]
        batch = AttentionBatch.build(tables, [len(new) for new in step], lengths, BLOCK_SIZE, device)
        token_ids = torch.tensor([token for new in step for token in new], device=device)
        hidden = model.forward(token_ids, batch, storage, backend)
        logits = model.compute_logits(hidden[batch.query_start[1:].long() - 1])  # the last row of each
        chosen = logits.argmax(-1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
        step = [[token] for token in chosen]
    return answers
