# ruff: noqa: E501, PT017
"""GGUF files changed in their structure: each is refused by name, or loaded as the gguf library reads it.

A file is taken apart into its metadata and tensors, something of it is changed as a careless or hostile tool might,
and it is put together again.
"""

import copy
import random
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minipaged.checkpoints.gguf_file import hf_name, unpermute
from minipaged.checkpoints.loading import load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from tests.checkpoints.test_gguf_vocab import gguf_vocabulary
from tests.model.model_files import gguf_name, named_weights, permute

Chance = random.Random
U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
CASES = 500


@dataclass
class Parts:
    """What a file is made of. A field: key, type, value; a tensor: name, dimensions, kind, offset, data."""

    fields: list[list[Any]]
    tensors: list[list[Any]]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    counts: list[int] = field(default_factory=lambda: [0, 0])  # added to the true ones
    tail: int = 0  # bytes cut off, or added where negative


def pack(kind: int, value: Any) -> bytes:
    if kind == STRING:
        raw = value if isinstance(value, bytes) else str(value).encode()
        return struct.pack("<Q", len(raw)) + raw
    if kind == ARRAY:
        inner, items, extra = value
        return struct.pack("<IQ", inner, len(items) + extra) + b"".join(pack(inner, item) for item in items)
    form = FORMS.get(kind, "<I")
    if form in ("<f", "<d"):
        return struct.pack(form, float(value))
    size = struct.calcsize(form)
    return (int(value) % 2 ** (8 * size)).to_bytes(size, "little")


def write(path: Path, parts: Parts) -> Path:
    counts = (len(parts.tensors) + parts.counts[0], len(parts.fields) + parts.counts[1])
    head = parts.magic + struct.pack("<I", parts.version) + b"".join(pack(10, count) for count in counts)
    for key, kind, value in parts.fields:
        head += pack(STRING, key) + struct.pack("<I", kind) + pack(kind, value)
    for name, dims, kind, offset in parts.tensors:
        head += pack(STRING, name) + struct.pack("<I", len(dims)) + b"".join(pack(10, size) for size in dims)
        head += struct.pack("<I", kind) + pack(10, offset)
    content = head + bytes(-len(head) % 32) + parts.data
    path.write_bytes(content[: len(content) - parts.tail] + bytes(max(0, -parts.tail)))
    return path


@cache
def whole() -> Parts:
    """TINY with a vocabulary; of its matrices some are Q8_0 and some F16."""
    fields: list[list[Any]] = [["general.architecture", STRING, "llama"], ["general.name", STRING, "tiny"]]
    own = {
        "block_count": TINY.num_layers,
        "context_length": TINY.max_position_embeddings,
        "embedding_length": TINY.hidden_size,
        "feed_forward_length": TINY.intermediate_size,
        "attention.head_count": TINY.num_query_heads,
        "attention.head_count_kv": TINY.num_kv_heads,
        "rope.dimension_count": TINY.head_size,
        "vocab_size": TINY.vocab_size,
    }
    fields += [[f"llama.{key}", U32, value] for key, value in own.items()]
    fields += [["llama.attention.layer_norm_rms_epsilon", F32, 1e-5], ["llama.rope.freq_base", F32, 5e4]]
    for key, value in gguf_vocabulary().items():
        if isinstance(value, list):
            kind = STRING if isinstance(value[0], str) else 5
            fields.append([key, ARRAY, [kind, value, 0]])
        else:
            fields.append([key, {bool: BOOL, int: U32, str: STRING}[type(value)], value])
    tensors, data = [], b""
    for index, (name, tensor) in enumerate(named_weights(random_llama()).items()):
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permute(values, TINY.num_query_heads if "q_proj" in name else TINY.num_kv_heads)
        kind = gguf.GGMLQuantizationType((0, 8, 1)[index % 3] if values.ndim == 2 else 0)
        raw = gguf.quantize(np.ascontiguousarray(values), kind).tobytes()
        tensors.append([gguf_name(name), list(values.shape[::-1]), int(kind), len(data)])
        data += raw + bytes(-len(raw) % 32)
    return Parts(fields, tensors, data)


NUMBERS = (0, 1, 2, 3, 5, 8, 31, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, -1)
KEYS = (
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count", "llama.attention.key_length",
    "llama.attention.sliding_window", "llama.unheard_of", "general.alignment", "split.count", "general.type",
    "general.author", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eot_token_id", "llama.attention.causal",
)  # fmt: skip


def drop_field(p: Parts, c: Chance) -> None:
    p.fields.pop(c.randrange(len(p.fields)))


def double_field(p: Parts, c: Chance) -> None:
    p.fields.insert(c.randrange(len(p.fields)), copy.deepcopy(c.choice(p.fields)))


def add_field(p: Parts, c: Chance) -> None:
    kind = c.choice((U32, F32, BOOL, STRING))
    p.fields.append([c.choice(KEYS), kind, "none" if kind == STRING else c.choice((0, 1, 2, 64, 512, 0.5))])


def rename_field(p: Parts, c: Chance) -> None:
    entry = c.choice(p.fields)
    entry[0] = c.choice((entry[0][:-1], entry[0] + "x", entry[0].upper(), "", b"\xff\xfe", entry[0] * 400))


def change_number(p: Parts, c: Chance) -> None:
    c.choice([entry for entry in p.fields if entry[1] in (U32, F32, BOOL)])[2] = c.choice(NUMBERS)


def change_type(p: Parts, c: Chance) -> None:
    entry = c.choice([entry for entry in p.fields if entry[1] in (U32, F32, BOOL)])
    entry[1] = c.choice((*FORMS, STRING, 13, 99))


def mislabel(p: Parts, c: Chance) -> None:
    """The bytes stay, the stated type is another's."""
    entry = c.choice(p.fields)
    raw = pack(entry[1], entry[2])
    entry[1], entry[2] = c.choice(((STRING, raw), (U32, 7), (ARRAY, [0, list(raw[:9]), 0])))


def change_text(p: Parts, c: Chance) -> None:
    entry = c.choice([entry for entry in p.fields if entry[1] == STRING])
    entry[2] = c.choice(("", "llama", "gpt2", "qwen2", "none", "x" * 70000, b"\xff\xfe", "{% for %}", "\0"))


def change_list(p: Parts, c: Chance) -> None:
    value = c.choice([entry for entry in p.fields if entry[1] == ARRAY])[2]
    items, place = value[1], c.randrange(len(value[1]))
    match c.randrange(7):
        case 0:
            value[1] = items[:place]
        case 1:
            items.insert(place, items[0])
        case 2:
            items[place] = b"\xff" if value[0] == STRING else c.choice(NUMBERS)
        case 3:
            items[place] = "" if value[0] == STRING else c.choice(range(8))
        case 4:
            value[2] = c.choice((-1, 1, 5, 2**20, 2**40, 2**62))  # its count is wrong
        case 5:
            c.shuffle(items)
        case 6:
            value[0] = c.choice((0, 4, 6, ARRAY, 55))
            value[1] = [0, 1, 2] if value[0] != ARRAY else [[0, [1], 0]]


def drop_tensor(p: Parts, c: Chance) -> None:
    p.tensors.pop(c.randrange(len(p.tensors)))


def double_tensor(p: Parts, c: Chance) -> None:
    p.tensors.insert(c.randrange(len(p.tensors)), list(c.choice(p.tensors)))


def rename_tensor(p: Parts, c: Chance) -> None:
    names = ("token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_rot_embd", "blk.9.attn_q.weight",
             "blk.0.attn_q.bias", "blk.-1.attn_q.weight", "", b"\xff", "blk.0.attn_sinks.weight")  # fmt: skip
    c.choice(p.tensors)[0] = c.choice(names)


def swap_names(p: Parts, c: Chance) -> None:
    """Two tensors of one shape and kind exchange names: a right file of another model."""
    a, b = c.sample(p.tensors, 2)
    a[0], b[0] = b[0], a[0]


def change_dimensions(p: Parts, c: Chance) -> None:
    dims = c.choice(p.tensors)[1]
    match c.randrange(5):
        case 0:
            dims.reverse()
        case 1:
            dims[c.randrange(len(dims))] = c.choice(NUMBERS)
        case 2:
            dims.append(c.choice((1, 2)))
        case 3:
            dims.pop()
        case 4:
            dims[:] = [dims[0] * 2, *[max(1, size // 2) for size in dims[1:]]]


def change_kind(p: Parts, c: Chance) -> None:
    c.choice(p.tensors)[2] = c.choice((*range(42), 999, 2**32 - 1))


def change_offset(p: Parts, c: Chance) -> None:
    entry = c.choice(p.tensors)
    entry[3] = c.choice(
        (0, entry[3] + 32, entry[3] - 32, entry[3] + 1, c.choice(p.tensors)[3], 2**63, 2**64 - 32)
    )


def swap_offsets(p: Parts, c: Chance) -> None:
    a, b = c.sample(p.tensors, 2)
    a[3], b[3] = b[3], a[3]


def reorder_tensors(p: Parts, c: Chance) -> None:
    c.shuffle(p.tensors)


def change_counts(p: Parts, c: Chance) -> None:
    p.counts[c.randrange(2)] += c.choice((-1, 1, 2, 1000, 2**32, 2**62))


def change_head(p: Parts, c: Chance) -> None:
    if c.random() < 0.3:
        p.magic = c.choice((b"GGUM", b"ggjt", b"\0\0\0\0"))
    else:
        p.version = c.choice((0, 1, 2, 4, 3 << 24, 2**32 - 1))


def change_tail(p: Parts, c: Chance) -> None:
    p.tail = c.choice((1, 31, 32, len(p.data) // 2, len(p.data), -1, -4096))


MUTATIONS: tuple[Callable[[Parts, Chance], None], ...] = (
    drop_field, double_field, add_field, rename_field, change_number, change_type, mislabel, change_text, change_list,
    drop_tensor, double_tensor, rename_tensor, swap_names, change_dimensions, change_kind, change_offset, swap_offsets,
    reorder_tensors, change_counts, change_head, change_tail,
)  # fmt: skip


def mutated(path: Path, seed: int) -> Path:
    chance, parts = Chance(seed), copy.deepcopy(whole())
    MUTATIONS[seed % len(MUTATIONS)](parts, chance)
    if chance.random() < 0.2:
        chance.choice(MUTATIONS)(parts, chance)
    return write(path, parts)


def require_right(path: Path) -> bool:
    """Whether it is loaded, and then with the numbers that the gguf library finds; else it is refused by name."""
    try:
        loaded = load_model(path)
    except ModelLoadError as error:
        assert str(error).startswith(f"{path}: "), error
        assert len(str(error)) > len(f"{path}: "), "it does not say what is wrong"
        return False
    reader, weights, config = gguf.GGUFReader(path), named_weights(loaded.model), loaded.config
    value = {key: found.contents() for key, found in reader.fields.items() if key.startswith("llama.")}
    assert config.num_layers == value["llama.block_count"]
    assert config.num_query_heads == value["llama.attention.head_count"]
    assert config.num_kv_heads == value.get("llama.attention.head_count_kv", config.num_query_heads)
    assert config.rms_norm_eps == value["llama.attention.layer_norm_rms_epsilon"]
    assert config.rope_theta == value.get("llama.rope.freq_base", 10000.0)
    assert config.max_position_embeddings == value["llama.context_length"]
    seen = set()
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if name not in weights:
            assert tensor.name in ("rope_freqs.weight", "blk.0.attn_rot_embd"), name
            continue
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".q_proj." in name or ".k_proj." in name:
            expected = unpermute(
                expected, config.num_query_heads if ".q_proj." in name else config.num_kv_heads
            )
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=0, equal_nan=True)
        seen.add(name)
    assert seen == weights.keys()
    return True


def test_the_file_that_is_changed_is_right_itself(tmp_path: Path) -> None:
    assert require_right(write(tmp_path / "m.gguf", whole()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numbers that are none, in a damaged file
def test_changed_file_is_refused_by_name_or_loaded_right(tmp_path: Path) -> None:
    """None costs more than 5 seconds of the processor, or 200 MB beside the file."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = set()
    for seed in range(CASES):
        path = mutated(tmp_path / f"{seed}.gguf", seed)
        start = time.process_time()
        outcomes.add(require_right(path))
        assert time.process_time() - start < 5, seed
        path.unlink()
    assert outcomes == {True, False}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
