"""Reading a Llama from a Hugging Face folder: shape and tokenizer from JSON, weights from safetensors.

Never pickle: a `.bin` file runs the code it contains when it is opened.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from safetensors import safe_open
from torch import Tensor

from minipaged.config import ModelConfig, token_ids
from minipaged.model.errors import ModelLoadError, naming
from minipaged.model.hf_config import config_from_hf
from minipaged.model.tokenizer import Tokenizer
from minipaged.model.weights import StoredTensor, refuse_names

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# A shard lies in the model's folder: its name may not lead elsewhere.
SHARD_NAME = re.compile(r"[\w.\-]+\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ModelLoadError that names the file."""
    with naming(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"holds {type(content).__name__}, a JSON object is needed")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read_config(folder: Path) -> ModelConfig:
    """The model's shape, with the end-of-sequence ids of both `config.json` and `generation_config.json`."""
    path = folder / CONFIG
    if not path.exists():
        raise ModelLoadError(f"{folder}: no {CONFIG}, so this is no model folder")
    fields = read_json(path)
    with naming(path):
        config = config_from_hf(fields)
    path = folder / "generation_config.json"
    more = token_ids(read_optional_json(path).get("eos_token_id"))
    with naming(path):
        return with_eos_tokens(config, more)


def with_eos_tokens(config: ModelConfig, more: tuple[int, ...]) -> ModelConfig:
    """`config` with further end-of-sequence ids, each once."""
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def read_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors, unread; ModelLoadError names the file at fault."""
    if (folder / SINGLE).exists():
        return _open_shard(folder / SINGLE)
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickles:
            raise ModelLoadError(
                f"{folder}: weights only as pickle ({pickles[0]}); convert them to safetensors"
            )
        raise ModelLoadError(f"{folder}: no {SINGLE} and no {INDEX}")
    stored: dict[str, StoredTensor] = {}
    for shard, names in _read_index(folder / INDEX).items():
        tensors = _open_shard(folder / shard)
        with naming(folder / shard):
            refuse_names("missing", sorted(names - tensors.keys()))
            refuse_names("unexpected", sorted(tensors.keys() - names))
        stored |= tensors
    return stored


def _read_index(path: Path) -> dict[str, set[str]]:
    """Shard file name -> the names of the tensors it must hold."""
    shards: dict[str, set[str]] = {}
    with naming(path):
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("weight_map is missing or not an object")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
                raise ValueError(
                    f"tensor {name} is said to be in {shard!r}, not a safetensors file of this folder"
                )
            shards.setdefault(shard, set()).add(name)
    return shards


def _open_shard(path: Path) -> dict[str, StoredTensor]:
    with naming(path):
        file = safe_open(path, framework="pt")
        stored = {}
        for name in file.keys():  # noqa: SIM118  (not a dict)
            view = file.get_slice(name)
            if view.get_dtype() not in FLOAT_DTYPES:
                raise ValueError(
                    f"tensor {name} is {view.get_dtype()}, supported are {', '.join(FLOAT_DTYPES)}"
                )
            stored[name] = StoredTensor(tuple(view.get_shape()), partial(_read, file, name))
    return stored


def _read(file: Any, name: str) -> Tensor:
    return file.get_tensor(name)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it has no `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    with naming(path):
        backend = tokenizers.Tokenizer.from_file(str(path))
    path = folder / "tokenizer_config.json"
    settings = read_optional_json(path)
    named = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
    template_tokens = {name: text for name, text in named.items() if text is not None}
    template, template_path = _find_template(folder, settings)
    with naming(path):
        eos = _ids_of(backend, template_tokens.get("eos_token"))
    with naming(template_path):
        return Tokenizer(backend, eos_token_ids=eos, template_tokens=template_tokens, chat_template=template)


def _token_text(value: Any) -> str | None:
    """A special token in `tokenizer_config.json` is a string, or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids_of(backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    if eos_token is None:
        return ()
    id = backend.token_to_id(eos_token)
    if id is None:
        raise ValueError(f"eos_token {eos_token!r} is not in the vocabulary")
    return (id,)


def _find_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, Path]:
    """The chat template and the file it is from: `chat_template.jinja` before `tokenizer_config.json`."""
    path = folder / "chat_template.jinja"
    if path.exists():
        with naming(path):
            return path.read_text(encoding="utf-8"), path
    path = folder / "tokenizer_config.json"
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; the one for plain chat is "default"
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(
            f"{path}: chat_template is of type {type(template).__name__}, a string is needed"
        )
    return template, path
