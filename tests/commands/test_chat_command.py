"""`minipaged chat`: a conversation at a terminal and through a pipe, and what Ctrl-C does to it."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    first, second = [line for line in captured.err.splitlines() if "KV cache" in line]
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


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ("/help", "")),
        ("/exit", ("/quit", "")),
        ("/NEW", ("/new", "")),
        ("/system be brief", ("/system", "be brief")),
        ("/system one\ntwo", ("/system", "one\ntwo")),
        ("/etc/hosts: what is in it?", None),
        ("// a comment", None),
        ("/foo\na pasted text", None),
        ("what does /help do?", None),
    ],
)
def test_a_command_is_told_from_a_message(text, command):
    assert chat.as_command(text) == command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/hlep", "there is no command /hlep: did you mean /help?"),
        ("/xyzzy", "there is no command /xyzzy: /help lists them"),
        ("/new one", "/new stands alone, got 'one' after it"),
    ],
)
def test_a_wrong_command_never_reaches_the_model(monkeypatch, capsys, text, message):
    monkeypatch.setattr("sys.stdin", Terminal(f"{text}\none\n"))
    talked = Chat(make_llm())
    chat.talk(talked, PARAMS)
    assert [m["content"] for m in talked.messages[::2]] == ["one"]
    assert message in capsys.readouterr().err
    with pytest.raises(CommandError, match=re.escape(message)):
        talk(monkeypatch, text)  # a pipe has nobody to read it


def test_help_lists_every_command(monkeypatch, capsys):
    talk(monkeypatch, "/help\n")
    shown = capsys.readouterr().err
    assert all(f"  {name} " in shown for name in chat.COMMANDS)


def test_new_forgets_the_conversation_and_keeps_the_system_message(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/new\ntwo\n"))
    talked = Chat(make_llm(), system="be brief")
    chat.talk(talked, PARAMS)
    assert [m["content"] for m in talked.messages[:2]] == ["be brief", "two"]
    assert len(talked.messages) == 3


@pytest.mark.parametrize(("line", "first"), [("/system be kind", "be kind"), ("/system", "two")])
def test_system_begins_a_conversation_with_other_instructions(monkeypatch, line, first):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"one\n{line}\ntwo\n"))
    talked = Chat(make_llm(), system="be brief")
    chat.talk(talked, PARAMS)
    assert talked.messages[0]["content"] == first


def test_save_writes_the_messages_and_never_over_a_file(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    talked = talk(monkeypatch, f"öne\n/save {file}\n")
    assert json.loads(file.read_text(encoding="utf-8")) == talked.messages
    written = file.read_bytes()
    for line, message in [
        (f"/save {file}", "exists already: give another name"),
        (f"/save {tmp_path}/no/talk.json", "no such file or directory"),
        ("/save", "/save needs the name of a file"),
    ]:
        with pytest.raises(CommandError, match=message):
            talk(monkeypatch, line)
    assert file.read_bytes() == written


def test_a_full_conversation_says_which_command_goes_on(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("short\n" + "x" * 30 + "\n/new\n" + "x" * 30 + "\n"))
    talked = Chat(make_llm(max_model_len=64))
    chat.talk(talked, PARAMS)
    assert "max_model_len is 64: start a new one with /new\n" in capsys.readouterr().err
    assert len(talked.messages) == 2


def test_a_message_too_long_for_any_conversation_is_not_sent_to_new(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("x" * 80 + "\n"))
    chat.talk(Chat(make_llm(max_model_len=64)), PARAMS)
    assert "max_model_len is 64: shorten it\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_model_len", "said"),
    [
        (64, "[cut after 9 tokens, which is --max-tokens]"),
        (25, "max_model_len is 25; /new starts another one]"),
    ],
)
def test_a_cut_answer_says_why(monkeypatch, capsys, max_model_len, said):
    talk(monkeypatch, "one", max_model_len=max_model_len)
    assert said in capsys.readouterr().err


def test_a_long_message_shows_how_much_of_it_is_read(monkeypatch, capsys):
    monkeypatch.setattr(chat, "LONG_MESSAGE", 100)
    talked = Chat(make_llm(max_model_len=512, max_num_batched_tokens=128, max_num_seqs=4))
    chat.answer(talked, "x" * 400, PARAMS, as_json=False, show_reading=True)
    shown = capsys.readouterr().err
    num_tokens = len("user: " + "x" * 400 + "\nassistant: ")
    for text in (f"reading {num_tokens} tokens …", f"… {128 / num_tokens:.0%}", f"… {256 / num_tokens:.0%}"):
        assert text in shown
    assert shown.rindex("reading") < shown.rindex("\x1b[K") < shown.index("[cut")  # it is gone in the end
    assert talked.llm.engine.on_step is None
    chat.answer(talked, "short", PARAMS, as_json=False, show_reading=True)
    assert "reading" not in capsys.readouterr().err


ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")


class Screen:
    """What a terminal shows, read piece by piece, without its control sequences."""

    def __init__(self, master: int):
        self.master, self._unread = master, ""

    def until(self, text: str) -> str:
        """Everything up to and including the next `text`; what comes after it is kept for the next call."""
        end = time.monotonic() + PATIENCE_S
        while text not in (plain := ESCAPES.sub("", self._unread)):
            assert time.monotonic() < end, f"{text!r} did not come, the terminal shows:\n{plain}"
            if select.select([self.master], [], [], 1)[0]:
                self._unread += os.read(self.master, 4096).decode(errors="replace")
        shown, _, self._unread = plain.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@contextmanager
def at_terminal(*command: str) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    """Starts Python with these arguments in a terminal of its own, which Ctrl-C reaches as a signal."""
    master, slave = pty.openpty()
    settings = termios.tcgetattr(master)

    def prepare() -> None:
        # A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},  # nobody answers questions here
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=prepare,
    ) as process:
        try:
            yield Screen(master), process
            assert process.wait(PATIENCE_S) == 0
            assert termios.tcgetattr(master) == settings
        finally:
            process.kill()
            os.close(slave)
            os.close(master)


def test_at_a_terminal_pasted_lines_are_one_message_and_ctrl_c_never_ends(tmp_path):
    """The command itself, with a tiny model."""
    file = tmp_path / "talk.json"
    with at_terminal("-m", "tests.commands.tiny_chat") as (screen, process):
        screen.until("/help lists the commands")
        screen.until(">")
        screen.type("\x1b[200~one\ntwo\nthree\x1b[201~\r")
        screen.until("first token after ")
        screen.until(">")
        screen.type("never sent\x03")  # at the prompt it clears the line
        screen.until(">")
        process.send_signal(signal.SIGINT)  # as does one that comes too late for an answer
        screen.until(">")
        screen.type("\x03\x03")
        screen.until(">")
        screen.type("/hlep\r")
        screen.until("did you mean /help?")
        screen.until(">")
        screen.type("LONG\r")
        screen.until("~")
        screen.type("\x03")
        screen.until("[stopped]")
        screen.until(">")
        screen.type(f"/save {file}\r")
        screen.until("4 messages saved")
        screen.until(">")
        screen.type("\x04")
    said = [message["content"] for message in json.loads(file.read_text()) if message["role"] == "user"]
    assert said == ["one\ntwo\nthree", "LONG"]


@pytest.mark.model
@pytest.mark.slow
def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends():
    """Starts the real command in a terminal of its own, which loads the model: some ten seconds."""
    command = ["-m", "minipaged", "chat", "--dtype", "float32", "--max-tokens", "400"]
    with at_terminal(*command) as (screen, _):
        screen.until(">")
        screen.type("Tell me a very long story about the sea.\r")
        screen.until("sea.\r\n")  # the echo; then a first word of the answer
        screen.until(" ")
        screen.type("\x03")
        screen.until("[stopped]")
        screen.until(">")
        screen.type("What is the capital of France? One word.\r")
        assert "from the prefix cache" in screen.until(" of KV cache; first token after ")
        screen.until(">")
        screen.type("\x04")
