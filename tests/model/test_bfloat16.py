"""SmolLM2 as a CPU serves it, in bfloat16 with packed weights and compiled kernels, beside float32."""

from functools import cache

import pytest
import torch
from checkout import ROOT

from minipaged.attention import get_backend
from minipaged.checkpoints.loading import load_model
from minipaged.cpu.accelerate import accelerate
from tests.model.hf_reference import NAME, model_is_installed, smollm2
from tests.model.model_files import logits_of

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not model_is_installed(), reason="needs the SmolLM2 file: make setup"),
]
TOKENS, PROMPT = 400, 300
STEPS = [PROMPT] + [1] * (TOKENS - PROMPT)  # a prompt, then one token at a time, as when generating


@cache
def token_ids() -> list[int]:
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode((ROOT / "LICENSE").read_text())[:TOKENS]
    assert len(ids) == TOKENS
    return ids


@cache
def logits(dtype: torch.dtype) -> torch.Tensor:
    """[TOKENS, vocab_size]; float32 in plain torch, bfloat16 as `LLM` runs it."""
    if dtype == torch.float32:
        return logits_of(smollm2().model, token_ids(), STEPS)
    loaded, backend = accelerate(load_model(NAME, dtype=dtype), get_backend("auto", "cpu"))
    return logits_of(loaded.model, token_ids(), STEPS, backend=backend)


def perplexity(scores: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(scores[:-1], torch.tensor(token_ids()[1:])).exp().item()


def test_perplexity_is_within_a_percent_of_float32() -> None:
    ours, exact = perplexity(logits(torch.bfloat16)), perplexity(logits(torch.float32))
    assert abs(ours / exact - 1) < 0.01


def test_logits_are_within_tolerance_of_float32() -> None:
    """Relative, each row less its mean, which no probability depends on; measured here: 0.017 and 0.06."""
    ours, exact = (x - x.mean(-1, keepdim=True) for x in map(logits, (torch.bfloat16, torch.float32)))
    errors = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors.median() < 0.03
    assert errors.max() < 0.12


def test_where_float32_is_sure_of_a_token_bfloat16_chooses_it_too() -> None:
    ours, exact = logits(torch.bfloat16), logits(torch.float32)
    best, second = exact.topk(2).values.T
    sure = best - second > 0.5
    assert sure.sum() > TOKENS / 2
    assert torch.equal(ours.argmax(-1)[sure], exact.argmax(-1)[sure])
