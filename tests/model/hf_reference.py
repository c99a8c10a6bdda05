"""The reference for the model: transformers, reading the same GGUF file. Loaded once per test process."""

from functools import cache
from typing import Any
from unittest import mock

import gguf
import torch

from minipaged.checkpoints.loading import LoadedModel, find_model, load_model
from minipaged.model.errors import ModelLoadError

NAME = "smollm2-135m"


def model_is_installed() -> bool:
    try:
        find_model(NAME)
    except ModelLoadError:
        return False
    return True


@cache
def smollm2() -> LoadedModel:
    """Our SmolLM2-135M in float32 on the CPU. Shared: do not change it."""
    return load_model(NAME, dtype=torch.float32, device="cpu")


@cache
def hf_smollm2() -> Any:
    """transformers' LlamaForCausalLM from the same file, in float32.

    transformers opens the file twice and builds one table of names 400 times over; both are remembered here,
    which saves ten seconds and changes nothing that is read.
    """
    from transformers import LlamaForCausalLM

    path = find_model(NAME)
    with (
        mock.patch("gguf.GGUFReader", cache(gguf.GGUFReader)),
        mock.patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@cache
def hf_tokenizer() -> Any:
    """transformers' tokenizer from the same file."""
    from transformers import AutoTokenizer

    path = find_model(NAME)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def hf_logits(token_ids: list[int]) -> torch.Tensor:
    """Reference logits after each token: float32 [len(token_ids), vocab_size]."""
    with torch.inference_mode():
        return hf_smollm2()(torch.tensor([token_ids])).logits[0].float()


def hf_greedy(token_ids: list[int], max_tokens: int, eos_token_ids: tuple[int, ...] = ()) -> list[int]:
    """The reference's greedy continuation, up to and with the first end-of-sequence token."""
    with torch.inference_mode():
        output = hf_smollm2().generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
        )
    return output[0, len(token_ids) :].tolist()
