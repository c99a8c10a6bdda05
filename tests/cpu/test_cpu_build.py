"""The C++ kernels are built once, and missed without harm where they cannot be built."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from minipaged.attention import get_backend
from minipaged.cpu import build
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.accelerate import accelerate_backend, use_compiled_kernels
from minipaged.model.tiny import random_llama
from tests.attention.paged import dense_attention, make_problem, relative_error, run_cpu
from tests.cpu.test_compiled import WIDE

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)


@pytest.fixture
def fresh_load(monkeypatch, tmp_path):
    """`load` as on a machine that has built nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (build.load, cpu_kernels.load):
        function.cache_clear()
    yield tmp_path
    for function in (build.load, cpu_kernels.load):
        function.cache_clear()


@needs_compiler
def test_it_is_compiled_once_and_then_found(fresh_load, monkeypatch):
    assert build.load() is not None
    (library,) = (fresh_load / "minipaged").iterdir()  # and no temporary folder is left
    build.load.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.load() is not None
    assert library.exists()


@needs_compiler
@pytest.mark.slow
def test_a_change_of_any_source_compiles_again(fresh_load, monkeypatch):
    """Slow: the compiler runs twice."""
    build.load()
    header = fresh_load / build.HEADERS[0].name
    header.write_text(build.HEADERS[0].read_text() + "// changed\n")
    monkeypatch.setattr(build, "HEADERS", (header, *build.HEADERS[1:]))
    build.load.cache_clear()
    build.load()
    assert len(list((fresh_load / "minipaged").iterdir())) == 2


def test_without_a_compiler_torch_serves_and_one_line_says_so(fresh_load, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    model, backend = random_llama(WIDE), get_backend("torch")
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as caught:
        assert use_compiled_kernels(model) is model
    assert accelerate_backend(backend) is backend
    assert len(caught) == 1
    problem = make_problem([5, 9])
    for _ in range(2):
        assert relative_error(run_cpu(problem), dense_attention(problem)) <= 1e-5


def test_a_compiler_that_fails_is_missed_without_harm(fresh_load, monkeypatch):
    broken = Path(fresh_load) / "broken-c++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match="no such header"):
        assert build.load() is None
    assert list((fresh_load / "minipaged").iterdir()) == []


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what is loaded")
def test_torch_and_the_kernels_share_one_pool_of_threads():
    """Two OpenMP libraries would be twice the threads, each waiting for its own."""
    assert build.load() is not None
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = {path for path in loaded if re.match(r"lib(gomp|i?omp5?)\b", Path(path).name)}
    assert len(runtimes) == 1, runtimes
