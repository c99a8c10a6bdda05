"""`make lab` opens the course at lesson 00, and Ctrl-C leaves nothing behind."""

import os
import signal
import subprocess

import psutil
import pytest
from checkout import ROOT
from lab_server import READY, free_port, wait_for

pytestmark = pytest.mark.browser


def test_make_lab_opens_lesson_00_and_ctrl_c_leaves_nothing_behind(page, tmp_path):
    port = free_port()
    options = "--no-browser --allow-root --IdentityProvider.token= --ServerApp.ip=127.0.0.1"
    options += f" --port={port} --ServerApp.port_retries=0 --LabApp.expose_app_in_browser=True"
    own = {f"JUPYTER{name}_DIR": str(tmp_path) for name in ("_CONFIG", "LAB_SETTINGS", "LAB_WORKSPACES")}
    with subprocess.Popen(
        ["make", "lab", f"ARGS={options}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"} | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, which is what a terminal's Ctrl-C reaches
    ) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/api/status")
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector(".jp-Notebook h1:has-text('Start here')")
            page.wait_for_function(READY)
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= 2  # the server, and the kernel of the lesson
            page.close()
            for _ in range(2):  # JupyterLab asks back, and takes a second Ctrl-C for yes
                os.killpg(process.pid, signal.SIGINT)
                process.poll()
            process.wait(300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(started, timeout=120)
    assert [child.cmdline() for child in left] == []
