"""Strict nbval, as CI runs it, on notebooks made here: it passes and fails for the right reason."""

import os
import subprocess
import sys

import nbformat
import pytest
from checkout import ROOT

from coursekit.publish import build

SANITIZE = ROOT / "tests" / "nbval_sanitize.cfg"

MANY_LINES = "# %%\nfor line in range(200):\n    print(line, flush=True)\n"
ADDRESSES = '# %%\nprint(object())\n\n# %% tags=["nbval-ignore-output"]\nimport time\nprint(time.time())\n'


def make(folder, source):
    """Build a notebook from text, the way lessons are built."""
    path = folder / "src" / "01_made.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return build.build(path)


def nbval(notebook, timeout=60):
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=",
        "--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}",
        f"--nbval-cell-timeout={timeout}", str(notebook),
    ]  # fmt: skip
    return subprocess.run(command, cwd=notebook.parent, env=environment, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def kernels_choose_their_own_backend(monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)


@pytest.mark.slow
def test_what_only_looks_different_passes(tmp_path):
    """Slow because three kernels start: many small prints, addresses, and times in a cell that says so."""
    run = nbval(make(tmp_path, MANY_LINES + "\n" + ADDRESSES))
    assert run.returncode == 0, run.stdout


def test_a_changed_number_fails(tmp_path):
    notebook = make(tmp_path, "# %%\nprint(2 * 30 * 3 * 64 * 2)\n")
    notebook.write_text(notebook.read_text().replace("23040", "23041"))
    run = nbval(notebook)
    assert run.returncode == 1 and "23041" in run.stdout


@pytest.mark.slow
def test_a_cell_that_hangs_is_stopped_and_named(tmp_path):
    """Slow because a kernel starts and the cell is given two seconds. No other cell need be done in them."""
    notebook = make(tmp_path, "# %%\nimport time\ntime.sleep(0)\n")
    stored = nbformat.read(notebook, as_version=4)
    del stored.cells[:-1]
    stored.cells[0].source = "import time\ntime.sleep(600)"
    nbformat.write(stored, notebook)
    run = nbval(notebook, timeout=2)
    assert run.returncode == 1 and "sleep(600)" in run.stdout and "imeout" in run.stdout
