"""The `minipaged` command: which command runs, what it imports, how it fails."""

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from checkout import ROOT

from minipaged import __version__, cli
from minipaged.commands import CommandError


@pytest.fixture
def fake(monkeypatch):
    """Replace every command by one that records its arguments and does what `fake.action` says."""
    fake = SimpleNamespace(args=None, name=None, action=lambda: 0, __doc__="A fake.")

    def run(args: argparse.Namespace) -> int:
        fake.args = args
        return fake.action()

    def load(name: str) -> SimpleNamespace:
        fake.name = name
        return fake

    fake.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)
    fake.run = run
    monkeypatch.setattr(cli, "load_command", load)
    return fake


def test_command_gets_its_arguments_and_its_exit_code_is_returned(fake):
    fake.action = lambda: 3
    assert cli.main(["demo", "--size", "7"]) == 3
    assert (fake.name, fake.args.size) == ("demo", 7)


def test_command_of_two_words(fake):
    assert cli.main(["bench", "memory", "--size", "2"]) == 0
    assert (fake.name, fake.args.size) == ("bench memory", 2)


def test_failure_is_one_sentence_and_exit_code_1(fake, capsys):
    def fail():
        raise CommandError("no model: run make setup")

    fake.action = fail
    assert cli.main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "minipaged demo: no model: run make setup\n"
    assert captured.out == ""


def test_ctrl_c_is_exit_code_130(fake, capsys):
    def interrupt():
        raise KeyboardInterrupt

    fake.action = interrupt
    assert cli.main(["demo"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(fake):
    def defect():
        raise RuntimeError("a defect")

    fake.action = defect
    with pytest.raises(RuntimeError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["bench"], ["bench", "nonsense"], ["bench", "--help"], []]
)
def test_unknown_command_lists_the_commands_and_is_exit_code_2(arguments, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert "bench memory" in captured.err + captured.out


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in cli.COMMANDS)


def test_wrong_option_is_exit_code_2(fake):
    with pytest.raises(SystemExit) as exit:
        cli.main(["demo", "--sizes-of-things", "1"])
    assert exit.value.code == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_its_help_teaches(name, capsys):
    assert find_spec(f"{cli.COMMANDS[name][0]}.{name.replace(' ', '_')}") is not None
    with pytest.raises(SystemExit) as exit:
        cli.main([*name.split(), "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: minipaged {name}" in printed
    assert len(printed.splitlines()) > 5


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_imports_nothing_heavy(name):
    code = (
        "import sys; from minipaged.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('heavy:', sorted({'torch', 'triton', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *name.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_module_and_console_script_are_the_same_command():
    (script,) = [e for e in entry_points(group="console_scripts") if e.name == "minipaged"]
    assert script.load() is cli.main
    done = subprocess.run([sys.executable, "-m", "minipaged", "-V"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"minipaged {__version__}\n"


@pytest.mark.parametrize("arguments", ["--help", "doctor --help"])
def test_reader_that_leaves_early_causes_no_traceback(arguments):
    command = f"{sys.executable} -m minipaged {arguments} | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_misspelt_command_is_answered_with_the_one_meant(capsys):
    assert cli.main(["generrate"]) == 2
    assert "there is no command 'generrate', did you mean 'generate'?\n" in capsys.readouterr().err


COMPLETE = """source /dev/stdin <<< "$SCRIPT"
COMP_WORDS=($WORDS) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_minipaged minipaged "${COMP_WORDS[-1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("minipaged kern", "kernels"),
        ("minipaged bench t", "throughput"),
        ("minipaged exercises ch", "check"),
        ("minipaged generate --max-to", "--max-tokens"),
        ("minipaged bench throughput --mi", "--mix"),
    ],
)
def test_bash_completes_commands_and_options(capsys, words, found):
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash here")
    assert cli.main(["--print-completion", "bash"]) == 0
    env = {"SCRIPT": capsys.readouterr().out, "WORDS": words}
    done = subprocess.run([bash, "-c", COMPLETE], env=env, capture_output=True, text=True)
    assert found in done.stdout.split(), done.stderr


def test_a_shell_that_is_not_known_is_named(capsys):
    assert cli.main(["--print-completion", "dash"]) == 2
    assert "the shells are bash, " in capsys.readouterr().err
