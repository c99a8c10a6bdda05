"""What serves the products of a machine is measured once, kept, read again, and can be pinned."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from minipaged.cpu import calibrate
from minipaged.cpu import kernels as cpu_kernels
from minipaged.cpu.calibrate import WAYS, Choice, choice_for, fastest, read_times, tell, ways_of, write_times
from minipaged.cpu.kernels import CpuKernels

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
TIMES = {way: 10.0 + i for i, way in enumerate(WAYS)}  # the first is the fastest
BOTH = {name: dict(TIMES) for name in ("float32", "bfloat16")}


class Library:
    """A library that remembers what it was told."""

    def __init__(self, folder: Path, *, tiles: bool = False) -> None:
        self._name = str(folder / "kernels.so")
        self.told: list[tuple[str, bool, int]] = []
        self.tiles_allowed = lambda: int(tiles)
        self.choose_float32 = lambda *args: self.told.append(("float32", *args))
        self.choose_bfloat16 = lambda *args: self.told.append(("bfloat16", *args))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """What is measured: nothing in truth, every way as in `TIMES`."""
    seen = []

    def measure(library, dtype, ways):
        seen.append(dtype)
        return {way: TIMES[way] for way in ways}

    monkeypatch.delenv(calibrate.VARIABLE, raising=False)
    monkeypatch.setattr(calibrate, "measure", measure)
    return seen


@pytest.mark.parametrize(
    ("changed", "winner"),
    [
        ({}, "vectors-nta"),
        ({"torch": 11.0}, "torch"),
        ({"torch": 12.0}, "vectors-nta"),  # 13 is within 10 % of it
        ({"vectors-t0": 10.0}, "vectors-t0"),
        ({"vectors-t0": 11.0}, "vectors-nta"),  # 13 is within 25 % of it
        ({"vectors-none": 8.0, "vectors-t0": 9.0, "torch": 7.8}, "vectors-t0"),
        ({"vectors-none": 8.0, "torch": 7.0}, "torch"),
        ({"amx-t0": 1.0}, "vectors-nta"),  # not one of the ways
    ],
)
def test_the_fastest_instructions_serve_and_of_equally_fast_ones_the_first(changed, winner):
    times = dict.fromkeys(WAYS, 13.0) | changed
    assert fastest(times, ways_of("bfloat16", tiles=False)) == winner


def test_amx_serves_bfloat16_alone_and_only_where_it_is_allowed():
    assert "amx-t0" in ways_of("bfloat16", tiles=True)
    assert not [way for way in ways_of("bfloat16", tiles=False) if way.startswith("amx")]
    assert not [way for way in ways_of("float32", tiles=True) if way.startswith("amx")]


def test_it_is_measured_once_and_then_read(tmp_path, measured):
    first = choice_for(Library(tmp_path, tiles=True))
    assert measured == [torch.float32, torch.bfloat16]
    assert first.ways == {"float32": "vectors-nta", "bfloat16": "amx-t0"}
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.json"]
    assert choice_for(Library(tmp_path, tiles=True)) == first
    assert len(measured) == 2


def test_a_process_that_is_refused_amx_takes_the_next_best_of_what_was_measured(tmp_path, measured):
    choice_for(Library(tmp_path, tiles=True))
    assert choice_for(Library(tmp_path, tiles=False)).ways["bfloat16"] == "vectors-nta"
    assert len(measured) == 2


def test_what_was_measured_without_amx_is_measured_again_with_it(tmp_path, measured):
    choice_for(Library(tmp_path, tiles=False))
    assert choice_for(Library(tmp_path, tiles=True)).ways["bfloat16"] == "amx-t0"
    assert len(measured) == 4


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        '{"float32": 3, "bfloat16": 3}',
        json.dumps({"float32": TIMES}),
        json.dumps(BOTH | {"bfloat16": TIMES | {"torch": -1}}),
        json.dumps(BOTH | {"bfloat16": TIMES | {"torch": math.nan}}),
        json.dumps(BOTH | {"bfloat16": TIMES | {"torch": "fast"}}),
        json.dumps(BOTH | {"bfloat16": TIMES | {"torch": None}}),
        "\udcff",
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path, measured, damaged):
    file = tmp_path / "kernels.json"
    file.write_bytes(damaged.encode(errors="surrogateescape"))
    choice = choice_for(Library(tmp_path))
    assert len(measured) == 2
    assert read_times(file, {"bfloat16": ways_of("bfloat16", tiles=False)}) == {
        "bfloat16": choice.milliseconds["bfloat16"]
    }


def test_where_nothing_can_be_kept_it_is_measured_and_serves(tmp_path, measured):
    assert choice_for(Library(tmp_path / "not there")).ways["float32"] == "vectors-nta"
    assert len(measured) == 2


def test_writing_leaves_nothing_but_the_file(tmp_path):
    write_times(tmp_path / "kernels.json", BOTH)
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.json"]
    assert read_times(tmp_path / "kernels.json", {"float32": WAYS}) == {"float32": TIMES}


def test_a_pinned_way_serves_without_measuring(tmp_path, measured, monkeypatch):
    monkeypatch.setenv(calibrate.VARIABLE, "torch")
    assert choice_for(Library(tmp_path)).ways == {"float32": "torch", "bfloat16": "torch"}
    monkeypatch.setenv(calibrate.VARIABLE, "amx-none")
    assert choice_for(Library(tmp_path, tiles=True)).ways == {
        "float32": "vectors-none",
        "bfloat16": "amx-none",
    }
    assert not measured and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("fast", "MINIPAGED_PRODUCTS is 'fast', the ways to multiply are amx-t0, "),
        ("amx", "is 'amx', the ways"),
        ("amx-t0", "is 'amx-t0', this processor or its system allows no AMX"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused(tmp_path, measured, monkeypatch, way, message):
    monkeypatch.setenv(calibrate.VARIABLE, way)
    with pytest.raises(ValueError, match=message):
        choice_for(Library(tmp_path))


def test_the_library_is_told_instructions_and_hint(tmp_path):
    library = Library(tmp_path)
    for way in ("amx-t0", "vectors-none", "torch"):
        tell(library, "bfloat16", way)
    assert library.told == [("bfloat16", True, 3), ("bfloat16", False, -1), ("bfloat16", False, 0)]


def test_the_lines_name_the_way_and_each_figure():
    choice = Choice(
        {"float32": "torch", "bfloat16": "vectors-t0"}, {"bfloat16": {"torch": 4.04, "vectors-t0": 3.1}}
    )
    assert choice.lines() == [
        "float32: torch (MINIPAGED_PRODUCTS says so)",
        "bfloat16: vectors-t0 (ms: vectors-t0 3.1, torch 4.0)",
    ]


@needs_compiler
def test_every_way_of_this_machine_is_measured(monkeypatch):
    """Small and two rounds: that it runs, not what it finds."""
    own = cpu_kernels.load()  # before: this one may measure in earnest, and keep what it finds
    assert own is not None
    monkeypatch.setattr(calibrate, "WEIGHT_BYTES", 2**20)
    monkeypatch.setattr(calibrate, "MOST_ROUNDS", 2)
    ways = ways_of("bfloat16", bool(own.library.tiles_allowed()))
    try:
        times = calibrate.measure(own.library, torch.bfloat16, ways)
    finally:
        CpuKernels(own.library, own.choice)
    assert list(times) == ways and all(0 < time < math.inf for time in times.values())


@pytest.mark.parametrize(("way", "ours"), [("torch", False), ("vectors-t0", True)])
@needs_compiler
def test_the_choice_decides_whose_products_serve(way, ours):
    own = cpu_kernels.load()
    assert own is not None
    try:
        kernels = CpuKernels(own.library, Choice({"float32": way, "bfloat16": "torch"}))
        assert kernels.multiplies_fast(torch.float32) == ours
        assert not kernels.multiplies_fast(torch.bfloat16) and not kernels.multiplies_fast(torch.float16)
    finally:
        CpuKernels(own.library, own.choice)
