"""Reading a Llama from a Hugging Face folder: shape and tokenizer from JSON, weights from safetensors.

Never pickle: a `.bin` file runs the code it contains when it is opened.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from safetensors import safe_open
from torch import Tensor

from minipaged.checkpoints.files import MOST_TOKENIZER, is_there, read_json, read_optional_json, read_text
from minipaged.checkpoints.hf_config import config_from_hf
from minipaged.config import ModelConfig, token_ids
from minipaged.model.errors import ModelLoadError, naming
from minipaged.model.tokenizer import Tokenizer
from minipaged.model.weights import StoredTensor, refuse_names

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# A shard lies in the model's folder: its name may not lead elsewhere.
SHARD_NAME = re.compile(r"[\w.\-]+\.safetensors")
# Tensors that older checkpoints hold and everybody computes anew: the rotary tables.
DERIVED = re.compile(r"(^|\.)rotary_emb\.(original_)?(inv_freq|cos_cached|sin_cached)$")
# Names of special tokens in tokenizer_config.json, as transformers has them.
TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_config(folder: Path) -> ModelConfig:
    """The model's shape, with the end-of-sequence ids of both `config.json` and `generation_config.json`."""
    path = folder / CONFIG
    if not is_there(path):
        raise ModelLoadError(f"{folder}: no {CONFIG}, so it is not a model folder")
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
    if is_there(folder / SINGLE):
        return _open_shard(folder / SINGLE)
    if not is_there(folder / INDEX):
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
            if not DERIVED.search(name):
                shards.setdefault(shard, set()).add(name)
    return shards


def _open_shard(path: Path) -> dict[str, StoredTensor]:
    is_there(path)  # what is no plain file is refused here, what is missing below
    with naming(path):
        file = safe_open(path, framework="pt")
        stored = {}
        for name in file.keys():  # noqa: SIM118  (not a dict)
            if DERIVED.search(name):
                continue
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
    """The folder's tokenizer, None if it has no `tokenizer.json`.

    What stands beside it counts as it does for transformers: tokens that only `tokenizer_config.json`,
    `added_tokens.json` or `special_tokens_map.json` know.
    """
    path = folder / "tokenizer.json"
    if not is_there(path):
        return None
    text = read_text(path, MOST_TOKENIZER)
    with naming(path):
        backend = tokenizers.Tokenizer.from_str(text)
    path = folder / "tokenizer_config.json"
    settings = read_optional_json(path)
    if "added_tokens_decoder" not in settings:  # older folders keep a part of it in two files more
        settings = settings | read_optional_json(folder / "special_tokens_map.json")
        more = folder / "added_tokens.json"
        with naming(more):
            settings["added_tokens_decoder"] = {id: text for text, id in read_optional_json(more).items()}
    named = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
    template_tokens = {name: text for name, text in named.items() if text is not None}
    with naming(path):
        eos_token = template_tokens.get("eos_token")
        _add_tokens(backend, settings)
        eos = _ids_of(backend, eos_token)
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        template_tokens=template_tokens,
        chat_template=_find_template(folder, settings),
    )


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens that `settings` know, in transformers' order: those with an id, then the named ones."""
    known = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
    decoder = settings["added_tokens_decoder"]
    if not isinstance(decoder, Mapping):
        raise ValueError(f"added_tokens_decoder is {decoder!r}, an object is needed")
    special = {_token_text(settings.get(name)) for name in NAMED_TOKENS}
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    more = list(more.values() if isinstance(more, Mapping) else more)
    special |= {_token_text(value) for value in more}
    stated = {int(id): _added_token(value, special) for id, value in decoder.items()}
    tokens = {token.content: token for _, token in sorted(stated.items()) if token.content not in known}
    for value in (*(settings.get(name) for name in NAMED_TOKENS), *more):
        text = _token_text(value)
        if text is not None and text not in known and text not in tokens:
            if value is settings.get("eos_token") and backend.token_to_id(text) is None:
                raise ValueError(f"eos_token {text!r} is not in the vocabulary")
            tokens[text] = _added_token(value, special)
    backend.add_tokens(list(tokens.values()))
    for id, token in stated.items():
        if backend.token_to_id(token.content) != id:
            raise ValueError(
                f"token {token.content!r} is said to have id {id}, with tokenizer.json it has "
                f"{backend.token_to_id(token.content)}"
            )


def _added_token(value: Any, special: Collection[str | None]) -> tokenizers.AddedToken:
    """A token as a string, or as an object that says how it is found in a text."""
    fields = dict(value) if isinstance(value, Mapping) else {"content": value}
    is_special = fields.get("special", fields.get("content") in special)
    options = {name: fields[name] for name in TOKEN_OPTIONS if name in fields}
    options.setdefault("normalized", not is_special)
    return tokenizers.AddedToken(fields["content"], special=is_special, **options)


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


def _find_template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The chat template: `chat_template.jinja` before `tokenizer_config.json`. Whoever uses it checks it."""
    path = folder / "chat_template.jinja"
    if is_there(path):
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; the one for plain chat is "default"
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template
