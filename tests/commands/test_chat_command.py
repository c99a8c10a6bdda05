"""`minipaged chat`: a conversation at a terminal and through a pipe, and what Ctrl-C does to it."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from functools import partial

import pytest
from checkout import ROOT

from minipaged import SamplingParams
from minipaged.commands import CommandError, chat, generate
from minipaged.engine.chat import Chat
from tests.engine.fake_chat import make_llm

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PATIENCE_S = 300  # against hanging: each wait takes seconds, on a busy machine some more


class Terminal(io.StringIO):
    """A stdin at which somebody sits."""

    def isatty(self) -> bool:
        return True


def talk(monkeypatch, text: str, **settings) -> Chat:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    talked = Chat(make_llm(**settings))
    chat.talk(talked, PARAMS)
    return talked


def test_each_line_is_a_turn_and_blank_ones_are_none(monkeypatch, capsys):
    talked = talk(monkeypatch, "one\n\n  \ntwo")
    said = [message["content"] for message in talked.messages if message["role"] == "user"]
    assert said == ["one", "two"]
    captured = capsys.readouterr()
    assert captured.out == "".join(m["content"] + "\n" for m in talked.messages if m["role"] == "assistant")
    first, second = captured.err.splitlines()
    assert "from the prefix cache" not in first
    assert "from the prefix cache) + 9 tokens in " in second


@pytest.mark.parametrize("word", ["/quit", "/exit", " /quit "])
def test_a_word_ends_it(monkeypatch, word):
    assert len(talk(monkeypatch, f"one\n{word}\ntwo\n").messages) == 2


def test_nothing_said_is_no_error(monkeypatch, capsys):
    assert talk(monkeypatch, "").messages == []
    assert capsys.readouterr() == ("", "")


def test_json_is_one_object_a_turn(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    chat.talk(Chat(make_llm()), PARAMS, as_json=True)
    captured = capsys.readouterr()
    turns = [json.loads(line) for line in captured.out.splitlines()]
    assert captured.err == ""
    assert [turn["output_tokens"] for turn in turns] == [9, 9]
    assert turns[0]["cached_tokens"] == 0 < turns[1]["cached_tokens"]


def test_a_conversation_too_long_ends_a_pipe_but_not_a_person(monkeypatch, capsys):
    with pytest.raises(CommandError, match=r"the conversation has \d+ tokens, max_model_len is 64"):
        talk(monkeypatch, "x" * 80, max_model_len=64)
    monkeypatch.setattr("sys.stdin", Terminal("x" * 80 + "\nshort\n"))
    talked = Chat(make_llm(max_model_len=64))
    chat.talk(talked, PARAMS)
    assert [m["content"] for m in talked.messages[::2]] == ["short"]
    assert "max_model_len is 64" in capsys.readouterr().err


def test_input_that_is_no_text_is_one_sentence(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xe9t\xe9\n"), encoding="utf-8"))
    with pytest.raises(CommandError, match="the input is not utf-8"):
        chat.talk(Chat(make_llm()), PARAMS)


def test_ctrl_c_in_an_answer_keeps_the_conversation(monkeypatch, capsys):
    talked = Chat(make_llm())

    def shown(outputs, show):
        for output in outputs:
            if len(output.outputs[0].token_ids) == 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat, "show_stream", shown)
        chat.answer(talked, "one", PARAMS, as_json=False)
    assert "[stopped]" in capsys.readouterr().err
    assert [message["role"] for message in talked.messages] == ["user", "assistant"]
    assert len(talked.messages[1]["content"]) > 0
    assert not talked.llm.engine.has_unfinished_requests()
    chat.answer(talked, "two", PARAMS, as_json=False)
    assert len(talked.messages) == 4
    assert chat.show_stream is generate.show_stream


class Screen:
    """What a terminal shows, read piece by piece."""

    def __init__(self, master: int):
        self.master, self._unread = master, ""

    def until(self, text: str) -> str:
        """Everything up to and including the next `text`; what comes behind it is kept for the next call."""
        end = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            assert time.monotonic() < end, f"{text!r} did not come, the terminal shows:\n{self._unread}"
            if select.select([self.master], [], [], 1)[0]:
                self._unread += os.read(self.master, 4096).decode(errors="replace")
        shown, _, self._unread = self._unread.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@pytest.mark.model
@pytest.mark.slow
def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends():
    """Starts the real command in a terminal of its own, which loads the model: some ten seconds."""
    master, slave = pty.openpty()
    settings = termios.tcgetattr(master)
    command = [sys.executable, "-m", "minipaged", "chat", "--dtype", "float32", "--max-tokens", "400"]
    # A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=listening,
    ) as process:
        screen = Screen(master)
        try:
            screen.until("> ")
            screen.type("Tell me a very long story about the sea.\n")
            screen.until("sea.\r\n")  # the echo; then a first word of the answer
            screen.until(" ")
            process.send_signal(signal.SIGINT)
            screen.until("[stopped]")
            screen.until("> ")
            screen.type("What is the capital of France? One word.\n")
            assert "from the prefix cache" in screen.until(" of KV cache; first token after ")
            screen.until("> ")
            screen.type("\x04")
            assert process.wait(PATIENCE_S) == 0
            assert termios.tcgetattr(master) == settings
        finally:
            process.kill()
            os.close(slave)
            os.close(master)
