"""Every kernel compiles for every target, and the compiler's output shows what it should.

The reports come from `minipaged kernels --json`, run once per target in a process of its own: some 80
compilations in all, 50 s from cold.
"""

import fcntl
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
from minipaged.attention.targets import TARGETS

Reports = list[dict[str, Any]]
KERNELS = {"copy_blocks", "decode", "decode_combine", "decode_grouped", "decode_split", "prefill", "write_kv"}
STREAMING = {"decode", "decode_grouped", "decode_split", "prefill"}  # they read keys and values
ON_MATRIX_UNITS = {"decode_grouped", "decode_split", "prefill"}
# Triton emits no matrix instruction for sm_75 (see test_aot_toys.py).
MATRIX_UNIT = {
    "sm_75": None,
    "sm_80": "HMMA",
    "sm_90": "MMA",
    "sm_100": "MMA",
    "sm_120": "HMMA",
    "gfx942": "mfma",
}
NEWEST = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}
ASYNCHRONOUS = {"sm_80", "sm_90", "sm_100", "sm_120"}


def compile_for(target: str) -> str:
    """What the command prints, from a process in which Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "minipaged", "kernels", "--json", "--target", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


NEWCOMERS = "sm_80"  # the one that `make test` compiles for; `make check` has the others


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name != NEWCOMERS)) for name in TARGETS],
)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """A target's reports. Of several test workers the first compiles, the others wait for its file."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by the workers of this run
    path = folder / f"kernels_{request.param}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(compile_for(request.param))
    return json.loads(path.read_text())


def label(report: dict[str, Any]) -> str:
    return f"{report['kernel']} ({report['variant']}) for {report['target']}"


def in_16_bits(report: dict[str, Any]) -> bool:
    """Whether the cache is not quantised."""
    return "+" not in report["variant"]


def test_every_kernel_compiles(reports: Reports) -> None:
    """Of a target's tests this is the one that waits for the compiler."""
    assert {report["kernel"] for report in reports} == KERNELS


def test_nothing_spills(reports: Reports) -> None:
    assert not [label(r) for r in reports if r["spill_bytes"] or r["spill_instructions"]]


def test_keys_and_values_in_16_bits_are_read_16_bytes_at_a_time(reports: Reports) -> None:
    plain = [report for report in reports if report["kernel"] in STREAMING and in_16_bits(report)]
    assert {report["kernel"] for report in plain} == STREAMING
    for report in plain:
        assert report["load_bytes"] == {"key_cache_ptr": 16, "value_cache_ptr": 16}, label(report)


def test_products_run_on_the_matrix_units(reports: Reports) -> None:
    for report in reports:
        wanted = MATRIX_UNIT[report["target"]] if report["kernel"] in ON_MATRIX_UNITS else None
        assert bool(report["matrix"]) == (wanted is not None), label(report)
        assert all(wanted in name for name in report["matrix"]), label(report)


def test_prefill_uses_the_newest_matrix_instructions(reports: Reports) -> None:
    for report in reports:
        if report["kernel"] == "prefill" and report["target"] in NEWEST:
            assert all(name.startswith(NEWEST[report["target"]]) for name in report["matrix"]), label(report)


def test_the_next_tile_is_loaded_while_one_is_used(reports: Reports) -> None:
    """Two tiles of K and of V in shared memory wherever loads can be asynchronous."""
    for report in reports:
        pipelined = report["kernel"] in ON_MATRIX_UNITS and report["target"] in ASYNCHRONOUS
        if pipelined and in_16_bits(report):
            assert min(report["buffers"].values()) >= 2, label(report)


def test_every_program_fits_its_multiprocessor(reports: Reports) -> None:
    assert not [label(report) for report in reports if report["resident"] < 1]
