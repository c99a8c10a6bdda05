"""`minipaged batch`: what it prints, its exit codes, and what Ctrl-C leaves."""

import json
import re
import sys
from functools import partial

import pytest
import tqdm

from minipaged import cli
from minipaged.jobs import worker
from tests.jobs.tiny_jobs import echo, engine_args, prompts, read, write


@pytest.fixture
def run(tmp_path):
    """Run the command on `tmp_path/in`, with a tiny model; more arguments as given."""

    def run(*arguments: str) -> int:
        settings = engine_args(tmp_path)
        options = ["--model", str(settings.model), "--dtype", "float32", "--kv-memory", "1MiB"]
        files = [str(tmp_path / "in"), str(tmp_path / "out")]
        return cli.main(["batch", *files, *options, "--max-model-len", "64", *arguments])

    return run


def test_counts_go_to_stderr_and_the_exit_code_is_0(run, tmp_path, capsys):
    write(tmp_path / "in", prompts(5))
    assert run() == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("[5 lines, 5 answered now; 100 + 25 tokens in ")
    assert [result["id"] for result in read(tmp_path / "out")] == ["r0", "r1", "r2", "r3", "r4"]
    assert run() == 0
    assert capsys.readouterr().err.startswith("[5 lines, 5 done before, 0 answered now; 0 + 0 tokens in ")


def test_json_is_all_that_stdout_gets(run, tmp_path, capsys):
    write(tmp_path / "in", [*prompts(3), "bad"])
    assert run("--json") == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert {name: report[name] for name in ("lines", "before", "answered", "failed")} == {
        "lines": 4, "before": 0, "answered": 3, "failed": 1,
    }  # fmt: skip


def test_what_serves_the_lines_may_talk_without_spoiling_the_json(run, tmp_path, capsys, monkeypatch):
    def talkative(tasks, engine_args):
        print("a worker died")
        yield from echo(tasks)

    monkeypatch.setattr(worker, "serve_here", talkative)
    write(tmp_path / "in", prompts(2))
    assert run("--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["answered"] == 2
    assert captured.err == "a worker died\n"


def test_a_line_with_an_error_is_exit_code_1_also_when_nothing_is_left_to_do(run, tmp_path, capsys):
    write(tmp_path / "in", [*prompts(2), {"id": "text", "prompt": "this model has no tokenizer"}])
    for _ in range(2):
        assert run() == 1
        assert f"1 with an error, see {tmp_path / 'out'}" in capsys.readouterr().err
    assert "no tokenizer" in read(tmp_path / "out")[2]["error"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top-p", "3"], "top_p must be in (0, 1], got 3"),
        (["--address", "auto"], "--address needs --workers"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--kv-memory", "lots"], "kv_memory"),
    ],
)
def test_a_job_that_cannot_start_is_one_sentence(run, tmp_path, capsys, arguments, says):
    write(tmp_path / "in", prompts(2))
    code = run(*arguments)
    captured = capsys.readouterr()
    assert code == 1
    if "--top-p" in arguments:  # the job's setting is each line's
        assert all(says in result["error"] for result in read(tmp_path / "out"))
        return
    assert captured.err.startswith("minipaged batch: ") and says in captured.err
    assert captured.err.count("\n") == 1


def test_a_missing_file_and_no_ray_are_said(run, tmp_path, capsys, monkeypatch):
    assert run() == 1
    assert "no such file" in capsys.readouterr().err
    write(tmp_path / "in", prompts(1))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run("--workers", "2") == 1
    assert "make scale" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--workers", "0"], ["--chunk", "-1"], ["--workers", "two"]])
def test_numbers_that_make_no_sense_are_wrong_usage(run, option):
    with pytest.raises(SystemExit) as exit:
        run(*option)
    assert exit.value.code == 2


def test_ctrl_c_keeps_what_has_finished_and_the_job_goes_on(run, tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", prompts(9))

    def interrupted(tasks, engine_args):
        for number, result in enumerate(echo(tasks)):
            if number == 4:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(worker, "serve_here", interrupted)
        assert run() == 130
    assert capsys.readouterr().err == "\nminipaged batch: stopped\n"
    assert len(read(tmp_path / "out")) == 4
    assert run() == 0
    assert len(read(tmp_path / "out")) == 9


class Terminal:
    """A stderr that somebody looks at."""

    def __init__(self, stream):
        self._stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name):
        return getattr(self._stream, name)


@pytest.mark.parametrize("disabled", [True, False])
def test_a_bar_is_for_people_who_want_one(run, tmp_path, capsys, monkeypatch, disabled):
    """The tests run with TQDM_DISABLE=1, which tqdm reads when it is imported."""
    write(tmp_path / "in", prompts(3))
    with monkeypatch.context() as patch:
        if not disabled:
            patch.setattr(tqdm, "tqdm", partial(tqdm.tqdm, disable=False))
        patch.setattr(sys, "stderr", Terminal(sys.stderr))
        run()
    assert ("3/3" in capsys.readouterr().err) == (not disabled)


def test_the_bar_counts_tokens(run, tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", prompts(3))
    with monkeypatch.context() as patch:
        patch.setattr(tqdm, "tqdm", partial(tqdm.tqdm, disable=False))
        patch.setattr(sys, "stderr", Terminal(sys.stderr))
        run()
    shown, counted = re.findall(r"(\d+) tokens", capsys.readouterr().err)[-2:]
    assert shown == counted != "0"


def test_where_nothing_can_be_written_is_said_before_anything_is_served(run, tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", prompts(1))
    monkeypatch.setattr(worker, "serve_here", lambda tasks, engine_args: pytest.fail("served"))
    target = tmp_path / "no" / "out"
    assert cli.main(["batch", str(tmp_path / "in"), str(target)]) == 1
    assert capsys.readouterr().err == (
        f"minipaged batch: {target} cannot be written: there is no folder {target.parent}\n"
    )


def test_what_the_system_refuses_is_said_in_words(run, tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", prompts(1))

    def full(tasks, engine_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "serve_here", full)
    assert run() == 1
    assert capsys.readouterr().err == f"minipaged batch: {tmp_path / 'out'}: no space left on device\n"
