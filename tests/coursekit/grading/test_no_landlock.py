"""Where the kernel has no Landlock, what PyTorch opens files with is taken away all the same."""

import subprocess
import sys

import pytest

ANSWER = """
import os, sys
from coursekit.grading import guard, landlock
landlock.version = lambda: 0
def refuse(what):
    print("refused:", what, flush=True)
    os._exit(1)
guard.close_the_door(refuse, [], sys.argv[1])
import torch
{line}
print("not refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "torch.from_file({path!r}, size=9, dtype=torch.uint8)",
        "torch.UntypedStorage.from_file({path!r}, False, 9)",
        "open({path!r})",
    ],
)
def test_a_file_is_not_read_through_torch(tmp_path, line):
    """Slow: each starts a process that imports torch. The answer imports it, no preamble did."""
    secret = tmp_path / "secret"
    secret.write_text("solution!")
    (tmp_path / "own").mkdir()
    code = ANSWER.format(line=line.format(path=str(secret)))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "own")], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("refused: "), done.stdout + done.stderr
