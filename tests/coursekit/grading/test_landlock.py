"""What the kernel refuses an answer that gets past Python: skipped where the kernel has no Landlock."""

import signal
import subprocess
import sys

import pytest

from coursekit.grading import guard, landlock
from coursekit.grading.learner import Learner, LearnerError

VERSION = landlock.version()
needs_landlock = pytest.mark.skipif(not VERSION, reason="this kernel has no Landlock")


def run_answer(code, preamble=""):
    """The message of the exception that `code` ends with in a learner's process."""
    with pytest.raises(LearnerError) as error, Learner({"answer": code}, preamble=preamble):
        pass
    return str(error.value)


@needs_landlock
def test_a_file_that_a_library_opens_by_itself_is_not_read():
    """Slow where torch is read from a cold disk."""
    read = f"import torch\ntorch.from_file({guard.__file__!r}, size=9, dtype=torch.uint8)"
    assert "Permission denied" in run_answer(read.replace("guard.py", "grade.py"))


@needs_landlock
def test_a_file_elsewhere_is_not_written(tmp_path):
    write = (
        f"import torch\ntorch.from_file({str(tmp_path / 'file')!r}, shared=True, size=9, dtype=torch.uint8)"
    )
    assert "Permission denied" in run_answer(write)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(VERSION < 6, reason="this kernel's Landlock does not know signals")
def test_no_other_process_is_signalled():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # The hook refuses Python's own ways; this is what is left to somebody who finds another.
        kept = "import os, signal\nfind, send = os.pidfd_open, signal.pidfd_send_signal"
        assert "PermissionError" in run_answer(f"send(find({other.pid}), {signal.SIGKILL})", kept)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_without_landlock_nothing_is_restricted_and_it_says_so(monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    assert landlock.restrict(["/"], [], ["/nowhere"]) is False


def test_a_forbidden_folder_inside_a_readable_one_is_left_out(tmp_path):
    for name in ("a", "packages/b", "packages/secret", "packages/c"):
        (tmp_path / name).mkdir(parents=True)
    secret = str(tmp_path / "packages" / "secret")
    found = dict(landlock._without(str(tmp_path), [secret]))
    whole, listing = landlock.READ_FILE | landlock.READ_DIR, landlock.READ_DIR
    names = {"": listing, "/a": whole, "/packages": listing, "/packages/b": whole, "/packages/c": whole}
    assert found == {f"{tmp_path}{name}": right for name, right in names.items()}


@pytest.mark.parametrize(
    ("event", "path", "is_fine"),
    [
        ("open", "/usr/lib/x", True),
        ("open", b"/usr/lib/x", True),
        ("open", "/usr/lib/../../etc2/x", False),
        ("open", "notes.txt", True),
        ("open", "../notes.txt", False),
        ("open", "/srv/package/cache.py", False),
        ("open", "/srv/package2/cache.py", False),
        ("os.remove", "notes.txt", True),
        ("os.remove", "/usr/lib/x", False),
        ("os.system", "true", False),
        ("socket.connect", "x", False),
        ("import", "json", True),
    ],
)
def test_the_guard_judges_events(event, path, is_fine):
    judge = guard.make_judge(["/usr/"], [], "/srv/package", "/srv/answer")
    assert (judge(event, (path, "r", 0)) == "") is is_fine


@pytest.mark.parametrize("base", [str, bytes])
def test_a_path_that_lies_is_judged_by_what_it_is(base):
    """open() uses the characters of a str or bytes, whatever its methods say of them."""
    secret = "/srv/secret" if base is str else b"/srv/secret"
    lie = {name: lambda *args: "/usr/lib/x" for name in ("__str__", "decode", "__fspath__")}
    path = type("Path", (base,), lie | {"startswith": lambda *args: True})(secret)
    judge = guard.make_judge(["/usr/"], [], "/srv/package", "/srv/answer")
    assert judge("open", (path, "r", 0)) == "opens '/srv/secret'"
