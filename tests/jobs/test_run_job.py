"""A job: every line is answered once, whatever happened before."""

import os
import signal
import subprocess
import sys

import pytest
from checkout import ROOT

from minipaged.engine.args import EngineArgs
from minipaged.jobs.batch import JobError, run_job
from minipaged.jobs.worker import serve_here
from tests.jobs.tiny_jobs import JOB, echo, engine_args, prompts, read, write


class Stopped(Exception):
    """Stands for whatever ends a run."""


def stops_after(count):
    def serve(tasks):
        for number, result in enumerate(echo(tasks)):
            if number == count:
                raise Stopped
            yield result

    return serve


def test_lines_good_and_bad_all_get_a_result(tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    write(source, [*prompts(3), {"id": "r0", "prompt": "x"}, "no object", *prompts(5)[3:], {"id": "last"}])
    summary = run_job(source, target, echo, JOB, chunk=2)
    results = read(target)
    assert [r["line"] for r in results] == list(range(1, 9))
    assert [r["id"] for r in results] == ["r0", "r1", "r2", None, None, "r3", "r4", "last"]
    assert [r["line"] for r in results if "error" in r] == [4, 5, 8]
    assert (summary.lines, summary.answered, summary.failed, summary.before) == (8, 5, 3, 0)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_a_job_that_was_stopped_goes_on_where_it_was(tmp_path, count, chunk):
    source, target = write(tmp_path / "in", [*prompts(5), "bad", *prompts(10)[5:]]), tmp_path / "out"
    with pytest.raises(Stopped):
        run_job(source, target, stops_after(count), JOB, chunk=chunk)
    before = len(read(target))
    assert before >= count  # what had finished was written
    served = []

    def serve(tasks):
        for task in tasks:
            served.append(task.id)
            yield from echo([task])

    summary = run_job(source, target, serve, JOB, chunk=chunk)
    assert len(served) == 10 - count
    assert summary.before == before
    run_job(source, tmp_path / "whole", echo, JOB)
    assert read(target) == read(tmp_path / "whole")


def test_a_finished_job_loads_nothing(tmp_path):
    source, target = write(tmp_path / "in", prompts(3)), tmp_path / "out"
    run_job(source, target, echo, JOB)
    content = target.read_bytes()
    summary = run_job(source, target, lambda tasks: serve_here(tasks, EngineArgs("no-such-model")), JOB)
    assert (summary.before, summary.answered) == (3, 0)
    assert target.read_bytes() == content


def test_lines_may_be_added_at_the_end(tmp_path):
    source, target = write(tmp_path / "in", prompts(3)), tmp_path / "out"
    run_job(source, target, echo, JOB)
    write(source, prompts(5))
    assert run_job(source, target, echo, JOB).answered == 2


def test_an_empty_file_is_a_job_of_no_lines(tmp_path):
    (tmp_path / "in").touch()
    assert run_job(tmp_path / "in", tmp_path / "out", echo, JOB).lines == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_results_of_another_job_are_not_mixed_in(tmp_path):
    source, target = write(tmp_path / "in", prompts(3)), tmp_path / "out"
    run_job(source, target, echo, JOB)
    content = target.read_bytes()
    with pytest.raises(ValueError, match=r"result for line 1 of .* under other settings"):
        run_job(source, target, echo, JOB | {"seed": 1})
    write(source, prompts(2))
    with pytest.raises(ValueError, match=r"result for line 3, which .* does not have"):
        run_job(source, target, echo, JOB)
    rows = prompts(3)
    rows[1]["max_tokens"] = 99
    write(source, rows)
    with pytest.raises(ValueError, match=r"result for line 2 of .* but for other text"):
        run_job(source, target, echo, JOB)
    assert target.read_bytes() == content


def test_input_and_output_are_two_files(tmp_path):
    source = write(tmp_path / "in", prompts(1))
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ValueError, match="cannot be read and written at once"):
        run_job(source, tmp_path / "link", echo, JOB)
    with pytest.raises(ValueError, match="no such file"):
        run_job(tmp_path / "missing", tmp_path / "out", echo, JOB)


def test_a_line_that_the_servers_lost_is_noticed(tmp_path):
    source = write(tmp_path / "in", prompts(4))
    with pytest.raises(JobError, match="1 lines got no result: run the job again"):
        run_job(source, tmp_path / "out", lambda tasks: list(echo(tasks))[1:], JOB)
    assert run_job(source, tmp_path / "out", echo, JOB).answered == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from minipaged.jobs.batch import run_job
from minipaged.jobs.worker import serve_here
from tests.jobs.tiny_jobs import JOB, engine_args

folder = Path(sys.argv[1])

def serve(tasks):
    for number, result in enumerate(serve_here(tasks, engine_args(folder))):
        if number == 20:
            os.write(3, b'{"line": 1, "id": "r')  # the start of a write that was never finished
            os.kill(os.getpid(), signal.SIGKILL)
        yield result

os.dup2(os.open(folder / "out", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 3)
run_job(folder / "in", folder / "out", serve, JOB, chunk=8)
"""


def test_killed_half_way_and_started_again_each_line_is_answered_once(tmp_path):
    settings = engine_args(tmp_path)
    source = write(tmp_path / "in", prompts(40))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = (tmp_path / "out").read_bytes()
    assert left.count(b"\n") == 16 and not left.endswith(b"\n")
    summary = run_job(source, tmp_path / "out", lambda tasks: serve_here(tasks, settings), JOB)
    assert (summary.before, summary.answered) == (16, 24)
    run_job(source, tmp_path / "whole", lambda tasks: serve_here(tasks, settings), JOB)
    assert read(tmp_path / "out") == read(tmp_path / "whole")
    assert [result["id"] for result in read(tmp_path / "out")] == [f"r{n}" for n in range(40)]


@pytest.mark.parametrize("mended", [1, 2], ids=["the first of them", "the second"])
def test_a_duplicate_id_that_is_corrected_lets_the_job_go_on(tmp_path, mended):
    """Whichever of the two is renamed; of the first only where it has no answer yet."""
    rows = prompts(4)
    rows[2]["id"] = rows[1]["id"]
    if mended == 1:
        rows[1]["max_tokens"] = "many"  # an error of its own
    source, target = write(tmp_path / "in", rows), tmp_path / "out"
    assert run_job(source, target, echo, JOB).failed == (2 if mended == 1 else 1)
    before = target.read_bytes()
    assert run_job(source, target, echo, JOB).answered == 0  # what is wrong as it was is left as it is
    assert target.read_bytes() == before
    rows[mended]["id"] = "renamed"
    if mended == 1:
        rows[1]["max_tokens"] = 4
    write(source, rows)
    summary = run_job(source, target, echo, JOB)
    assert (summary.failed, summary.answered) == (0, 2 if mended == 1 else 1)
    assert target.read_bytes().startswith(before)
    assert run_job(source, target, echo, JOB).answered == 0


def test_a_line_that_was_no_json_may_be_corrected(tmp_path):
    source, target = write(tmp_path / "in", prompts(3)), tmp_path / "out"
    good = source.read_text()
    source.write_text(good.replace('"r1"', '"r1'))
    assert run_job(source, target, echo, JOB).failed == 1
    source.write_text(good)
    assert run_job(source, target, echo, JOB).failed == 0
