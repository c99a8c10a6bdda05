"""`minipaged top`: the memory of a real server, drawn in a terminal."""

import io
import os
import threading

import pytest

pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")

import httpx
from rich.console import Console
from tiny import running, tiny_llm

from coursekit.commands.top import watch
from coursekit.live import FREE, PART, SHARED, USED
from minipaged import cli
from minipaged.commands import CommandError

pytestmark = pytest.mark.serve


def console(out, is_terminal, width=80, height=24):
    return Console(file=out, force_terminal=is_terminal, color_system=None, width=width, height=height)


def test_without_a_terminal_one_picture_is_printed():
    out = io.StringIO()
    with running(tiny_llm(num_blocks=200)) as server:
        watch(server.url, console(out, False))
    first, *rows, cell, legend = out.getvalue().splitlines()
    assert first == "tiny: 0 run, 0 wait, 0 of 200 blocks held (0%), 0.0 tokens/s"
    assert [len(row) for row in rows] == [78, 78, 50] and set("".join(rows)) == {" ", FREE}
    assert cell == "one cell: a block of 8 tokens"


def test_a_terminal_is_redrawn_while_requests_run_and_says_when_the_server_has_ended():
    out = io.StringIO()
    with running(tiny_llm(num_blocks=200)) as server:
        watching = threading.Thread(target=watch, args=(server.url, console(out, True)))
        watching.start()
        server.wait_until(lambda: "0 run, 0 wait" in out.getvalue())
        ask = {"prompt": "a" * 30, "n": 3, "max_tokens": 60, "seed": 1, "ignore_eos": True}
        httpx.post(f"{server.url}/page/control", json={"delay": 0.05})
        httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60)
    watching.join(60)
    shown = out.getvalue()
    assert "3 run, 0 wait" in shown and f"{server.url} has ended" in shown
    for symbol in (USED, PART, SHARED):
        assert f"  {symbol}" in shown or symbol * 2 in shown or f"{USED}{symbol}" in shown


def test_a_pool_that_is_too_large_says_what_it_leaves_out():
    out = io.StringIO()
    with running(tiny_llm(num_blocks=200)) as server:
        watch(server.url, console(out, False, width=24, height=8))
    assert len(out.getvalue().splitlines()) == 6
    assert "one cell: a block of 8 tokens; 140 more are not shown" in out.getvalue()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:no"])
def test_no_server_is_one_sentence(capsys, address):
    assert cli.main(["top", address]) == 1
    assert f"no `minipaged serve` answers at {address}" in capsys.readouterr().err


def test_a_key_is_taken_from_the_environment(monkeypatch):
    out = io.StringIO()
    with running(tiny_llm(), api_key="secret") as server:
        with pytest.raises(CommandError, match="status 401"):
            watch(server.url, console(out, False))
        monkeypatch.setitem(os.environ, "MINIPAGED_API_KEY", "secret")
        watch(server.url, console(out, False))
    assert "0 of 128 blocks held" in out.getvalue()
