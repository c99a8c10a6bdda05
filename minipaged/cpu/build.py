"""Builds the C++ kernels of a machine without a GPU, on first use and for the very processor they run on.

That takes a few seconds; the library is kept in the user's cache folder. Without a compiler `load` answers
None and torch serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "csrc"
SOURCES = tuple(sorted(FOLDER.glob("*.cpp")))
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
# Fast maths lets the compiler turn sums and exponentials into vector code. It is left out of the link: there,
# older gcc would make the whole process flush denormal numbers.
COMPILE_FLAGS = ("-std=c++17", "-O3", "-ffast-math", "-fPIC")
# Best first: vector instructions of this processor and threads, then what any compiler takes.
OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ())


def find_compiler() -> str | None:
    """The C++ compiler: what CXX says, else the first of the usual names on PATH; None without one."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def load() -> ctypes.CDLL | None:
    """The library, built now if this machine has not yet; None, with one warning, if it cannot be."""
    compiler = find_compiler()
    if compiler is None:
        warnings.warn("no C++ compiler found: the CPU runs plain torch, which is slower", stacklevel=2)
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without home
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
        warnings.warn(f"the CPU runs plain torch, the kernels were not built: {reason}", stacklevel=2)
        return None


def _build(compiler: str) -> Path:
    """Path of the shared library for these sources, compiler and processor, compiled if it is not there."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = str(COMPILE_FLAGS + OPTIONAL_FLAGS[0])
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    identity = "\n".join([*texts, version, platform.machine(), _processor(), flags])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    library = cache_folder() / f"minipaged_cpu-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for i, optional in enumerate(OPTIONAL_FLAGS):
            try:
                compiled = _compile(compiler, Path(folder), optional)
                break
            except subprocess.CalledProcessError:
                if i == len(OPTIONAL_FLAGS) - 1:
                    raise
        os.replace(compiled, library)  # another process may be building it too
    return library


def _compile(compiler: str, folder: Path, optional: tuple[str, ...]) -> Path:
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    library = folder / "minipaged_cpu.so"
    steps = [
        [compiler, *COMPILE_FLAGS, *optional, "-c", str(source), "-o", str(target)]
        for source, target in zip(SOURCES, objects, strict=True)
    ]
    openmp = [flag for flag in optional if flag == "-fopenmp"]
    steps.append([compiler, "-shared", *openmp, *map(str, objects), "-o", str(library)])
    for step in steps:
        subprocess.run(step, capture_output=True, text=True, check=True, timeout=120)
    return library


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/minipaged, by default ~/.cache/minipaged."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minipaged"


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
