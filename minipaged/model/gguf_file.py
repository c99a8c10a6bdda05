"""Reading a Llama from a GGUF file: its shape from the metadata, its weights dequantised to float32.

GGUF is llama.cpp's format (specification: ggml/docs/gguf.md). Two of its habits matter here. It lists a
tensor's dimensions fastest first, so that our (out, in) reads (in, out) there. And its Llama converter
reorders the rows of every query and key head for an interleaved rotary embedding; we turn them back.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from minipaged.config import ModelConfig, RopeScaling
from minipaged.model.llama import rotary_frequencies, stretch_frequencies
from minipaged.model.weights import StoredTensor

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata under "llama." that we read. Any other key may change the computation, so it is refused.
READ_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
}  # fmt: skip
# Keys that are accepted with one value only: the one that changes nothing.
NEUTRAL_VALUES = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0}
# A GGUF holds Llama 3's stretched frequencies as a tensor of divisors, not as the four numbers behind it.
ROPE_DIVISORS = "rope_freqs.weight"
LLAMA3_ORIGINAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class CheckedReader(gguf.GGUFReader):
    """The library's reader, made to raise where a damaged file would have it read past the end.

    It also reads from a plain array, not from a memory map that wraps every slice: three times faster for
    the hundred thousand strings of a vocabulary.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if self.byte_order != "I":
            raise ValueError("the file is big-endian, supported is little-endian")
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > self.data.nbytes:
            raise ValueError(f"truncated: data up to byte {end} is missing, the file has {self.data.nbytes}")
        return np.frombuffer(self.data, dtype, int(count), offset)

    def _get_tensor_info_field(self, orig_offs: int) -> gguf.ReaderField:
        field = super()._get_tensor_info_field(orig_offs)
        type_id = int(field.parts[4][0])
        if type_id not in {kind.value for kind in gguf.GGMLQuantizationType}:
            raise ValueError(f"tensor {field.name} has unknown quantisation type {type_id}")
        return field


class GGUFFile:
    """An opened GGUF file. ValueError for what is damaged or not supported; nothing big is read yet."""

    def __init__(self, path: Path) -> None:
        self.reader = CheckedReader(path)
        if self.value("general.architecture") != "llama":
            raise ValueError(f"architecture is {self.value('general.architecture')!r}, supported is 'llama'")
        if self.value("general.type", "model") != "model":
            raise ValueError(f"general.type is {self.value('general.type')!r}, supported is 'model'")
        if self.value("split.count", 0) > 1:
            raise ValueError(f"the model is split over {self.value('split.count')} files, supported is 1")
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata stored under `key`: a number, a string, a bool or a list of these."""
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> ModelConfig:
        self._refuse_unknown_metadata()
        heads = self._needed("attention.head_count")
        hidden_size = self._needed("embedding_length")
        head_size = self.value("llama.attention.key_length")
        if head_size is None:
            if not isinstance(heads, int) or heads < 1 or hidden_size % heads:
                raise ValueError(f"llama.attention.head_count is {heads!r}, embedding_length {hidden_size}")
            head_size = hidden_size // heads
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.value(f"llama.{key}", head_size) != head_size:
                raise ValueError(f"llama.{key} is {self.value(f'llama.{key}')}, supported is {head_size}")
        rope_theta = self.value("llama.rope.freq_base", 10000.0)
        return ModelConfig(
            vocab_size=self.value("llama.vocab_size", self._embedding_rows()),
            hidden_size=hidden_size,
            intermediate_size=self._needed("feed_forward_length"),
            num_layers=self._needed("block_count"),
            num_query_heads=heads,
            num_kv_heads=self.value("llama.attention.head_count_kv", heads),
            head_size=head_size,
            max_position_embeddings=self._needed("context_length"),
            rms_norm_eps=self._needed("attention.layer_norm_rms_epsilon"),
            rope_theta=rope_theta,
            rope_scaling=self._rope_scaling(head_size, rope_theta),
            tie_word_embeddings="output.weight" not in self.tensors,
            eos_token_ids=self.eos_token_ids(),
            bos_token_id=self.value("tokenizer.ggml.bos_token_id"),
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: end of sequence, end of turn, end of message."""
        ids = (self.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def stored_tensors(self, config: ModelConfig) -> dict[str, StoredTensor]:
        """The file's tensors under Hugging Face's names; a name that is not a Llama's keeps its own."""
        heads = {"attn_q": config.num_query_heads, "attn_k": config.num_kv_heads}
        stored = {}
        for name, tensor in self.tensors.items():
            if name == ROPE_DIVISORS:
                continue  # part of the config
            part = name.split(".")[2] if name.startswith("blk.") and name.count(".") == 3 else ""
            shape = tuple(int(size) for size in reversed(tensor.shape))
            read = partial(dequantize, tensor)
            if part in heads:
                read = partial(_read_unpermuted, tensor, heads[part])
            stored[hf_name(name)] = StoredTensor(shape, read)
        return stored

    def _needed(self, key: str) -> Any:
        value = self.value(f"llama.{key}")
        if value is None:
            raise ValueError(f"metadata llama.{key} is missing")
        return value

    def _embedding_rows(self) -> Any:
        tensor = self.tensors.get("token_embd.weight")
        return None if tensor is None else int(tensor.shape[-1])

    def _refuse_unknown_metadata(self) -> None:
        for key in self.reader.fields:
            group, _, name = key.partition(".")
            if group != "llama" or name in READ_KEYS:
                continue
            if name not in NEUTRAL_VALUES or self.value(key) != NEUTRAL_VALUES[name]:
                raise ValueError(f"metadata {key} = {self.value(key)!r} is not supported")

    def _rope_scaling(self, head_size: int, theta: float) -> RopeScaling | None:
        """The Llama 3 scaling whose divisors the file holds; ValueError if they are not Llama 3's."""
        if ROPE_DIVISORS not in self.tensors:
            return None
        divisors = dequantize(self.tensors[ROPE_DIVISORS])
        scaling = RopeScaling(factor=float(divisors.max()), **LLAMA3_ORIGINAL)  # type: ignore[arg-type]
        plain = rotary_frequencies(head_size, theta, None)
        expected = plain / stretch_frequencies(plain, scaling)
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
            raise ValueError(f"tensor {ROPE_DIVISORS} does not hold Llama 3's rope scaling")
        return scaling


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    if name in NAMES:
        return NAMES[name]
    match name.split("."):
        case ["blk", index, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{index}.{LAYER_NAMES[part]}.weight"
    return name


def dequantize(tensor: gguf.ReaderTensor) -> Tensor:
    """The tensor's numbers in float32, shaped (out, in); ValueError for a type the library cannot read."""
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(
            f"tensor {tensor.name} has quantisation type {kind}, which is not supported"
        ) from error
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Bring interleaved rotary rows (0, D/2, 1, D/2+1, ... of each head) back to 0, 1, ..., D-1."""
    pairs = rows.view(num_heads, -1, 2, rows.shape[1])  # [heads, D / 2, 2, in]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read_unpermuted(tensor: gguf.ReaderTensor, num_heads: int) -> Tensor:
    return unpermute(dequantize(tensor), num_heads)
