"""What the browser tests share: Chromium, a JupyterLab of their own, and the built site on a port.

Where playwright or Chromium is missing every test is skipped, with the command that installs it.
"""

import contextlib
import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from lab_server import JupyterLab

PATIENCE_MS = 300_000  # against hanging, whatever is waited for: beside other work a page takes its time
# The last ones keep Chromium from asking its maker for updates and lists while it is tested.
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium_path() -> str | None:
    """The Chromium of the system, under one of the names that it has."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A playwright browser. Skips where it cannot be had."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: `make browser` installs it"
    )
    path = chromium_path()
    if path is None:
        pytest.skip("no Chromium on PATH: `apt-get install chromium`")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    """JupyterLab over a copy of the lessons, with settings of its own."""
    folder: Path = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, folder / "notebooks")
    shutil.copytree(ROOT / "docs", folder / "docs")  # lesson 14 reads a page of it
    with JupyterLab(folder) as server:
        yield server


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing for each file."""


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the built site, served from this process. Skips where it is not built."""
    if not (ROOT / "site/index.html").exists():
        pytest.skip("the site is not built: `make site`")
    handler = functools.partial(QuietHandler, directory=str(ROOT / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A tab without history, closed at the end."""
    with contextlib.closing(chromium.new_context(viewport={"width": 1200, "height": 900})) as context:
        context.set_default_timeout(PATIENCE_MS)
        yield context.new_page()
