"""The report notices the faults it exists for: toy kernels with known ones, compiled for sm_80 and sm_75."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # the compiler runs for eight kernels
REPOSITORY = Path(__file__).parents[3]


def compile_toys(target: str) -> dict[str, Any]:
    """Reports by variant, from a process in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("toy_kernels.py")), target]
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def toys() -> dict[str, Any]:
    return compile_toys("sm_80")


def test_aligned_rows_are_read_16_bytes_at_a_time(toys: dict[str, Any]) -> None:
    report = toys["aligned"]["report"]
    assert report["load_bytes"] == {"rows_ptr": 16}
    assert report["matrix"] == {} and report["spill_bytes"] == 0
    assert report["loop_instructions"] > 0


def test_an_odd_stride_shows_as_narrow_loads(toys: dict[str, Any]) -> None:
    assert toys["unaligned"]["report"]["load_bytes"] == {"rows_ptr": 2}


def test_a_product_that_fits_uses_the_matrix_unit_without_spilling(toys: dict[str, Any]) -> None:
    report = toys["fits"]["report"]
    assert report["spill_bytes"] == report["spill_instructions"] == 0
    assert list(report["matrix"]) == ["HMMA.16816.F32"]
    assert report["load_bytes"] == {"a_ptr": 16, "b_ptr": 16}
    assert min(report["buffers"].values()) >= 1
    assert report["resident"] >= 2


def test_an_accumulator_too_large_shows_as_spills(toys: dict[str, Any]) -> None:
    report = toys["spills"]["report"]
    assert report["registers"] == 255
    assert report["spill_bytes"] > 0 and report["spill_instructions"] > 0


def test_listings_mark_the_loop(toys: dict[str, Any]) -> None:
    for kind, instruction in (("sass", "HMMA"), ("ptx", "mma.sync")):
        marked = [line for line in toys["fits"][kind].splitlines() if line.startswith("┃")]
        assert any(instruction in line for line in marked)
        assert all("toy_kernels.py:" in line for line in marked[1:])


def test_arguments_are_specialised_as_the_runtime_does(toys: dict[str, Any]) -> None:
    known = toys["unaligned"]["known"]
    assert known["signature"]["rows_ptr"] == "*fp16" and known["signature"]["table_ptr"] == "*i32"
    assert known["signature"]["WIDTH"] == "constexpr" and known["constants"] == {"WIDTH": 128, "TILE": 32}
    assert "rows_ptr" in known["divisible"] and "stride" not in known["divisible"]
    assert "stride" in toys["aligned"]["known"]["divisible"]
    assert toys["agrees_with_triton"]


def test_turing_has_no_matrix_instructions_from_triton() -> None:
    """Triton 3.7 computes `tl.dot` for sm_75 in ordinary arithmetic: when this fails, revisit its kernels."""
    report = compile_toys("sm_75")["fits"]["report"]
    assert report["matrix"] == {} and report["loop_instructions"] > 1000
