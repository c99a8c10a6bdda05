"""A JupyterLab of its own for a test run: nothing of the user's settings is read, nothing of it stays."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 300
SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # else cells out of sight have no elements
}
# The tests' own surroundings; a lesson must run as it does for a reader.
NOT_PASSED_ON = ("TRITON_INTERPRET", "MPLBACKEND")

READY = """() => {
    const widget = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const context = widget && widget.sessionContext;
    const kernel = context && context.session && context.session.kernel;
    return !!(context && context.isReady && kernel && kernel.connectionStatus === 'connected'
              && kernel.status === 'idle');
}"""
RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
STOP = "() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells
    .filter(cell => cell.cell_type === 'code')
    .map(cell => ({count: cell.execution_count,
                   errors: cell.outputs.filter(output => output.output_type === 'error')
                                       .map(output => output.ename + ': ' + output.evalue)}))"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str) -> None:
    """Return as soon as somebody answers at `url`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody answers at {url} after {START_TIMEOUT_S} s") from None
            time.sleep(0.2)


class JupyterLab:
    """Serves the notebooks in `folder` on a free port of this machine, as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        private = self.folder / ".jupyter"
        for name, text in SETTINGS.items():
            file = private / "lab/@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        folders = {
            "JUPYTER_CONFIG_DIR": str(private),
            "JUPYTERLAB_SETTINGS_DIR": str(private / "lab"),
            "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
        }
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        options = ["--no-browser", "--allow-root", "--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1"]
        options += [f"--port={self.url.rpartition(':')[2]}", "--ServerApp.port_retries=0"]
        options += [f"--ServerApp.root_dir={self.folder}", "--LabApp.news_url=None"]
        options += ["--LabApp.expose_app_in_browser=True"]  # else the page does not show `jupyterapp`
        with open(private / "server.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyter", "lab", *options],
                env=inherited | folders,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for(f"{self.url}/api/status")
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(300)

    @contextlib.contextmanager
    def run_whole(self, page: Any, notebook: str) -> Iterator[None]:
        """Open a notebook and run it from top to bottom, as a reader does; its kernel ends with the context.

        Raises AssertionError if a cell fails.
        """
        page.goto(f"{self.url}/lab/tree/{notebook}?reset")  # else the notebooks of before are open too
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.wait_for_function(READY)
        page.evaluate(RUN_ALL)
        page.wait_for_function(READY)
        cells = page.evaluate(CELLS)
        assert [cell["errors"] for cell in cells if cell["errors"]] == []
        assert [cell["count"] for cell in cells] == list(range(1, len(cells) + 1))
        try:
            yield
        finally:
            page.evaluate(STOP)
