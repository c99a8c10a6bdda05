"""The cache of compiled kernels: nothing damaged and nobody else's is loaded, and no compiler can do harm."""

import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minipaged.cpu import build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
needs_posix = pytest.mark.skipif(os.name != "posix", reason="owners and mode bits are POSIX's")


@pytest.fixture(scope="module")
def built() -> bytes:
    """A whole library: that of this user's own cache, built now if need be."""
    build.load.cache_clear()
    return Path(build.load()._name).read_bytes()


@pytest.fixture
def compiles(built, monkeypatch, tmp_path):
    """An empty cache and a compiler that takes no time; the folders that it was called in."""
    calls = []

    def compile_(compiler, folder, optional):
        calls.append(folder)
        library = folder / "minipaged_cpu.so"
        library.write_bytes(built)
        return library

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_compile", compile_)
    build.load.cache_clear()
    yield calls
    build.load.cache_clear()


def load_again():
    """`load` as in another process."""
    build.load.cache_clear()
    return build.load()


def kept(tmp_path) -> Path:
    """The one file of the cache."""
    (library,) = (tmp_path / "cache" / "minipaged").iterdir()
    return library


DAMAGE = {
    "cut in half": lambda data: data[: len(data) // 2],
    "5000 bytes": lambda data: data[:5000],
    "64 bytes": lambda data: data[:64],
    "empty": lambda data: b"",
    "zeros at the end": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "one byte changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "foreign library": lambda data: next(Path(np.__file__).parent.rglob("*.so")).read_bytes(),
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_built_again_and_not_loaded(compiles, built, tmp_path, damage):
    assert build.load() is not None
    # A new file, as this process has the old one mapped; to write into that would end it.
    library = kept(tmp_path)
    library.unlink()
    library.write_bytes(damage(built))
    library.chmod(0o700)
    assert load_again() is not None
    assert kept(tmp_path).read_bytes() == built
    assert len(compiles) == 2
    load_again()
    assert len(compiles) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file is meant")
@needs_compiler
def test_what_is_kept_is_on_the_disk_before_it_has_its_name(compiles, monkeypatch, tmp_path):
    """Otherwise a power cut leaves a file with the right name and length, and zeros in it."""
    steps = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: (steps.append("rename"), replace(*paths)))
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix), fsync(fd))
    )
    build.load()
    assert steps == [".so", "rename", ""]  # the last is the folder


@needs_posix
@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
def test_nothing_is_loaded_from_a_folder_where_others_may_write(compiles, tmp_path, mode):
    build.load()
    library = kept(tmp_path)
    library.parent.chmod(mode)
    with pytest.warns(UserWarning, match="every process builds .* others may write there"):
        loaded = load_again()
    assert loaded._name != str(library)
    assert not Path(loaded._name).exists()  # it was private, and is gone
    assert compiles[-1].parent.parent != library.parent


@needs_posix
@needs_compiler
def test_nothing_is_loaded_from_a_folder_of_somebody_else(compiles, monkeypatch, tmp_path):
    build.load()
    library = kept(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: library.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="belongs to somebody else"):
        assert load_again()._name != str(library)


@needs_posix
@needs_compiler
def test_nothing_is_loaded_from_a_folder_that_anybody_could_exchange(compiles, tmp_path):
    build.load()
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(UserWarning, match="everybody may exchange"):
        load_again()
    assert len(compiles) == 2
    (tmp_path / "cache").chmod(0o1777)  # as /tmp: there only an owner renames
    load_again()
    assert len(compiles) == 2


@needs_posix
@needs_compiler
def test_a_file_that_others_may_write_is_replaced(compiles, tmp_path):
    build.load()
    kept(tmp_path).chmod(0o777)
    load_again()
    assert len(compiles) == 2 and kept(tmp_path).stat().st_mode & 0o777 == 0o700


@needs_posix
@needs_compiler
def test_what_a_wide_umask_leaves_open_is_closed(compiles, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        build.load()
        load_again()
    finally:
        os.umask(before)
    assert len(compiles) == 1
    assert kept(tmp_path).parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(compiles, tmp_path):
    """A read-only home, a full disk: every process builds its own, and leaves nothing."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="every process builds"):
        assert build.load() is not None
    assert len(compiles) == 1 and not compiles[0].exists()


@needs_compiler
def test_a_user_without_a_home_builds_for_this_process(compiles, monkeypatch):
    """As in a container that runs under a number which no password file knows."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(build.Path, "home", no_home)
    with pytest.warns(UserWarning, match="every process builds .* home directory"):
        assert build.load() is not None


@needs_compiler
def test_a_library_that_another_process_keeps_meanwhile_does_no_harm(compiles, built, monkeypatch, tmp_path):
    compile_ = build._compile

    def and_another(compiler, folder, optional):
        compiled = compile_(compiler, folder, optional)
        other = folder.parent / build._name(build.identify(compiler), compiled)
        other.write_bytes(built)
        other.chmod(0o700)
        return compiled

    monkeypatch.setattr(build, "_compile", and_another)
    assert build.load() is not None
    assert kept(tmp_path).read_bytes() == built


def write_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_posix
@pytest.mark.parametrize("asked", ["--version", "to compile"])
def test_a_compiler_that_hangs_costs_a_warning_and_is_ended(monkeypatch, tmp_path, asked):
    """With the programs it started: they would hold its output open, or work on for nobody."""
    hang = f"sleep 1000 & echo $! > {tmp_path}/started; wait"
    script = hang if asked == "--version" else f'[ "$1" = --version ] && exit 0\n{hang}'
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "c++", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "VERSION_SECONDS", 1)
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1)
    with pytest.warns(UserWarning, match="timed out after 1 seconds"):
        assert load_again() is None
    assert has_ended(int((tmp_path / "started").read_text()))


def has_ended(pid: int) -> bool:
    """Whether it has, once the system has had a moment to take it away."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@needs_posix
def test_a_compiler_may_print_bytes_that_are_no_text(monkeypatch, tmp_path):
    latin = r"printf 'r\351gl\351\n'"
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "c++", f"{latin}; {latin} >&2; exit 1"))
    with pytest.warns(UserWarning, match="r\ufffdgl\ufffd"):
        assert load_again() is None
    script = f'{latin}; {latin} >&2\n[ "$1" = --version ]'
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "c++", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="r\ufffdgl\ufffd"):
        assert load_again() is None


@needs_posix
def test_a_compiler_that_is_not_there_costs_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.warns(UserWarning, match="No such file"):
        assert load_again() is None
