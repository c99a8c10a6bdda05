"""What the code imports is what pyproject.toml asks for: the engine the core, course and tests an extra."""

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from checkout import ROOT, tracked_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = metadata.packages_distributions()
# Where the name of the import means several packages.
IMPORT_TO_DISTRIBUTION = {"triton": "triton", "packaging": "pytest"}


def declared(*extras: str) -> set[str]:
    rows = list(PROJECT["dependencies"])
    for extra in extras:
        rows += PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(row).name) for row in rows}


def third_party_imports(file: Path) -> set[str]:
    """Top-level modules that a file imports anywhere, less the standard library's and our own."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    beside = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("scripts/*.py")]
    own = {path.stem for path in beside} | {"minipaged", "coursekit", "tests", "benchmarks"}
    return names - set(sys.stdlib_module_names) - own


def undeclared(folder: str, *extras: str, leave_out: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Third-party imports of a folder's files that neither the core nor these extras install."""
    allowed, found = declared(*extras), {}
    for file in tracked_files():
        name = file.relative_to(ROOT).as_posix()
        if file.suffix != ".py" or not name.startswith(folder) or name.startswith(leave_out):
            continue
        for module in third_party_imports(file):
            # An extra that is not installed tells no names: its package is called like its module.
            owners = {IMPORT_TO_DISTRIBUTION.get(module, module), *DISTRIBUTIONS.get(module, [])}
            if not allowed & {canonicalize_name(owner) for owner in owners}:
                found.setdefault(name, set()).add(module)
    return found


def test_the_engine_imports_only_the_core_and_the_hub_extra():
    leave_out = ("minipaged/commands/", "minipaged/jobs/", "minipaged/live/", "minipaged/serve/")
    assert undeclared("minipaged/", "hub", leave_out=leave_out) == {}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("minipaged/", ("hub", "scale", "serve")),
        ("coursekit/", ("course", "hub", "teach")),
        ("notebooks/", ("course",)),
        ("tests/", ("course", "test", "teach", "hub", "scale", "serve", "serve-test")),
        ("scripts/", ("course",)),
    ],
)
def test_imports_are_declared(folder, extras):
    assert undeclared(folder, *extras) == {}


def test_an_undeclared_import_is_found(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import os\nfrom scipy import stats\nimport torch.nn\n")
    assert third_party_imports(file) == {"scipy", "torch"}
