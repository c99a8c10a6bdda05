"""uv.lock: the versions that are tested, from PyPI, each file with its hash."""

import shutil
import subprocess
import tomllib

from checkout import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PACKAGES = [package for package in LOCK["package"] if package["name"] != "minipaged"]


def test_the_lock_has_the_versions_of_the_constraints():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    rows = [Requirement(line) for line in lines if line]
    pins = {canonicalize_name(row.name): str(row.specifier).removeprefix("==") for row in rows}
    locked = {package["name"]: package["version"] for package in PACKAGES}
    differ = {name: (pin, locked.get(name)) for name, pin in pins.items() if locked.get(name) != pin}
    assert not differ, f"`make lock` writes it again: {differ}"


def test_the_lock_has_what_the_project_asks_for():
    """What `uv lock --check` asks, where uv is at hand; its requirements as text where it is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = next(package for package in LOCK["package"] if package["name"] == "minipaged")
    asked = [("", row) for row in project["dependencies"]]
    asked += [(extra, row) for extra, rows in project["optional-dependencies"].items() for row in rows]
    wanted = sorted((extra, canonicalize_name(Requirement(row).name)) for extra, row in asked)
    locked = [("", row["name"]) for row in ours["dependencies"]]
    locked += [(extra, row["name"]) for extra, rows in ours["optional-dependencies"].items() for row in rows]
    assert sorted(locked) == wanted, "`make lock` writes it again"
    if uv := shutil.which("uv"):
        command = [uv, "lock", "--check", "--offline"]
        checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_every_file_of_the_lock_comes_from_pypi_with_its_hash():
    assert all(package["source"] == {"registry": "https://pypi.org/simple"} for package in PACKAGES)
    files = [file for package in PACKAGES for file in package.get("wheels", [])]
    files += [package["sdist"] for package in PACKAGES if "sdist" in package]
    assert len(files) > len(PACKAGES)
    assert all(file["hash"].startswith("sha256:") for file in files)
    assert all(file["url"].startswith("https://files.pythonhosted.org/") for file in files)
