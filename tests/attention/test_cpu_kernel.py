"""The compiled CPU kernel: right in both dtypes, built once, missed without harm where it cannot be built."""

import shutil
from pathlib import Path

import pytest
import torch

from minipaged.attention import cpu_kernel
from tests.attention.paged import dense_attention, make_problem, relative_error, run_torch

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)


@pytest.fixture
def fresh_load(monkeypatch, tmp_path):
    """`load` as on a machine that has built nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_kernel.load.cache_clear()
    yield tmp_path
    cpu_kernel.load.cache_clear()


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_head_size_and_group_equals_dense_attention(dtype, tolerance, head_size, group):
    problem = make_problem([1, 7, 8, 33], group=group, head_size=head_size, block_size=8, dtype=dtype)
    kernel = cpu_kernel.load()
    assert kernel is not None and kernel.supports(problem.query, problem.layer)
    assert relative_error(run_torch(problem), dense_attention(problem)) <= tolerance


@needs_compiler
def test_a_query_that_is_a_view_is_read_right():
    problem = make_problem([5, 9], dtype=torch.float32)
    whole = torch.randn(problem.query.shape[0], 2 * problem.query.shape[1], problem.query.shape[2])
    whole[:, : problem.query.shape[1]] = problem.query
    expected = run_torch(problem)
    problem.query = whole[:, : problem.query.shape[1]]
    assert torch.equal(run_torch(problem), expected)


@needs_compiler
def test_it_is_compiled_once_and_then_found(fresh_load, monkeypatch):
    assert cpu_kernel.load() is not None
    (library,) = (fresh_load / "minipaged").iterdir()  # and no temporary folder is left
    cpu_kernel.load.cache_clear()
    monkeypatch.setattr(cpu_kernel, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cpu_kernel.load() is not None
    assert library.exists()


def test_without_a_compiler_torch_serves_and_one_line_says_so(fresh_load, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpu_kernel.shutil, "which", lambda name: None)
    problem = make_problem([5, 9])
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as caught:
        outputs = [run_torch(problem), run_torch(problem)]
    assert len(caught) == 1
    assert all(relative_error(output, dense_attention(problem)) <= 1e-5 for output in outputs)


def test_a_compiler_that_fails_is_missed_without_harm(fresh_load, monkeypatch):
    broken = Path(fresh_load) / "broken-c++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match="no such header"):
        assert cpu_kernel.load() is None
    assert list((fresh_load / "minipaged").iterdir()) == []


def test_what_it_cannot_read_goes_to_torch():
    kernel = cpu_kernel.CpuDecode(library=None)  # type: ignore[arg-type]
    supported = make_problem([3])
    assert kernel.supports(supported.query, supported.layer)
    for unsupported in (make_problem([3], dtype=torch.float16), make_problem([3], kv_dtype=torch.int8)):
        assert not kernel.supports(unsupported.query, unsupported.layer)
