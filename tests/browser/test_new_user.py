"""A new user's first hour, from an empty folder: each command as typed, and what must come of it.

The transcript is written to out/new_user.txt, which CI prints. Packages come from pip's cache, where it has
them.
"""

import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest
from checkout import ROOT
from lab_server import READY, RUN_ALL, STOP, free_port, wait_for

pytestmark = pytest.mark.browser

PATIENCE_S = 600  # against hanging
LESSON, EXERCISE = "notebooks/02_kv_growth.ipynb", "exercises/02_kv_bytes"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
OVERWRITTEN = re.compile(r"[^\r\n]*\r(?!\n)")  # what a bar has shown before


class Session:
    """A folder, the commands typed in it, and what they said."""

    def __init__(self, folder):
        self.folder, self.lines = folder, []
        # A user has neither the tests' settings nor make's.
        left_out = {"MAKEFLAGS", "TQDM_DISABLE", "PYTHONPATH", "VIRTUAL_ENV"}
        self.environ = {name: value for name, value in os.environ.items() if name not in left_out}

    def note(self, text):
        self.lines.append(text.rstrip())
        out = ROOT / "out"
        out.mkdir(exist_ok=True)
        (out / "new_user.txt").write_text("\n".join(self.lines) + "\n")

    def types(self, command, *expected, status=0):
        """Run a command line; it ends with `status` and says each of `expected`."""
        start = time.monotonic()
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environ, timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        said = CONTROL.sub("", OVERWRITTEN.sub("", done.stdout.decode()))
        self.note(f"\n$ {command}\n{said}[{time.monotonic() - start:.0f} s]")
        assert done.returncode == status, said
        for text in expected:
            assert text in said, said
        return said

    def chats(self, *turns):
        """Talk in a terminal: each turn is what is typed, and what must come before the next prompt.

        Ctrl-D ends it.
        """
        master, slave = pty.openpty()
        environ = {**self.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.note("\n$ minipaged chat")
        with subprocess.Popen(
            [".venv/bin/minipaged", "chat", "--max-tokens", "24"], cwd=self.folder, env=environ,
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                for typed, expected in turns:
                    os.write(master, typed.encode())
                    self._until_prompt(master, expected)
                os.write(master, b"\x04")
                assert process.wait(PATIENCE_S) == 0
            finally:
                process.kill()
                os.close(master)
                os.close(slave)

    def _until_prompt(self, master, expected):
        seen, end = "", time.monotonic() + PATIENCE_S
        while ">" not in seen.partition(expected)[2]:
            assert time.monotonic() < end, f"{expected!r} did not come: {seen}"
            if select.select([master], [], [], 1)[0]:
                seen += CONTROL.sub("", os.read(master, 4096).decode(errors="replace"))
        self.note(seen)


@pytest.fixture
def session(tmp_path):
    """The course as it is committed, published in one folder, cloned into another."""
    published = tmp_path / "published"
    for source, target in ((ROOT, published), (published, tmp_path / "minipaged")):
        subprocess.run(["git", "clone", "--quiet", source, target], check=True)
    return Session(tmp_path / "minipaged")


def publish(session):
    """A correction of a lesson and of an exercise, as it comes in mid-term."""
    published = session.folder.parent / "published"
    for name in (LESSON, f"{EXERCISE}/02_kv_bytes.ipynb"):
        text = (published / name).read_text()
        assert text.count("# ") > 2
        (published / name).write_text(text.replace('"# ', '"# Newer: ', 1))
    who = ["-c", "user.name=course", "-c", "user.email=course@example.org"]
    subprocess.run(["git", *who, "commit", "-qam", "newer"], cwd=published, check=True)


def run_a_lesson(session, page):
    """`make lab`: run a lesson whole and save it."""
    port = free_port()
    options = f"--no-browser --allow-root --IdentityProvider.token= --ServerApp.ip=127.0.0.1 --port={port}"
    command = ["make", "lab", f"ARGS={options} --LabApp.expose_app_in_browser=True"]
    own = {f"JUPYTER{name}_DIR": str(session.folder.parent) for name in ("_CONFIG", "LAB_SETTINGS")}
    session.note(f"\n$ make lab    (lesson {LESSON}: run all cells, save)")
    with subprocess.Popen(
        command, cwd=session.folder, env=session.environ | own, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as lab:  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/api/status")
            page.goto(f"http://127.0.0.1:{port}/lab/tree/{LESSON}")
            page.wait_for_function(READY)
            page.evaluate(RUN_ALL)
            page.wait_for_function(READY)
            page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
            page.evaluate(STOP)
            page.close()
        finally:
            os.killpg(lab.pid, signal.SIGKILL)


def test_the_first_hour(session, page):
    session.types("make demo ARGS=--quick", "requests at once, peak", "Same answer, token for token")
    session.types(".venv/bin/minipaged doctor", "serve a model")
    session.chats(
        ("", "/help lists the commands"),
        ("Which river flows through Cairo?\r", "first token after "),
        ("/hlep\r", "did you mean /help?"),
    )
    run_a_lesson(session, page)
    assert "execution_count\": 1" in (session.folder / "work" / LESSON).read_text(), "it was run and saved"
    assert not session.types("git status --porcelain"), "a lesson that was run changed the course"
    copy = session.folder / "work" / EXERCISE / "02_kv_bytes.ipynb"
    check = ".venv/bin/minipaged exercises check 02"
    session.types(check, "bytes_per_token: not done yet", status=1)
    right = (ROOT / "solutions" / copy.relative_to(session.folder / "work/exercises")).read_text()
    copy.write_text(right.replace("vectors = 2 * model.num_layers", "vectors = model.num_layers"))
    session.types(check, "✗", "expected", status=1)
    copy.write_text(right)
    session.types(check, "passed")
    publish(session)
    session.types("make update", LESSON, ".new.ipynb")
    replaced = (session.folder / "work" / LESSON).read_text()
    assert "Newer: " in replaced, "a lesson that was only run is replaced"
    session.types(check, "passed")
    session.types(".venv/bin/minipaged exercises reset 02", "your version is saved as")
    session.types(check, "not done yet", status=1)
    assert not session.types("git status --porcelain"), "the course changed"
    (session.folder / LESSON).write_text("mine")
    assert session.types("git status --porcelain") == f" M {LESSON}\n"
