"""Builds the C++ kernels of a machine without a GPU, on first use and for the very processor they run on.

That takes a few seconds; the library is kept in the user's cache folder. Its name says what it was built from
and what is in it, so that a damaged one is known and built again. A library runs with all rights of its user:
it is loaded only from a folder where nobody else can put one. Where there is none, every process builds its
own; without a compiler `load` returns None and plain torch serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import stat
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
VERSION_SECONDS, COMPILE_SECONDS = 10, 120  # for one call of the compiler
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivateError(OSError):
    """Somebody else could put a library of their own into this folder."""


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, or the first that is installed of c++, g++ and clang++; None without any."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def load() -> ctypes.CDLL | None:
    """The library, built now if this machine has not yet; None, with one warning, if it cannot be."""
    compiler = find_compiler()
    if compiler is None:
        warnings.warn("no C++ compiler found: the CPU runs plain torch, which is slower", stacklevel=2)
        return None
    try:
        identity = identify(compiler)
        try:
            return ctypes.CDLL(str(_kept(compiler, identity)))
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without home
            every = "every process builds the C++ kernels again, which takes it some seconds"
            warnings.warn(f"{every}: {error}", stacklevel=2)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # once loaded it may go
            return ctypes.CDLL(str(_build(compiler, identity, Path(folder))))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error).encode(errors="replace")
        reason = output.decode(errors="replace").strip().splitlines()[-1:]
        warnings.warn(f"the CPU runs plain torch, the kernels were not built: {reason}", stacklevel=2)
        return None


def identify(compiler: str) -> str:
    """A digest of what a library is built from: sources, compiler, processor, flags."""
    flags = str((COMPILE_FLAGS, OPTIONAL_FLAGS))
    parts = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    parts.append(_run([compiler, "--version"], VERSION_SECONDS))
    parts += [text.encode() for text in (platform.machine(), _processor(), flags)]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]


def _kept(compiler: str, identity: str) -> Path:
    """The library of the cache folder, built now if it is not there whole.

    Raises OSError where none can be kept there.
    """
    folder = private_folder()
    for library in sorted(folder.glob(f"minipaged_cpu-{identity}-*.so")):
        if is_private(library) and library.name == _name(identity, library):
            return library
    return _build(compiler, identity, folder)


def _name(identity: str, library: Path) -> str:
    """What a library is called: after what it was built from, then after its content."""
    return f"minipaged_cpu-{identity}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _build(compiler: str, identity: str, folder: Path) -> Path:
    """Compile the library, with the best flags that the compiler takes, and keep it in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for i, optional in enumerate(OPTIONAL_FLAGS):
            try:
                compiled = _compile(compiler, Path(scratch), optional)
                break
            except subprocess.CalledProcessError:
                if i == len(OPTIONAL_FLAGS) - 1:
                    raise
        compiled.chmod(0o700)  # whatever the umask says
        return move_durably(compiled, folder / _name(identity, compiled))


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
        _run(step, COMPILE_SECONDS)
    return library


def _run(command: list[str], seconds: float) -> bytes:
    """What a command prints. After `seconds` it is ended, and with it the programs that it started.

    Raises OSError where it does not start, subprocess.SubprocessError where it fails or takes too long.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a group of its own, which can be ended as one
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:  # Ctrl-C does not reach another session
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output


def move_durably(source: Path, target: Path) -> Path:
    """Rename within a file system, so that `target` is whole or not there, after a power cut as well."""
    _sync(source)
    os.replace(source, target)  # another process may be writing the same
    if os.name == "posix":  # elsewhere a folder is not opened
        _sync(target.parent)
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/minipaged, by default ~/.cache/minipaged."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minipaged"


def private_folder() -> Path:
    """The cache folder, made if need be, with links resolved.

    Raises NotPrivateError if others may write there or exchange it, another OSError if it cannot be made.
    """
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache_folder().resolve()
    if not is_private(folder):
        raise NotPrivateError(f"{folder} belongs to somebody else, or others may write there")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # sticky, as /tmp: only owners rename there
            raise NotPrivateError(f"everybody may exchange what is in {parent}")
    return folder


def is_private(path: Path) -> bool:
    """Whether it belongs to this user, and nobody else may write to it. Windows has no such bits."""
    if not hasattr(os, "geteuid"):
        return True
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
