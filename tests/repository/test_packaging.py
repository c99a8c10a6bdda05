"""What `pip install` gets: every file of the package, the native sources and the request mixes included."""

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
from checkout import ROOT, tracked_files
from packaging.version import Version

# What pyproject.toml asks of the build; without network the one that is installed must do.
pytestmark = pytest.mark.skipif(
    Version(metadata.version("setuptools")) < Version("77"), reason="setuptools is older than 77"
)


PACKAGES = ("minipaged/", "coursekit/")


@pytest.mark.slow
def test_a_wheel_holds_all_files_of_the_package_and_no_others(tmp_path):
    """Slow because pip builds it, from a copy of what is under version control."""
    source, out = tmp_path / "source", tmp_path / "out"
    names = {file.relative_to(ROOT).as_posix() for file in tracked_files()}
    for name in names:
        if name.startswith(PACKAGES) or name in {"pyproject.toml", "README.md", "LICENSE"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("minipaged-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (about,) = [archive.read(name).decode() for name in held if name.endswith(".dist-info/METADATA")]
    wanted = {name for name in names if name.startswith(PACKAGES)}
    assert {name for name in held if ".dist-info/" not in name} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert "Project-URL: Repository, https://github.com/" in about
