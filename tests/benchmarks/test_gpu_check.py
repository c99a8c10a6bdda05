"""The GPU check without a GPU: its dry run, its verdicts, and what it leaves when parts fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
pytest.importorskip("triton")
from benchmarks.gpu import check, correctness, results, timing
from benchmarks.gpu.part import Part
from coursekit import gpu_results
from minipaged.attention.torch_backend import TorchBackend

REPOSITORY = Path(__file__).parents[2]
MACHINE = {
    "device": {"name": "NVIDIA H200"},
    "versions": {"torch": "2.13.0", "triton": "3.7.1"},
    "source": "0",
}


def figure(name: str, median: float, share: float) -> dict[str, Any]:
    return {"name": name, "median": median, "share_of_copy": share}


def found_on_a_card() -> results.Found:
    """What the parts would find on a card that meets every limit, though not every aim."""
    figures = [
        figure("decode b32 c4096", 1.0, 0.86),
        figure("decode b32 c8192", 1.0, 0.83),
        figure("decode b32 c512", 1.0, 0.40),  # too short to count
        figure("decode b1 c32768", 1.0, 0.5),
        figure("decode b32 c4096 shuffled", 1.08, 0.8),
        figure("decode b32 c4096 identity", 1.0, 0.8),
        figure("decode b32 c4096 block 128", 1.0, 0.8),
        figure("prefill 1 x 4096", 1.0, 0.0),
        figure("prefill 1 x 4096 flash SDPA", 0.7, 0.0),
        figure("prefill 4 x 2048", 1.0, 0.0),
        figure("prefill 4 x 2048 flash SDPA", 0.9, 0.0),
    ]
    others = [{"name": "FlashInfer", "skipped": "not installed"}, {"name": "varlen_attn", "speed": 1.2}]
    return {"figures": figures, "peers": [*others, {"name": "FlexAttention paged", "speed": 1.05}]}


@pytest.mark.slow
def test_dry_run_passes_and_writes_no_file() -> None:
    """Slow: five processes, each of which imports torch and interprets kernels."""
    before = sorted(results.FOLDER.iterdir())
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(REPOSITORY / "benchmarks" / "gpu_check.sh"), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no results file was written" in done.stdout
    for name in check.PARTS:
        assert f"{name}: finished" in done.stdout
    for kernel in ("write_kv", "copy_blocks", "decode_split", "prefill", "end to end"):
        assert kernel in done.stdout
    assert sorted(results.FOLDER.iterdir()) == before


def test_goals_take_the_worst_case_and_leave_out_what_was_not_measured() -> None:
    measured = results.measured_goals(found_on_a_card())
    assert measured["decode_bandwidth"] == 0.83
    assert measured["paging_price"] == measured["small_blocks"] == 1.08
    assert measured["against_flashinfer"] is None
    assert measured["against_torch_paged"] == 1.05
    assert measured["single_sequence"] == 0.5
    assert measured["prefill"] == 0.7
    rows = {row["name"]: row for row in results.goal_rows(found_on_a_card())}
    assert [rows["paging_price"]["met"], rows["paging_price"]["aim_met"]] == [
        True,
        False,
    ]  # smaller is better
    assert rows["decode_bandwidth"]["met"] and not rows["decode_bandwidth"]["aim_met"]
    assert rows["against_flashinfer"]["met"] is None
    assert all(row["measured"] is None for row in results.goal_rows({}))


def test_result_is_written_whole_and_read_back(tmp_path: Path) -> None:
    assert gpu_results.recorded_results(tmp_path) is None
    assert gpu_results.goals_text(tmp_path) == "not recorded yet"
    path = results.write_result(found_on_a_card(), [], MACHINE, complete=True, folder=tmp_path)
    assert path.name == "nvidia-h200.json" and list(tmp_path.iterdir()) == [path]
    text = gpu_results.goals_text(tmp_path)
    assert "NVIDIA H200" in text and "not measured" in text and "not met" not in text
    figures = gpu_results.recorded_figure("decode b1 c32768", tmp_path)
    assert figures is not None and figures["NVIDIA H200"]["share_of_copy"] == 0.5
    assert gpu_results.recorded_figure("no such case", tmp_path) is None


def test_nothing_is_recorded_that_no_gpu_has_measured() -> None:
    """Every committed file names a card and says how many samples each figure is the median of."""
    for result in gpu_results.recorded_results() or []:
        assert result["device"]["capability"] and result["source"]
        assert all(figure["samples"] >= timing.FEWEST for figure in result["figures"])


@pytest.mark.parametrize(
    ("statuses", "passed", "code"),
    [
        (["finished", "finished"], [True, True], 0),
        (["finished", "finished"], [True, False], 1),
        (["stopped after 150 s", "finished"], [True], 1),  # what was not checked is not right
        (["finished", "failed with exit code -6"], [True], 2),
    ],
)
def test_exit_code(statuses: list[str], passed: list[bool], code: int) -> None:
    parts = [{"name": n, "status": s} for n, s in zip(("correctness", "decode"), statuses, strict=True)]
    assert check.exit_code({"checks": [{"passed": p} for p in passed]}, parts) == code


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel leaves a row unwritten, another raises: both are failures, the rest goes on."""

    def raises(output: torch.Tensor, *args: object) -> None:
        raise RuntimeError("does not compile")

    def incomplete(output: torch.Tensor, problem: Any, backend: Any) -> None:
        output[:-1] = TorchBackend().paged_attention(
            problem.query, problem.layer, problem.batch, scale=problem.scale
        )[:-1]

    tried = [("raises", [(1, 5)], raises), ("incomplete", [(1, 5), (1, 9)], incomplete)]
    monkeypatch.setattr(correctness, "kernels", lambda tiny: tried)
    part = Part.begin(tmp_path / "part.json", 60, dry_run=True)
    correctness.run(part)
    outcomes = {c["kernel"]: c for c in json.loads(part.path.read_text())["checks"]}
    assert not outcomes["raises"]["passed"] and "does not compile" in outcomes["raises"]["error"]
    assert not outcomes["incomplete"]["passed"]
    assert outcomes["write_kv"]["passed"] and outcomes["copy_blocks"]["passed"]


class Impatient(subprocess.Popen[bytes]):
    """Runs out of patience as soon as the child has left its file: a time limit without a clock."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            path = Path(self.args[self.args.index("--out") + 1])  # type: ignore[union-attr, index]
            while not path.exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)
        return super().wait()


@pytest.mark.parametrize(
    ("ending", "popen", "status"),
    [
        ("time.sleep(600)", Impatient, "stopped after 300 s"),
        ("sys.exit(3)", subprocess.Popen, "failed with exit code 3"),
    ],
)
def test_a_part_that_hangs_or_dies_leaves_what_it_had_found(
    ending: str, popen: type, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, path, found = tmp_path / "python", tmp_path / "part.json", {}
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "path = sys.argv[sys.argv.index('--out') + 1]\n"
        """open(path + "~", "w").write('{"figures": [{"name": "first"}]}')\n"""
        "os.replace(path + '~', path)\n"
        f"{ending}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(subprocess, "Popen", popen)
    part = check.start_part("decode", path, 300, dry_run=True)
    check.merge(found, path)
    assert part["status"] == status
    assert found == {"figures": [{"name": "first"}]}
