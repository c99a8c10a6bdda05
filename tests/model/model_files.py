"""Small model files as other tools write them, and a plain way to run a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from minipaged.attention import AttentionBackend, get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache.storage import KVStorage
from minipaged.checkpoints.gguf_file import LAYER_NAMES, NAMES
from minipaged.config import ModelConfig
from minipaged.memory import KVSpec
from minipaged.model.llama import LlamaModel
from minipaged.model.weights import weight_slots

Q8_0 = gguf.GGMLQuantizationType.Q8_0
F32 = gguf.GGMLQuantizationType.F32


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of this model, in the form most files on the hub have."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **vars(scaling)},
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "torch_dtype": "float32",
    }


def named_weights(model: LlamaModel) -> dict[str, torch.Tensor]:
    return {name: slot.clone() for name, slot in weight_slots(model).items()}


def save_folder(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """Write a Hugging Face folder; with `shards` > 1 the weights go into as many files, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's converter: rows of a head in the order 0, D/2, 1, D/2 + 1, ..."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def save_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    kind: gguf.GGMLQuantizationType = F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF as llama.cpp's converter does: matrices in `kind`, norms in F32, q and k permuted."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (metadata or {}).items():
        add_metadata(writer, key, value)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if "q_proj" in name:
            values = permute(values, config.num_query_heads)
        if "k_proj" in name:
            values = permute(values, config.num_kv_heads)
        stored = kind if values.ndim == 2 else F32
        writer.add_tensor(gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def gguf_name(name: str) -> str:
    ours = {hf: ours for ours, hf in NAMES.items()} | {
        f"model.layers.{index}.{hf}.weight": f"blk.{index}.{ours}.weight"
        for ours, hf in LAYER_NAMES.items()
        for index in range(4)
    }
    return ours[name]


def logits_of(
    model: LlamaModel,
    token_ids: Sequence[int],
    steps: Sequence[int] | None = None,
    block_size: int = 16,
    backend: AttentionBackend | None = None,
) -> torch.Tensor:
    """Logits after each token, float32 [T, vocab], computed in steps of the given lengths (default: one).

    backend: by default plain torch.
    """
    num_blocks = -(-len(token_ids) // block_size)
    storage = KVStorage(KVSpec.from_model(model.config, model.dtype), num_blocks, block_size)
    blocks = list(range(num_blocks))[::-1]  # not in order, so that an ignored table shows
    backend = backend or get_backend("torch")
    start, rows = 0, []
    for length in steps or [len(token_ids)]:
        batch = AttentionBatch.build([blocks], [length], [start + length], block_size)
        ids = torch.tensor(token_ids[start : start + length])
        rows.append(model.compute_logits(model(ids, batch, storage, backend)))
        start += length
    return torch.cat(rows)
