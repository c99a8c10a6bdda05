"""Reading a model from a GGUF file: its shape from the metadata, its weights dequantised to float32.

GGUF is llama.cpp's format (specification: ggml/docs/gguf.md). Two of its habits matter here. It lists a
tensor's dimensions fastest first, so that our (out, in) reads (in, out) there. And its Llama converter
reorders the rows of every query and key head for an interleaved rotary embedding; we turn them back.
"""

from __future__ import annotations

import re
import reprlib
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from minipaged.checkpoints.gguf_header import GGUFHeader, TensorInfo
from minipaged.config import ModelConfig, RopeScaling
from minipaged.model.families import FAMILIES, GGUF_FAMILIES
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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata under the architecture's name that we read. Any other may change the computation, so it is refused.
READ_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
    # Says how the weights were made, not what is computed with them.
    "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length",
}  # fmt: skip
# Keys that are accepted with the values that change nothing. (A rope factor of 0 is llama.cpp's "none".)
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none", "linear"),  # linear by a factor that is neutral
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0, 1),
}
# Tensors that llama.cpp skips: they can be computed, and are.
DERIVED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
TOKENIZER = "tokenizer.ggml"
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# What ends an answer, whatever the keys say: the list of llama.cpp (src/llama-vocab.cpp, special_eog_ids).
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
    # what pads, and what parts files and repositories
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
# A GGUF holds Llama 3's stretched frequencies as a tensor of divisors, not as the four numbers that they are
# computed from.
ROPE_DIVISORS = "rope_freqs.weight"
LLAMA3_ORIGINAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFFile:
    """An opened GGUF file. ValueError for what is damaged or not supported; nothing big is read yet."""

    def __init__(self, path: Path) -> None:
        self.header = GGUFHeader(path)
        self.architecture = self.value("general.architecture")
        if self.architecture not in GGUF_FAMILIES:
            supported = ", ".join(map(repr, GGUF_FAMILIES))
            raise ValueError(f"architecture is {self.architecture!r}, supported are {supported}")
        self.family = FAMILIES[self.architecture]
        if self.value("general.type", "model") != "model":
            raise ValueError(f"general.type is {self.value('general.type')!r}, supported is 'model'")
        if self.value("split.count", 0) > 1:
            raise ValueError(f"the model is split over {self.value('split.count')} files, supported is 1")
        self.tensors = self.header.tensors

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata stored under `key`: a number, a string, a bool or a list of these."""
        if key not in self.header.fields:
            return default
        stored = self.header.fields[key]
        try:
            if isinstance(stored, bytes):
                return stored.decode()
            if isinstance(stored, list):
                return [item.decode() for item in stored]
        except UnicodeDecodeError as error:
            raise ValueError(f"metadata {key} is not UTF-8: byte 0x{error.object[error.start]:02x}") from None
        return stored.tolist() if isinstance(stored, np.ndarray) else stored

    def config(self) -> ModelConfig:
        self._refuse_unknown_metadata()
        heads = self._needed("attention.head_count")
        hidden_size = self._needed("embedding_length")
        head_size = self._own("attention.key_length")
        if head_size is None:
            if not isinstance(heads, int) or heads < 1 or hidden_size % heads:
                raise ValueError(f"attention.head_count is {heads!r}, embedding_length {hidden_size}")
            head_size = hidden_size // heads
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._own(key, head_size) != head_size:
                raise ValueError(f"{self.architecture}.{key} is {self._own(key)}, supported is {head_size}")
        rope_theta = self._own("rope.freq_base", 10000.0)
        return ModelConfig(
            vocab_size=self._own("vocab_size", self._embedding_rows()),
            hidden_size=hidden_size,
            intermediate_size=self._needed("feed_forward_length"),
            num_layers=self._needed("block_count"),
            num_query_heads=heads,
            num_kv_heads=self._own("attention.head_count_kv", heads),
            head_size=head_size,
            max_position_embeddings=self._needed("context_length"),
            rms_norm_eps=self._needed("attention.layer_norm_rms_epsilon"),
            rope_theta=rope_theta,
            rope_scaling=self._rope_scaling(head_size, rope_theta),
            tie_word_embeddings="output.weight" not in self.tensors,
            attention_bias=self.family.attention_bias or "blk.0.attn_q.bias" in self.tensors,
            qk_norm=self.family.qk_norm,
            eos_token_ids=self.eos_token_ids(),
            bos_token_id=self.value("tokenizer.ggml.bos_token_id"),
        )

    @cached_property
    def tokens(self) -> list[str]:
        """The texts of the vocabulary by id; an empty one is named as llama.cpp names it."""
        tokens = self.value(f"{TOKENIZER}.tokens", [])
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"{TOKENIZER}.tokens is no list of strings")
        return [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: those the file names, and those that llama.cpp knows by their text.

        A key names one token, often the end of a document; the end of a turn is only in the vocabulary.
        """
        named = (self.value(f"{TOKENIZER}.{kind}_token_id") for kind in END_KEYS)
        ids = [id for id in named if id is not None]
        texts = set(self.tokens)
        ends = set(END_TEXTS)
        if texts >= {"<|return|>", "<|call|>"} or texts >= {"<|calls|>", "<|flush|>"}:
            ends.discard("<|end|>")  # there it ends one part of an answer
        if "<|tool_response>" in texts:
            ends.discard("</s>")
        return tuple(dict.fromkeys([*ids, *(id for id, token in enumerate(self.tokens) if token in ends)]))

    def stored_tensors(self, config: ModelConfig) -> dict[str, StoredTensor]:
        """The file's tensors under Hugging Face's names; a name that is not a Llama's keeps its own."""
        heads = {"attn_q": config.num_query_heads, "attn_k": config.num_kv_heads}
        stored = {}
        for name, tensor in self.tensors.items():
            if name == ROPE_DIVISORS or DERIVED.fullmatch(name):
                continue  # the first is part of the config
            part = name.split(".")[2] if name.startswith("blk.") and name.count(".") == 3 else ""
            read = partial(self.dequantize, tensor)
            if self.family.permuted and part in heads:
                read = partial(self._read_unpermuted, tensor, heads[part])
            stored[hf_name(name)] = StoredTensor(tensor.shape, read)
        return stored

    def dequantize(self, tensor: TensorInfo) -> Tensor:
        """The tensor's numbers in float32, shaped (out, in); ValueError for a type that cannot be read."""
        try:
            values = gguf.dequantize(self.header.rows(tensor), tensor.kind)
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise ValueError(
                f"tensor {tensor.name} has quantisation type {kind}, which is not supported"
            ) from error
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _read_unpermuted(self, tensor: TensorInfo, num_heads: int) -> Tensor:
        return unpermute(self.dequantize(tensor), num_heads)

    def _own(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's name."""
        return self.value(f"{self.architecture}.{key}", default)

    def _needed(self, key: str) -> Any:
        value = self._own(key)
        if value is None:
            raise ValueError(f"metadata {self.architecture}.{key} is missing")
        return value

    def _embedding_rows(self) -> Any:
        tensor = self.tensors.get("token_embd.weight")
        return None if tensor is None or not tensor.shape else tensor.shape[0]

    def _refuse_unknown_metadata(self) -> None:
        for key in self.header.fields:
            group, _, name = key.partition(".")
            if group != self.architecture or name in READ_KEYS:
                continue
            if name == "attention.sliding_window" and self.value(key) >= self._needed("context_length"):
                continue  # a window that the whole context fits in
            if self.value(key) not in NEUTRAL_VALUES.get(name, ()):
                raise ValueError(f"metadata {key} = {reprlib.repr(self.value(key))} is not supported")

    def _rope_scaling(self, head_size: int, theta: float) -> RopeScaling | None:
        """The Llama 3 scaling whose divisors the file holds; ValueError if they are not Llama 3's."""
        if ROPE_DIVISORS not in self.tensors:
            return None
        divisors = self.dequantize(self.tensors[ROPE_DIVISORS])
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
        case ["blk", index, part, "weight" | "bias" as kind] if part in LAYER_NAMES:
            return f"model.layers.{index}.{LAYER_NAMES[part]}.{kind}"
    return name


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Bring interleaved rotary rows (0, D/2, 1, D/2+1, ... of each head) back to 0, 1, ..., D-1.

    rows: a weight [heads * D, in] or a bias [heads * D].
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])  # [heads, D / 2, 2, in]
    return pairs.transpose(1, 2).reshape(rows.shape)
