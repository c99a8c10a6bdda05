"""The packaged model equals transformers reading the same GGUF file, weight by weight and logit by logit."""

import pytest
import torch

from minipaged.model.weights import weight_slots
from tests.model.hf_reference import hf_greedy, hf_logits, hf_smollm2, model_is_installed, smollm2
from tests.model.model_files import logits_of

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not model_is_installed(), reason="needs the SmolLM2 file: make setup"),
]


def test_config_is_that_of_smollm2_135m() -> None:
    config = smollm2().config
    assert (config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_size) == (
        30,
        9,
        3,
        64,
    )
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert config.rope_theta == 100000
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 8192
    assert config.eos_token_ids == (2, 0, 4)  # <|im_end|> by its key, the others by their text


def test_weights_equal_those_transformers_reads() -> None:
    theirs = hf_smollm2().state_dict()
    slots = weight_slots(smollm2().model)
    assert theirs.keys() - {"lm_head.weight"} == slots.keys()
    for name, slot in slots.items():
        assert torch.equal(slot, theirs[name]), name


def test_logits_equal_transformers_from_first_token_to_position_500() -> None:
    """Prefill in two chunks, then decode: each row is within 1e-3 of transformers' one pass over the text."""
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    question = [{"role": "user", "content": "Tell me how the tides work, and why there are two a day. " * 40}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(question))[:520]
    assert len(ids) == 520
    logits = logits_of(smollm2().model, ids, steps=[200, 310, *[1] * 10])
    expected = hf_logits(ids)
    assert (logits - expected).abs().max() <= 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_greedy_reference_speaks_sense() -> None:
    """The reference itself, which the engine is held to, answers a question."""
    tokenizer = smollm2().tokenizer
    assert tokenizer is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(question))
    answer = hf_greedy(ids, 16, smollm2().config.eos_token_ids)
    assert answer[-1] == 2
    assert tokenizer.decode(answer) == "The capital of France is Paris."
