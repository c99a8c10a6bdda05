"""`minipaged bench throughput`: figures that hold together, for people and for programs."""

import json

import pytest

from coursekit.commands import bench_throughput
from minipaged import cli
from tests.jobs.tiny_jobs import engine_args


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command with a tiny model on requests that its vocabulary can hold."""
    from coursekit import workloads

    requests = [workloads.Request(f"r{n}", [3 + n] * (5 + n), 4 + n) for n in range(6)]
    monkeypatch.setattr(workloads, "load_mix", lambda name: requests)
    model = engine_args(tmp_path).model

    def run(*arguments: str) -> int:
        options = ["--model", model, "--dtype", "float32", "--device", "cpu", "--kv-memory", "1MiB"]
        return cli.main(["bench", "throughput", *options, "--max-model-len", "64", *arguments])

    return run


def test_the_figures_belong_to_the_requests(run, capsys):
    assert run("--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (6, 45, 39)
    assert report["steps"] == 9  # the longest answer; all run at once
    assert report["running_peak"] == 6
    assert report["total_tokens_per_second"] == pytest.approx(report["tokens_per_second"] * (45 + 39) / 39)
    assert 0 < report["ttft_mean"] <= report["ttft_worst"] <= report["seconds"]
    assert 0 < report["share_of_taken"] <= 1 and 0 < report["share_reserved"] <= 1


def test_strips_hold_fewer_tokens_than_blocks(run, capsys):
    run("--json")
    paged = json.loads(capsys.readouterr().out)
    run("--json", "--block-size", "64")
    strips = json.loads(capsys.readouterr().out)
    assert strips["share_of_taken"] < paged["share_of_taken"]


def test_people_get_a_line_for_each_figure_that_the_help_explains(run, capsys):
    assert run("--requests", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("chat48: 2 requests, 11 + 9 tokens, in ")
    names = [line[2:18].strip() for line in out.splitlines() if line.startswith("  ")]
    assert names == [
        "output tokens/s",
        "total tokens/s",
        "time to first",
        "time per token",
        "at once",
        "memory",
    ]
    assert all(f"    {name} " in bench_throughput.__doc__ for name in names)


def test_a_busy_machine_is_said_and_one_token_has_no_time_per_token():
    report = dict.fromkeys(["mix", "model", "dtype", "device"], "x")
    report |= dict.fromkeys(
        ["requests", "prompt_tokens", "output_tokens", "seconds", "steps", "blocks", "block_size"], 1
    )
    report |= dict.fromkeys(["tokens_per_second", "total_tokens_per_second", "ttft_mean", "ttft_worst"], 1.0)
    report |= dict.fromkeys(["running_mean", "running_peak", "share_reserved", "share_of_taken"], 1)
    quiet = bench_throughput.lines(report | {"tpot_mean": None, "foreign_share": 0.05})
    busy = bench_throughput.lines(report | {"tpot_mean": 0.002, "foreign_share": 0.5})
    assert "  time per token   -" in quiet
    assert "  time per token   2.0 ms on average" in busy
    assert busy[-1] == "Other programs used 50% of the processor: the times are partly theirs."
    assert len(busy) == len(quiet) + 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--requests", "0"], "--requests is 0"),
        (["--model", "none"], "no model"),
        (["--dtype", "int3"], "int3"),
    ],
)
def test_what_cannot_run_is_one_sentence(run, capsys, arguments, says):
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err and captured.err.count("\n") == 1
