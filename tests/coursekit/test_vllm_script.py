"""examples/offline_batch.py on minipaged and on vLLM: one line is changed, the answers are the same.

vLLM lives in an environment of its own, `.peers/vllm` (`make peers`); without it that half is skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

SCRIPT = (ROOT / "examples/offline_batch.py").read_text()
IMPORT = "from minipaged import LLM, SamplingParams  # or: from vllm import LLM, SamplingParams\n"
VLLM = ROOT / ".peers/vllm/bin/python"
VLLM_IS_INSTALLED = any(ROOT.glob(".peers/vllm/lib/python3*/site-packages/vllm/config"))
PROMPTS = [
    "The sky is blue because",
    "Name three rivers in Europe:",
    "A block table is",
    "Once upon a time there was a",
    "The capital of France is",
    "To make bread you need",
    "1 2 3 4 5 6",
    "def fibonacci(n):",
]
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

pytestmark = [pytest.mark.model, pytest.mark.slow]


def run(*command: str, **environment: str) -> None:
    # vLLM 0.32 divides by the time on its progress bar: 0 for one that TQDM_DISABLE has switched off.
    left_out = {"TRITON_INTERPRET", "TQDM_DISABLE"}
    names = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(command, cwd=ROOT, env=names | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def answers(folder: Path, model: str, python: str, script: str, **environment: str) -> dict[str, list[int]]:
    """Token ids by id, of a run that finds one answer there and a second that was cut off."""
    folder.mkdir()
    rows = [{"id": f"p{n}", "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    (folder / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "out").write_text('{"id": "p0", "text": "", "token_ids": []}\n{"id": "p1", "te')
    (folder / "script.py").write_text(script)
    options = ["--model", model, "--dtype", "float32", "--max-tokens", "24"]
    run(python, str(folder / "script.py"), str(folder / "in"), str(folder / "out"), *options, **environment)
    found = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    return {row["id"]: row["token_ids"] for row in found[1:]}


def test_the_script_runs_on_minipaged(tmp_path):
    """Starts Python and the engine: some five seconds."""
    found = answers(tmp_path / "ours", "smollm2-135m", sys.executable, SCRIPT, PYTHONPATH=str(ROOT))
    assert all(0 < len(token_ids) <= 24 for token_ids in found.values())


@pytest.mark.extra
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM_IS_INSTALLED, reason="vllm-cpu is not installed in .peers/vllm: make peers")
def test_the_script_gives_the_same_answers_on_vllm(tmp_path):
    """Writes the model as a folder that both read, and starts vLLM, which compiles it: one to two minutes."""
    assert SCRIPT.count(IMPORT) == 1
    model = str(tmp_path / "model")
    run(sys.executable, "benchmarks/peers/export_model.py", model)
    ours = answers(tmp_path / "ours", model, sys.executable, SCRIPT, PYTHONPATH=str(ROOT))
    script = SCRIPT.replace(IMPORT, "from vllm import LLM, SamplingParams\n")
    theirs = answers(tmp_path / "theirs", model, str(VLLM), script, **VLLM_SETTINGS)
    assert theirs == ours
