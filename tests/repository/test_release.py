"""`make release`: what it refuses, and what it writes. The whole of it runs by hand."""

import subprocess
import sys

import pytest
from checkout import ROOT

sys.path.append(str(ROOT / "scripts"))
import release

NEWS = "# Changelog\n\n## [Unreleased]\n\n- one thing\n\n## [0.2.0] - 2026-01-01\n\n- older\n"


@pytest.mark.parametrize(
    ("version", "changelog", "says"),
    [
        ("1.2", NEWS, "VERSION is '1.2', it must be three numbers"),
        ("", NEWS, "it must be three numbers"),
        ("0.2.0", NEWS, r"CHANGELOG.md has 0\.2\.0 already"),
        ("0.1.9", NEWS, r"CHANGELOG.md has 0\.2\.0 already"),
        ("0.3.0", NEWS.replace("- one thing\n", ""), "nothing under"),
    ],
)
def test_a_version_that_cannot_be_released_is_refused(version, changelog, says):
    with pytest.raises(release.ReleaseError, match=says):
        release.require_version(version, changelog)


def test_what_was_unreleased_gets_the_version_and_the_date():
    release.require_version("0.10.0", NEWS)
    written = release.with_section(NEWS, "0.10.0", "2026-12-01")
    assert "## [Unreleased]\n\n## [0.10.0] - 2026-12-01\n\n- one thing\n\n## [0.2.0]" in written
    with pytest.raises(release.ReleaseError, match="nothing under"):
        release.require_version("0.11.0", written)


@pytest.mark.parametrize("name", release.PLACES)
def test_each_file_that_names_the_version_gets_the_new_one(name):
    text = (ROOT / name).read_text()
    written = release.with_version(name, text, "12.34.56")
    changed = [line for line in written.splitlines() if line not in set(text.splitlines())]
    assert len(changed) == 1 and "12.34.56" in changed[0]


def test_nothing_is_released_from_files_that_are_not_committed(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", clone], check=True)
    for name in (*release.PLACES, "CHANGELOG.md", "scripts/release.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, clone / "scripts/release.py", "9.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "commit or undo first" in done.stderr and "pyproject.toml" in done.stderr
    assert (clone / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()
