"""A structure that is not the library's is found when the library is loaded, not by a wild pointer."""

import ctypes
import shutil

import pytest
import torch

from minipaged.cpu import abi, build
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.abi import STRUCTURES, LayoutError, require_same_layout
from minipaged.cpu.backend import CpuBackend
from tests.attention.paged import dense_attention, make_problem, relative_error, run_cpu

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)


def changed(name: str, fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


PRODUCT = list(abi.Product._fields_)


def test_every_structure_is_the_library_s():
    library = build.load()
    assert library is not None
    require_same_layout(library)
    assert len(STRUCTURES) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            [PRODUCT[1], PRODUCT[0], *PRODUCT[2:]],
            "struct Product: norm is at byte 8 of the library's, at 0 of",
        ),
        (PRODUCT[:-1], "struct Product: its end is|struct Product: after is at byte 60"),
        (
            [*PRODUCT, ("bias", ctypes.c_void_p)],
            "struct Product: bias is at byte None of the library's, at 64",
        ),
        ([*PRODUCT[:-1], ("next", ctypes.c_int32)], "struct Product: next is at byte None"),
        ([*PRODUCT[:-1], ("after", ctypes.c_int64)], "struct Product: after is at byte 60 of the library's"),
    ],
    ids=["swapped", "missing", "one more", "renamed", "wider"],
)
def test_a_field_that_differs_is_named_with_both_places(fields, message):
    with pytest.raises(LayoutError, match=message):
        require_same_layout(build.load(), [changed("Product", fields)])


def test_a_structure_the_library_does_not_know_is_refused():
    with pytest.raises(LayoutError, match="does not tell the layout of struct Prompt"):
        require_same_layout(build.load(), [changed("Prompt", PRODUCT)])


def test_a_library_that_does_not_fit_is_not_used_and_plain_torch_serves(monkeypatch):
    wrong = changed("Decodes", list(reversed(abi.Decodes._fields_)))
    monkeypatch.setattr(abi, "STRUCTURES", (wrong,))
    cpu_kernels.load.cache_clear()
    try:
        with pytest.warns(UserWarning, match="do not fit abi.py: struct Decodes: scale is at byte") as caught:
            assert cpu_kernels.load() is None
        monkeypatch.setattr(cpu_kernels.CpuKernels, "decode", lambda *_: pytest.fail("asked the library"))
        problem = make_problem([5, 9], dtype=torch.float32)
        assert relative_error(run_cpu(problem), dense_attention(problem)) <= 1e-5
        assert CpuBackend().fuses_layers
        assert len(caught) == 1
    finally:
        cpu_kernels.load.cache_clear()
