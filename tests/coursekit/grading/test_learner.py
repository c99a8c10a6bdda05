"""The learner's process: what it answers, and what becomes of the grader when it does not."""

import os
import time

import pytest
import torch

from coursekit.grading.learner import Ended, Learner, Raised

COUNTER = '''
class Counter:
    """Counts."""

    def __init__(self, start=0):
        self.total = start

    def add(self, n):
        self.total += n
        return self

    def fail(self):
        return {}["missing"]

def fill(tensor, value):
    tensor[:] = value

def same(a, b):
    return a is b
'''


@pytest.fixture
def learner():
    with Learner({"counter": COUNTER}) as learner:
        yield learner


def test_objects_stay_there_and_plain_values_come_back(learner):
    counter = learner.Counter(start=2)
    assert counter.add(3).add(4).total == 9
    counter.total = 1
    assert counter.total == 1
    assert learner.same(counter, counter) is True


def test_a_kept_value_is_changed_in_place(learner):
    kept = learner.keep([1, 2, 3])
    learner.fill(kept, [9])
    assert learner.fetch(kept) == [9]


def test_tensors_are_copied_there_and_changed_there():
    with Learner({"fill": COUNTER}, preamble="import torch") as learner:
        mine = torch.zeros(3)
        theirs = learner.keep(mine)
        learner.fill(theirs, 7.0)
        assert learner.fetch(theirs).tolist() == [7.0, 7.0, 7.0]
        assert mine.tolist() == [0.0, 0.0, 0.0]


def test_what_the_code_raises_arrives_with_its_line(learner):
    with pytest.raises(Raised) as caught:
        learner.Counter().fail()
    assert caught.value.types[:2] == ("KeyError", "LookupError")
    assert 'line 13: return {}["missing"]' in str(caught.value)
    assert learner.Counter(5).total == 5, "the process goes on"


def test_an_answer_does_not_replace_what_was_given():
    with Learner({"cheat": "given = lambda: 'mine'"}, preamble="def given():\n    return 'yours'") as learner:
        assert learner.given() == "yours"


def test_the_answers_share_a_namespace_in_order():
    with Learner({"one": "a = c + 1", "two": "b = a * 3"}, preamble="c = 1") as learner:
        assert (learner.a, learner.b) == (2, 6)


def test_another_process_has_the_same_answers_and_objects_of_its_own(learner):
    learner.Counter.limit = 3
    with learner.again() as other:
        assert other.Counter(start=2).add(1).total == 3
        with pytest.raises(Raised, match="AttributeError"):
            _ = other.Counter.limit


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("x = (", Raised, "SyntaxError"),
        ("x = y", Raised, "must stand in the answer's own cell"),
        ("import sys; sys.exit(0)", Raised, "SystemExit"),
        ("import os; os._exit(0)", Ended, "exit code 0"),
        ("import os; os.abort()", Ended, "SIGABRT"),
        ("x = bytearray(10**10)", Raised, "MemoryError"),
        ("open('../secret')", Ended, "opens '../secret'"),
        ("open('/etc/../srv/x')", Ended, "opens"),
        ("open('/proc/self/cwd/answer')", Ended, "opens"),
        ("open('/dev/null', 'w'); open('/usr/x', 'w')", Ended, "opens '/usr/x'"),
        ("import os; os.symlink('/', 'root')", Ended, "os.symlink"),
        ("import os; os.kill(os.getppid(), 9)", Ended, "os.kill"),
        ("import os; os.fork()", Ended, "os.fork"),
        ("import subprocess; subprocess.run(['true'])", Ended, "subprocess.Popen"),
        ("import socket; socket.socket()", Ended, "socket"),
        ("import ctypes; ctypes.CDLL(None)", Ended, "C library"),
        ("import minipaged; minipaged.BlockPool", Ended, "reads minipaged itself"),
        ("from minipaged.cache import BlockPool", Ended, "reads minipaged itself"),
    ],
)
def test_code_that_may_not_run_does_not(source, error, words):
    with pytest.raises(error, match=words.replace(".", r"\.")):
        Learner({"answer": source})


def test_refusals_cannot_be_caught():
    with pytest.raises(Ended, match="refused"):
        Learner({"answer": "try:\n    open('/srv/x')\nexcept BaseException:\n    pass"})


def test_an_endless_loop_is_ended():
    with Learner({"answer": "def loop():\n    while True:\n        pass"}) as learner:
        with pytest.raises(Ended, match=r"not done after 0\.2 seconds"), learner.time_limit(0.2):
            learner.loop()
        with pytest.raises(Ended):
            learner.loop()


def test_forged_replies_end_it():
    source = (
        "import os, contextlib\n"
        "for fd in range(3, 64):\n"
        "    with contextlib.suppress(OSError):\n"
        "        os.write(fd, b'passed' * 50)"
    )
    with pytest.raises(Ended, match="nonsense"):
        Learner({"answer": source})


def test_forged_exceptions_are_cut_to_what_fits_a_report():
    source = (
        "import os, struct, contextlib\n"
        """frame = b'{"raised": {"type": ["E"], "message": "%s", "line": ""}}' % (b"x" * 10_000)\n"""
        "for fd in range(3, 64):\n"
        "    with contextlib.suppress(OSError):\n"
        "        os.write(fd, struct.pack('<Q', len(frame)) + frame)"
    )
    with pytest.raises(Raised) as error:
        Learner({"answer": source})
    assert 400 < len(str(error.value)) < 600


def test_nothing_is_left_behind(learner):
    process, folder = learner._process, learner._folder.name
    assert os.path.isdir(folder)
    learner.close()
    learner.close()
    assert process.returncode is not None
    assert not os.path.exists(folder)


def test_what_it_prints_goes_nowhere(capfd):
    with Learner(
        {"answer": "import os, sys\nprint('hi'); os.write(1, b'hi'); os.write(2, b'hi')\nx = 1"}
    ) as learner:
        assert learner.x == 1
    assert capfd.readouterr() == ("", "")


def test_threads_that_go_on_do_not_keep_it():
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()"
    started = time.monotonic()
    with Learner({"answer": source}):
        pass
    assert time.monotonic() - started < 300, "it was waited for"
