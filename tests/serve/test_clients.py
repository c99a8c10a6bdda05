"""Load from a public client: `servebench` at rising rates, as people point it at vLLM."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")
pytest.importorskip("servebench", reason="no serve extra: `make setup` installs it")

from tiny import running, tiny_llm

pytestmark = pytest.mark.serve


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_servebench_has_every_answer_at_every_rate(endpoint, tmp_path):
    command = Path(sys.executable).with_name("servebench")
    with running(tiny_llm(num_blocks=400, max_model_len=512)) as server:
        summary = tmp_path / "levels.csv"
        asked = {"--url": f"{server.url}/v1", "--model": "tiny", "--endpoint": endpoint, "--seed": "1",
                 "--rate": "20,40,inf", "--num-requests": "12", "--input-len": "16", "--output-len": "8",
                 "--csv": str(summary)}  # fmt: skip
        words = [word for pair in asked.items() for word in pair]
        done = subprocess.run([command, "run", *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        levels = list(csv.DictReader(summary.open()))
        assert len(levels) == 3, levels
        for level in levels:
            assert (int(level["completed"]), int(level["failed"])) == (12, 0), level
        server.wait_until_idle()
        assert server.llm.stats.num_finished >= 3 * 12
        assert server.llm.stats.num_aborted == 0
