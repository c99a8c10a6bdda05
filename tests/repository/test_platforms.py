"""macOS and Windows as far as Linux can pretend to be them: no Triton, torch serves, and one line says so."""

import json
import subprocess
import sys

import pytest
from checkout import ROOT

from minipaged.cpu.build import find_compiler

# `before` is imported as on Linux: torch asks which libraries to load. The rest sees another system, where no
# import of triton succeeds.
PRETEND = """
import {before}
import json, platform, sys
platform.system = lambda: {system!r}
sys.modules["triton"] = None
from importlib import metadata
found = metadata.version
def version(name):
    if name in ("triton", "triton-windows"):
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
"""
SERVE = """
from minipaged import LLM
from minipaged.checkpoints.loading import LoadedModel
from minipaged.model.tiny import TINY, random_llama
from minipaged import SamplingParams
llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), num_blocks=8, max_model_len=64)
answer = llm.generate([[1, 5, 9]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(json.dumps([llm.engine.runner.backend.name, len(answer[0].outputs[0].token_ids)]))
"""
DOCTOR = """
from minipaged.cli import main
sys.exit(main(["doctor"]))
"""


def pretend(system: str, code: str, before: str = "torch") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRETEND.format(system=system, before=before) + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_torch_serves_where_triton_cannot_be_imported(system):
    done = pretend(system, SERVE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["cpu" if find_compiler() else "torch", 4]


@pytest.mark.parametrize(
    ("system", "line"),
    [
        ("Darwin", "Triton does not exist for macOS"),
        ("Windows", "Triton is missing; the torch backend serves instead"),
    ],
)
def test_doctor_says_in_one_line_that_torch_serves(system, line):
    done = pretend(system, DOCTOR)
    rows = done.stdout.splitlines()
    (number,) = [index for index, row in enumerate(rows) if line in row]
    assert "run the Triton kernels" in rows[number] and rows[number].lstrip().startswith("no")
    assert "torch backend serves" in rows[number] + rows[number + 1]
    assert done.returncode == 0 or "model file is missing" in done.stdout


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_lessons_about_triton_end_with_one_line_instead_of_a_traceback(system):
    for name in ("06_first_triton_kernel", "07_fast_decode"):
        cell = (ROOT / "notebooks" / "src" / f"{name}.py").read_text().split("# %%")[2]
        done = pretend(system, cell, before="sys")
        assert done.stderr == ("This lesson needs Triton (Linux, Windows): read the stored outputs here.\n")
