"""The C++ kernels in each way that a product can be made, for tests that hold for all of them."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from minipaged.cpu import build, calibrate
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.calibrate import Choice
from minipaged.cpu.kernels import CpuKernels

HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
CPUINFO = Path("/proc/cpuinfo")
HAS_AMX = CPUINFO.exists() and "amx_bf16" in CPUINFO.read_text()
WAYS = ["vectors", "emulated tiles", *(["tiles"] if HAS_AMX else [])]


@pytest.fixture(scope="session")
def library_with_emulated_tiles() -> ctypes.CDLL:
    """The library as it is built here, but the six instructions of AMX in plain C++. Built once, and kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "COMPILE_FLAGS", (*build.COMPILE_FLAGS, "-DMINIPAGED_EMULATE_TILES"))
        library = build.load.__wrapped__()
    assert library is not None and library.tiles_allowed()
    return library


@pytest.fixture(params=WAYS)
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels that make their products in one way, whatever is the fastest here.

    Without a compiler the test runs once, and skips itself or asks for no kernels.
    """
    way: str = request.param
    if not HAS_COMPILER:
        if way != "vectors":
            pytest.skip("no C++ compiler on this machine")
        yield way
        return
    own = cpu_kernels.load()
    assert own is not None
    library = own.library
    if way == "emulated tiles":
        library = request.getfixturevalue("library_with_emulated_tiles")
    elif way == "tiles" and not library.tiles_allowed():
        pytest.skip("this process may not use AMX")
    name = "vectors-nta" if way == "vectors" else "amx-t0"
    kernels = CpuKernels(library, Choice.pinned(name, tiles=way != "vectors"))
    monkeypatch.setattr(cpu_kernels, "load", lambda: kernels)
    yield way
    for dtype_name, chosen in own.choice.ways.items():  # both hold for a library as a whole
        calibrate.tell(own.library, dtype_name, chosen)
